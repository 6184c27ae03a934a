"""The rule ``space``: a store never takes more than its limit, and what does not fit is refused before a byte."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, Store
from ckptstore.agent.protocol.message_fields import options_form, read_options
from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError, UsageError
from ckptstore.formats.history.space_limits import SpaceLimit, space_limit
from ckptstore.log.pins import Pin
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.writer_options import WriterOptions

KIB = 1 << 10
CHAIN = DeltaOptions(interval=1)


class Metered(Posix):
    """The real system calls; after each that may take space, the store's segments and spare files are added up.

    No file changes its size or its place meanwhile: a segment that became a spare file would count twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.most = 0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            result = super().pwrite(fd, data, offset)
            self._measure()
        return result

    def fallocate(self, fd: int, size: int) -> None:
        with self._lock:
            super().fallocate(fd, size)
            self._measure()

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().ftruncate(fd, size)

    def rename_exclusive(self, source: str, target: str, dir_fd: int | None = None) -> None:
        with self._lock:
            super().rename_exclusive(source, target, dir_fd)

    def replace(self, source: str, target: str, dir_fd: int | None = None) -> None:
        with self._lock:
            super().replace(source, target, dir_fd)

    def rename_between(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        with self._lock:
            super().rename_between(source, source_fd, target, target_fd)

    def unlink(self, path: str, dir_fd: int | None = None) -> None:
        with self._lock:
            super().unlink(path, dir_fd)

    def _measure(self) -> None:
        total = 0
        for place in ("seg", ".spare"):
            for path in (self._folder / place).rglob("*"):
                found = os.lstat(path)
                # Whole blocks of its length: the file system's own maps of long files are not counted.
                total += min(found.st_blocks * 512, -(-found.st_size // 4096) * 4096) if path.suffix else 0
        self.most = max(self.most, total)


class _MeteredMemory(MemoryBackend):
    most = 0

    def begin_save(self) -> Any:
        self.measure()
        return super().begin_save()

    def measure(self) -> None:
        self.most = max(self.most, self.segments_nbytes())

    def create(self, key: str, data: bytes) -> None:
        self.measure()
        super().create(key, data)


def state(step: int, nbytes: int = 256 * KIB) -> dict[str, Any]:
    return {"w": np.full(nbytes // 8, step, "f4"), "m": np.arange(nbytes // 8, dtype="f4") + step}


def one_full() -> int:
    """Bytes of a full of `state`, in whole blocks."""
    backend = MemoryBackend("one-full")
    with Store(backend).writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
    (entry,) = Store(backend).view().catalog.segments.values()
    MemoryBackend.forget("one-full")
    return -(-entry.size // 4096) * 4096


@pytest.fixture
def memory() -> Iterator[_MeteredMemory]:
    yield _MeteredMemory("space-limit")
    MemoryBackend.forget("space-limit")


def steps(store: Store) -> list[int]:
    return [info.step for info in store.checkpoints()]


# -- the bound


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
@pytest.mark.parametrize("medium", ["disk", "recycled", "pmem"])
def test_a_run_of_n_saves_in_flight_never_takes_more_than_n_and_one_states(
    tmp_path: Path, medium: str, in_flight: int
) -> None:
    posix = Metered(tmp_path / "store")
    backend: Backend
    if medium == "pmem":
        backend = PmemBackend(tmp_path / "store", posix)
    else:
        backend = LocalBackend(tmp_path / "store", posix, recycle="always" if medium == "recycled" else "never")
    store = Store(backend)
    with store.writer(
        keep=["last:1"], space=f"{in_flight + 1} states", max_in_flight=in_flight, threads=1, poll_seconds=None
    ) as writer:
        for step in range(1, 2 * in_flight + 4):
            writer.save_async(state(step), step)
    last = 2 * in_flight + 3
    assert steps(store) == [last]
    assert store.load()["w"][0] == last
    assert in_flight * one_full() < posix.most <= (in_flight + 1) * one_full()


def test_in_a_bucket(memory: _MeteredMemory) -> None:
    """Like every medium that cannot say how much is free: the bytes of its listed segments count."""
    store = Store(memory)
    with store.writer(keep=["last:1"], space="3 states", max_in_flight=2, threads=1, poll_seconds=None) as writer:
        for step in range(1, 12):
            writer.save_async(state(step), step)
    memory.measure()
    assert steps(store) == [11]
    assert one_full() < memory.most <= 3 * one_full()


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("coding", [{"deltas": CHAIN}, {"diffs": DiffOptions(full_every=1000, batch=2)}])
def test_a_chain_ends_before_it_fills_the_space(tmp_path: Path, last: int, coding: dict[str, Any]) -> None:
    """No save of a long run is refused, and the chains grow: a chain that nothing ends would take all."""
    posix = Metered(tmp_path / "store")
    store = Store(LocalBackend(tmp_path / "store", posix))
    rng = np.random.default_rng(0)
    values = rng.standard_normal(64 * KIB // 4).astype("f4")
    limit = 3 + 2 * last
    with store.writer(keep=[f"last:{last}"], space=f"{limit} states", poll_seconds=None, **coding) as writer:
        pending = []
        for step in range(1, 31):
            values[rng.integers(0, len(values), len(values) // 4)] += 1e-3
            pending.append(writer.save_async({"w": values}, step))
    kinds = [one.result().kind for one in pending]
    assert kinds[1] != "full"
    assert kinds.count("full") > 1
    assert steps(store) == list(range(31 - last, 31))
    assert posix.most <= limit * 68 * KIB
    assert store.load()["w"].tobytes() == values.tobytes()


def test_with_little_space_no_chain_begins(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(keep=["last:1"], space="2 states", deltas=CHAIN, poll_seconds=None) as writer:
        for step in range(1, 5):
            writer.save(state(step), step)
    assert {edge.kind for edges in store.view().catalog.encodings.values() for edge in edges} == {"full"}


def test_mapped_segments_are_claimed_before_they_are_filled(tmp_path: Path) -> None:
    posix = Metered(tmp_path / "store")
    store = Store(PmemBackend(tmp_path / "store", posix))
    layers = {"all": ("w", "m")}
    with store.writer(keep=["last:1"], space="2 states", max_in_flight=2, poll_seconds=None) as writer:
        for step in range(1, 6):
            save = writer.begin(state(step), step, layers, direct=True)
            save.ready("all")
            save.finish().result()
        assert posix.most < 2 * (one_full() + 80 * KIB)  # a header may grow: there is space for that
        writer.tag("good")
        writer.save(state(6), 6)
        with pytest.raises(StorageError, match="space:2states"):
            writer.begin(state(7), 7, layers, direct=True)
    assert steps(store) == [5, 6]


# -- refusals


def test_what_does_not_fit_is_refused_before_a_byte_and_the_error_says_who_holds_the_space(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")

    def files() -> list[tuple[Path, int]]:
        return sorted((path, path.stat().st_size) for path in (tmp_path / "store" / "seg").rglob("*.safetensors"))

    with store.writer(keep=["last:1"], space="2 states", poll_seconds=None) as writer:
        writer.save(state(1), 1, tags="good")
        writer.save(state(2), 2)
        before = files()
        with pytest.raises(StorageError, match=r"the rule space:2states allows 532,480 .*nothing was written") as e:
            writer.save(state(3), 3)
        assert e.value.errno == errno.ENOSPC
        assert "tags good keep 1@1: 260 KiB" in str(e.value)
        assert "last:1 keep 2@1: 260 KiB" in str(e.value)
        assert files() == before
        assert steps(store) == [1, 2]
        writer.untag("good")
        writer.save(state(4), 4)  # retires step 1 before it writes
        assert steps(store) == [4]
        with Pin(store.backend, store.checkpoints()[-1].segments):
            writer.save(state(5), 5)
            with pytest.raises(StorageError, match=rf"a reader \(host .*, pid {os.getpid()}\) has pinned 1 deleted"):
                writer.save(state(6), 6)
        writer.save(state(7), 7)
        assert steps(store) == [7]


@pytest.mark.parametrize("bad", ["1 state", "1states", 0, -1, "many", True, 2.5, "4 GB/s", "3 stat"])
def test_a_limit_that_is_none(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match=r"space: .*pass bytes .* or a number of states from 2 on"):
        ckptstore.open(tmp_path / "store").writer(space=bad, keep=["last:1"])


def test_a_limit_needs_a_rule_that_says_what_stays(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    for keep in (None, [], ["space:3MB"]):
        with pytest.raises(
            UsageError, match=r"space:4GB limits the space, and no rule says .*\['last:2', 'space:4GB'\]"
        ):
            store.writer(space="4GB", keep=keep)
    with pytest.raises(UsageError, match="space:3MB and space:4MB: give one limit"):
        store.writer(keep=["last:1", "space:3MB", "space:4MB"])


def test_the_limit_is_a_rule_of_the_store(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(keep=["last:2"], space=4_000_000, poll_seconds=None) as writer:
        writer.save(state(1), 1)
    assert store.rules() == ("last:2", "space:4000000")
    with store.writer(space="3 states", poll_seconds=None) as writer:  # replaces the limit, keeps the rest
        writer.save(state(2), 2)
    with store.writer(poll_seconds=None) as writer:  # follows it
        for step in (3, 4, 5):
            writer.save(state(step), step)
        size = store.backend.segments_nbytes()
    assert store.rules() == ("last:2", "space:3states")
    assert size <= 3 * one_full()
    assert store.prune(dry_run=True).kept.keys() == {"newest", "tagged", "last:2"}
    with store.writer(keep=["last:1"], poll_seconds=None):
        pass
    assert store.rules() == ("last:1",)


def test_ranks_and_remotes_say_why_not(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with pytest.raises(UsageError, match=r"space:4GB: not with group=: each rank writes its share by itself"):
        store.writer(group=Group(0, 1, LocalMailbox()), keep=["last:1"], space="4GB")
    both = ckptstore.open(tmp_path / "both", remote=str(tmp_path / "remote"))
    with pytest.raises(
        UsageError, match=r"space:4GB: not with remote=: a checkpoint stays here until the remote has it"
    ):
        both.writer(keep=["last:1"], space="4GB")


def test_an_agent_is_told() -> None:
    options = WriterOptions(space="3 states", keep=["last:1"])
    assert read_options(options_form(options)).rules(()) == ("last:1", "space:3states")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GB", 4_000_000_000), ("1.5 MiB", 3 << 19), ("7", 7), ("0.5kB", 500), ("2T", 2 * 10**12)]
)
def test_sizes(text: str, nbytes: int) -> None:
    found = space_limit(text)
    assert found is not None
    assert found.nbytes == nbytes
    assert found.rule == f"space:{text.replace(' ', '')}"


def test_states() -> None:
    assert space_limit("3 states") == SpaceLimit("3states", states=3)
    assert SpaceLimit("3states", states=3).bytes_for(10) == 30
