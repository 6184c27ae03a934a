"""A commit that provably sent nothing has failed, and its term continues; any other doubt ends the term."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import CommitUnknownError, FencedError, KeyExistsError, ReadOnlyError, StorageError
from ckptstore.formats.history.records import slot_key
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.term import open_term
from tests.log.log_world import HASTE, FaultyBackend, World, save
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.ramfs import RamPosix


class Refusing(FaultyBackend):
    """Creates of slot 1 fail in the ways of `turns`, one after another; later ones succeed."""

    def __init__(self, world: World, *turns: str) -> None:
        super().__init__(world, lambda _operation, _key: "ok")
        self.turns = list(turns)
        self.tried: list[bytes] = []

    def create(self, key: str, data: bytes) -> None:
        if key != slot_key(1) or not self.turns:
            super().create(key, data)
            return
        self.tried.append(data)
        turn = self.turns.pop(0)
        if turn == "landed":
            self.world.create(key, data)
        elif turn == "late":
            self.world.net.append((key, data))
        error = StorageError(errno.ENOSPC, "no space", key)
        error.unsent = turn == "unsent"
        raise error


TRIES = HASTE.tries + 1


def test_a_commit_that_sent_nothing_has_failed_and_the_slot_takes_other_bytes() -> None:
    world = World()
    backend = Refusing(world, *["unsent"] * TRIES)
    term = open_term(Journal(backend, world.fmt), None, patience=HASTE)
    with pytest.raises(StorageError, match="no space"):
        save(term, 1)
    assert (term.dead, term.next_seq, len(set(backend.tried))) == (None, 1, 1)
    assert save(term, 2).step == 2
    assert [entry.step for entry in read(Journal(world, world.fmt)).catalog.checkpoints.values()] == [2]


@pytest.mark.parametrize("when", range(TRIES))
@pytest.mark.parametrize("doubt", ["error", "late"])
def test_one_attempt_in_doubt_leaves_the_commit_in_doubt(when: int, doubt: str) -> None:
    """Whichever attempt it was: the create that it sent may take effect at any later time."""
    world = World()
    turns = ["unsent"] * TRIES
    turns[when] = doubt
    term = open_term(Journal(Refusing(world, *turns), world.fmt), None, patience=HASTE)
    with pytest.raises(CommitUnknownError, match="slot 1"):
        save(term, 1)
    with pytest.raises(CommitUnknownError):
        save(term, 2)


def test_an_attempt_that_landed_is_found_and_counts() -> None:
    world = World()
    term = open_term(Journal(Refusing(world, "unsent", "landed"), world.fmt), None, patience=HASTE)
    save(term, 1)
    save(term, 2)
    assert len(world.canon) == 3


def test_whose_attempt_failed_and_finds_another_term_is_fenced() -> None:
    world = World()
    backend = Refusing(world, "unsent")
    term = open_term(Journal(backend, world.fmt), None, patience=HASTE)
    open_term(Journal(world, world.fmt), None, patience=HASTE)
    with pytest.raises(FencedError):
        save(term, 1)


# Which failures of a folder are certain


CERTAIN = [("open", errno.ENOSPC), ("open", errno.EMFILE), ("open", errno.EROFS), ("pwrite", errno.ENOSPC)]
CERTAIN += [("pwrite", errno.EIO), ("link", errno.ENOSPC), ("link", errno.EDQUOT)]
DOUBTFUL = [("link", errno.EIO), ("link", errno.EROFS), ("link", errno.EEXIST)]


FAILURES = [(*one, True) for one in CERTAIN] + [(*one, False) for one in DOUBTFUL]


@pytest.mark.parametrize(("call", "code", "certain"), FAILURES)
def test_a_failure_before_the_name_was_given_made_nothing(call: str, code: int, certain: bool) -> None:
    disk = RamPosix()
    LocalBackend("/store", disk).create("log/0", b"x")
    backend = LocalBackend(
        "/store", FaultyPosix(disk, Fault(frozenset({call}), 2 if call == "open" else 1, None, code))
    )
    with pytest.raises(StorageError) as told:
        backend.create("log/1", b"x")
    assert told.value.unsent == certain
    assert isinstance(told.value, KeyExistsError) == (code == errno.EEXIST)
    assert isinstance(told.value, ReadOnlyError) == (code == errno.EROFS)


def test_a_failure_after_the_name_was_given_is_in_doubt() -> None:
    disk = RamPosix()
    LocalBackend("/store", disk).create("log/0", b"x")
    said: list[bool] = []
    there: list[bool] = []
    for nth in range(1, 8):
        backend = LocalBackend("/store", FaultyPosix(disk, Fault(frozenset({"fsync"}), nth, None, errno.EIO)))
        key = f"log/{nth}"
        unsent = False
        try:
            backend.create(key, b"x")
        except StorageError as error:
            unsent = error.unsent
        said.append(not unsent)
        there.append(key in LocalBackend("/store", disk).list("log/"))
    assert said == there
    assert True in said
    assert False in said


def test_where_link_may_have_happened_all_the_same_it_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RamPosix, "file_system", lambda _self, _fd: 0x9123683E)  # Btrfs
    disk = RamPosix()
    backend = LocalBackend("/store", FaultyPosix(disk, Fault(frozenset({"link"}), 1, None, errno.ENOSPC)))
    with pytest.raises(StorageError) as told:
        backend.create("log/1", b"x")
    assert not told.value.unsent


# Real media


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the given options at a new folder, or remounts it."""
    place = tmp_path / "medium"

    def mounted(options: str) -> Path:
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr!r}")
        return place

    if os.geteuid():
        pytest.skip("only root mounts")
    yield mounted
    subprocess.run(["umount", "-l", place], capture_output=True, check=False)


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, step, "<f4")}


@pytest.mark.usefixtures("haste")
def test_a_medium_without_inodes_ends_no_writer(mount: Callable[[str], Path]) -> None:
    place = mount("size=50m,nr_inodes=14")
    store = ckptstore.open(place / "s")
    saved: list[int] = []
    codes: set[int | None] = set()
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 20):
            try:
                saved.append(writer.save(state(step), step).step)
            except StorageError as error:
                codes.add(error.errno)
        assert 0 < len(saved) < 19
        assert codes == {errno.ENOSPC}
        first = sorted(place.glob("s/seg/*/*"))[0]
        first.unlink()
        mount("remount,size=50m,nr_inodes=100")
        saved.append(writer.save(state(20), 20).step)
    assert [info.step for info in store.checkpoints()] == saved


@pytest.mark.usefixtures("haste")
def test_a_medium_that_is_read_only_for_a_while_ends_no_writer(mount: Callable[[str], Path]) -> None:
    place = mount("size=50m")
    store = ckptstore.open(place / "s")
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        mount("remount,ro")
        with pytest.raises(ReadOnlyError):
            writer.tag("x", 1)
        mount("remount,rw")
        writer.save(state(2), 2)
        writer.tag("x", 1)
    assert store.tags().keys() == {"x"}
    assert store.verify().ok
