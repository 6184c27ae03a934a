"""A store that is moved, replaced or deleted while it is open: nothing is written to a store that nobody opened."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.backends.base import OBJECT_LIMIT
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.errors import (
    CkptError,
    FencedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ckptstore.formats.history.records import slot_key
from ckptstore.log.journal import Journal
from ckptstore.log.term import open_term
from ckptstore.store import open as open_store
from ckptstore.store import verify
from ckptstore.write.writer import Writer
from tests.log.log_world import HASTE, FaultyBackend, World, save


def state(step: int) -> dict[str, Any]:
    return {"weight": np.full(1000, step, dtype=np.float32)}


def check(path: Path, steps: list[int], ref: str = "{}") -> None:
    """The store at `path` is intact, and has these checkpoints."""
    store = open_store(path, create=False)
    assert verify(store).ok
    assert {info.step for info in store.checkpoints()} >= set(steps)
    for step in steps:
        loaded = store.load(ref.format(step), framework="numpy")
        np.testing.assert_array_equal(loaded["weight"], state(step)["weight"])


def writer_of(path: Path) -> Writer:
    return open_store(path).writer(poll_seconds=None)


def test_a_writer_continues_in_its_store_when_that_is_moved(tmp_path: Path) -> None:
    with writer_of(tmp_path / "run") as writer:
        writer.save(state(1), step=1)
        (tmp_path / "run").rename(tmp_path / "run.old")
        writer.save(state(2), step=2)
        assert not (tmp_path / "run").exists(), "nothing is made at the old place"
    check(tmp_path / "run.old", [1, 2])


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_new_run_at_the_old_place_never_receives_a_slot_of_the_old_writer(tmp_path: Path, before: int) -> None:
    with writer_of(tmp_path / "run") as old:
        for step in range(1, before + 1):
            old.save(state(step), step=step)
        (tmp_path / "run").rename(tmp_path / "run.old")
        with writer_of(tmp_path / "run") as new:
            for step in (1, 2):
                new.save(state(step), step=step)
                old.save(state(10 + step), step=10 + step)
    check(tmp_path / "run", [1, 2])
    check(tmp_path / "run.old", [*range(1, before + 1), 11, 12])
    assert {info.step for info in open_store(tmp_path / "run").checkpoints()} == {1, 2}


def test_an_older_copy_put_in_place_of_a_store_receives_nothing(tmp_path: Path) -> None:
    with writer_of(tmp_path / "run") as writer:
        writer.save(state(1), step=1)
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        writer.save(state(2), step=2)
        (tmp_path / "run").rename(tmp_path / "run.old")
        (tmp_path / "backup").rename(tmp_path / "run")
        writer.save(state(3), step=3)
    check(tmp_path / "run.old", [1, 2, 3])
    check(tmp_path / "run", [1])
    assert [info.step for info in open_store(tmp_path / "run").checkpoints()] == [1]


def test_a_deleted_store_is_reported_and_the_same_object_creates_it_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    writer = store.writer(poll_seconds=None)
    writer.save(state(1), step=1)
    run = store.run
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreNotFoundError, match="was deleted while it was open"):
        writer.save(state(2), step=2)
    for ask in (store.checkpoints, store.view, lambda: verify(store), lambda: store.load("latest")):
        with pytest.raises(StoreNotFoundError, match="was deleted while it was open"):
            ask()
    with pytest.raises(StoreNotFoundError, match=r"deleted while it was open; .* Store\.create"):
        store.writer(poll_seconds=None)
    assert not (tmp_path / "run").exists()
    store.create()
    with store.writer(poll_seconds=None) as anew:
        anew.save(state(5), step=5)
        with pytest.raises(CkptError):
            writer.save(state(3), step=3)
    writer.close()
    assert store.run != run
    check(tmp_path / "run", [5])
    assert [info.step for info in store.checkpoints()] == [5]


def test_a_store_that_was_deleted_and_made_again_by_others_is_not_written_to(tmp_path: Path) -> None:
    with writer_of(tmp_path / "run") as old:
        old.save(state(1), step=1)
        shutil.rmtree(tmp_path / "run")
        with writer_of(tmp_path / "run") as new:
            new.save(state(7), step=7)
        with pytest.raises(StoreNotFoundError, match="deleted"):
            old.save(state(2), step=2)
    check(tmp_path / "run", [7])


def test_a_store_reached_through_a_link_is_the_one_the_link_led_to(tmp_path: Path) -> None:
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk2").mkdir()
    (tmp_path / "run").symlink_to("disk1")
    with writer_of(tmp_path / "run") as writer:
        writer.save(state(1), step=1)
        (tmp_path / "run").unlink()
        (tmp_path / "run").symlink_to("disk2")
        writer.save(state(2), step=2)
    check(tmp_path / "disk1", [1, 2])
    assert list((tmp_path / "disk2").iterdir()) == []


def test_a_store_whose_old_place_is_gone_is_written_to_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "old" / "run").mkdir(parents=True)
    backend = LocalBackend(tmp_path / "old" / "run")
    (tmp_path / "old" / "run").rename(tmp_path / "run")
    shutil.rmtree(tmp_path / "old")
    backend.create("log/0", b"x")
    assert (tmp_path / "run" / "log" / "0").read_bytes() == b"x"


def test_a_store_that_is_closed_holds_no_folder(tmp_path: Path) -> None:
    def held() -> list[str]:
        places = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
        return [place for place in places if place.startswith(str(tmp_path / "run"))]

    with open_store(tmp_path / "run") as store:
        with store.writer(poll_seconds=None) as writer:
            writer.save(state(1), step=1)
        assert len(store.checkpoints()) == 1
        assert held()
    assert held() == []
    with pytest.raises(CkptError):
        store.load("latest")


# A folder below the store


@pytest.mark.usefixtures("haste")
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("anew", ["nothing", "empty", "foreign", "made again"])
def test_a_log_that_is_swapped_under_a_writer_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: str, looks: bool
) -> None:
    """The writer notices it by a look at its last slot before each commit; or by the folder, if the slot is absent."""
    monkeypatch.setattr(LocalBackend, "cheap_looks", looks)
    with writer_of(tmp_path / "other") as other:
        other.save(state(1), step=1)
    writer = writer_of(tmp_path / "run")
    writer.save(state(1), step=1)
    if anew == "made again":  # and is likely to get the number of the one before
        shutil.rmtree(tmp_path / "run" / "log")
    else:
        (tmp_path / "run" / "log").rename(tmp_path / "log")
    if anew in ("empty", "made again"):
        (tmp_path / "run" / "log").mkdir()
    elif anew == "foreign":
        (tmp_path / "other" / "log").rename(tmp_path / "run" / "log")
    before = sorted(path.name for path in (tmp_path / "run").glob("log/*"))
    with pytest.raises(CkptError) as caught:
        writer.save(state(2), step=2)
    chain = [str(error) for error in (caught.value, caught.value.__cause__) if error]
    if looks:
        assert "the store was put back from a copy, or has lost slots" in chain[0]
    else:
        assert any("moved, deleted or replaced" in text or "store was replaced" in text for text in chain), chain
    assert sorted(path.name for path in (tmp_path / "run").glob("log/*")) == before
    writer.close()


def test_a_folder_moved_out_between_link_and_acknowledgement_is_not_acknowledged(tmp_path: Path) -> None:
    class Moving(Posix):
        def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
            super().link(source, target, dir_fd)
            if target == "1":
                (tmp_path / "run" / "log").rename(tmp_path / "log")
                (tmp_path / "run" / "log").mkdir()

    backend = LocalBackend(tmp_path / "run", Moving())
    backend.create("log/0", b"x")
    with pytest.raises(StorageError, match="moved, deleted or replaced") as caught:
        backend.create("log/1", b"x")
    assert not isinstance(caught.value, KeyExistsError)
    assert list((tmp_path / "run" / "log").iterdir()) == []
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("harm", ["moved", "removed", "replaced"])
def test_a_segment_that_left_the_store_while_it_was_written_is_not_sealed(tmp_path: Path, harm: str) -> None:
    backend = LocalBackend(tmp_path / "run")
    sink = backend.open_sink("seg/0000000001/a", 0)
    folder = tmp_path / "run" / "seg" / "0000000001"
    if harm == "moved":
        folder.rename(tmp_path / "away")
    else:
        (folder / "a").unlink()
    if harm == "replaced":
        (folder / "a").write_bytes(b"another")
    with pytest.raises(StorageError, match="replaced while it was written" if harm == "replaced" else "No such file"):
        sink.seal(0)
    sink.abort()


def test_a_folder_of_segments_that_someone_removed_is_made_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "run")
    backend.open_sink("seg/0000000001/a", 0).seal(0)
    shutil.rmtree(tmp_path / "run" / "seg" / "0000000001")
    (tmp_path / "keeps-the-number").mkdir()
    backend.open_sink("seg/0000000001/b", 0).seal(0)
    assert backend.list("") == ["seg/0000000001/b"]


# Handles


def test_many_open_stores_hold_few_descriptors_and_none_afterwards(tmp_path: Path) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with writer_of(tmp_path / "run") as writer:
        writer.save(state(1), step=1)
    before = held()
    stores = [open_store(tmp_path / "run") for _ in range(20)]
    for store in stores:
        store.checkpoints()
        store.load("latest", framework="numpy")
    assert held() - before <= 20 * 2  # the store, and pins/
    del store, stores
    assert held() <= before


def test_no_warning_of_an_open_file_at_the_end(tmp_path: Path) -> None:
    script = (
        "import sys, ckptstore; store = ckptstore.open(sys.argv[1]); writer = store.writer();"
        "writer.save({'a': 1}, step=1); writer.close()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, tmp_path / "run"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_forked_child_reads_and_writes_through_the_same_handle(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "run")
    backend.create("log/0", b"parent")
    (tmp_path / "run").rename(tmp_path / "moved")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            backend.create("log/1", backend.get("log/0"))
            backend.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.get("log/1") == b"parent"


def test_a_handle_opens_the_store_that_exists_at_its_first_read(tmp_path: Path) -> None:
    reader = LocalBackend(tmp_path / "run")
    with pytest.raises(KeyNotFoundError):
        reader.get("FORMAT")
    assert reader.list("") == []
    LocalBackend(tmp_path / "run").create("FORMAT", b"x")
    assert reader.get("FORMAT") == b"x"
    (tmp_path / "run").rename(tmp_path / "moved")
    assert reader.get("FORMAT") == b"x"
    shutil.rmtree(tmp_path / "moved")
    for ask in (lambda: reader.get("FORMAT"), lambda: reader.size("log/1"), lambda: reader.list("")):
        with pytest.raises(StoreNotFoundError):
            ask()
    with pytest.raises(StoreNotFoundError):
        reader.create("log/1", b"x")
    with pytest.raises(StoreNotFoundError):
        reader.open_sink("seg/1/x", 0)
    assert reader.deleted()


# Media without handles


class Named(FaultyBackend):
    """A medium that is accessed only by names: replacing a store by another changes their meaning."""

    anchored = False

    def __init__(self, world: World) -> None:
        super().__init__(world, lambda _operation, _key: "ok")

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        return super().get(key, limit)


def world_with_format() -> World:
    from ckptstore.formats.history.record_text import encode_format

    world = World()
    world.create("FORMAT", encode_format(world.fmt))
    return world


def test_a_commit_to_another_runs_store_is_refused_where_there_are_no_handles() -> None:
    world = world_with_format()
    backend = Named(world)
    term = open_term(Journal(backend, world.fmt), None, patience=HASTE)
    save(term, 1)
    backend.world = other = world_with_format()
    for _ in range(2):
        with pytest.raises(StoreReplacedError, match=f"of run {other.fmt.run}"):
            save(term, 2)
    assert isinstance(term.dead, StoreReplacedError)
    assert other.list("log/") == []
    with pytest.raises(StoreReplacedError):
        open_term(Journal(backend, world.fmt), None, patience=HASTE)
    assert other.list("log/") == []


def test_a_commit_to_a_deleted_store_is_refused_where_there_are_no_handles() -> None:
    world = world_with_format()
    backend = Named(world)
    term = open_term(Journal(backend, world.fmt), None, patience=HASTE)
    backend.world = World()
    with pytest.raises(StoreReplacedError, match="deleted"):
        save(term, 1)
    assert backend.world.list("") == []


@pytest.mark.parametrize("handles", [True, False])
def test_a_slot_that_was_read_back_and_is_another_runs_says_so(handles: bool) -> None:
    """Also if FORMAT was checked just before: the store may be replaced in between."""
    world, other = world_with_format(), world_with_format()
    theirs = open_term(Journal(other, other.fmt), None, patience=HASTE)
    save(theirs, 1)

    class Replaced(Named):
        anchored = handles

        def create(self, key: str, data: bytes) -> None:
            if key == slot_key(1):
                self.world = other
            super().create(key, data)

    term = open_term(Journal(Replaced(world), world.fmt), None, patience=HASTE)
    with pytest.raises(StoreReplacedError, match="the store was replaced: slot 1 is of run"):
        save(term, 1)
    assert isinstance(term.dead, StoreReplacedError)


def test_an_open_that_meets_another_runs_slot_says_so() -> None:
    world, other = world_with_format(), world_with_format()
    open_term(Journal(other, other.fmt), None, patience=HASTE)

    class Replaced(Named):
        anchored = True

        def create(self, key: str, data: bytes) -> None:
            self.world = other
            super().create(key, data)

    with pytest.raises(StoreReplacedError, match="slot 0 is of run"):
        open_term(Journal(Replaced(world), world.fmt), None, patience=HASTE)
    assert len(other.list("log/")) == 1


# Two ranks


def opened_by(world: World, pid: int, time: Callable[[], float] | None = None) -> Any:
    return open_term(world.journal, None, {"host": "node", "pid": pid}, HASTE)


def test_two_ranks_that_both_open_a_writer_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    now = [1000.0]
    monkeypatch.setattr("ckptstore.log.term.time.time", lambda: now[0])
    first = opened_by(world, 1)
    now[0] += 3
    opened_by(world, 2)
    with pytest.raises(FencedError, match=r"only one may open a writer \(rank 0, say\)"):
        save(first, 1)


@pytest.mark.parametrize(("pid", "later"), [(1, 3.0), (2, 61.0)])
def test_a_later_take_over_is_only_named(monkeypatch: pytest.MonkeyPatch, pid: int, later: float) -> None:
    world = World()
    now = [1000.0]
    monkeypatch.setattr("ckptstore.log.term.time.time", lambda: now[0])
    first = opened_by(world, 1)
    now[0] += later
    opened_by(world, pid)
    with pytest.raises(FencedError, match=f"term 2 was opened after it .host node, pid {pid}.$"):
        save(first, 1)
