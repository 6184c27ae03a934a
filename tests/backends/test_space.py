"""Space: a save that cannot fit is refused before it begins, and a full disk leaves the store unchanged."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptstore import DeltaOptions, DiffOptions, agent
from ckptstore.backends.local_disk.folders import Folders
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.overwriting import Recycling
from ckptstore.backends.local_disk.room import RESERVE, RESERVE_BYTES, Room
from ckptstore.backends.local_disk.spare_files import SpareFiles
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptError, StorageError
from ckptstore.host.caller_warnings import UnpinnedWarning
from ckptstore.host.pages import BLOCK
from ckptstore.log.pins import Pin
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store, verify
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.retainer import short_of_space
from tests.backends.backend_conformance import filled, read_segment, write_segment
from tests.backends.recycled_data import recycling_store, retire, save, segment_path, spare, state
from tests.forms import in_turn
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.ramfs import RamPosix

MIB = 1 << 20
DISK = 24 * MIB
BTRFS = 0x9123683E


class Sized(RamPosix):
    """A file system in memory that reports so many free bytes."""

    def __init__(self, free: int, *, reserved: int = 0, blocks: int = 1 << 20, kind: int | None = None) -> None:
        super().__init__()
        self._kind = kind
        self.resize(free, reserved, blocks)

    def resize(self, free: int, reserved: int = 0, blocks: int = 1 << 20) -> None:
        self._space = os.statvfs_result((4096, 4096, blocks, (free + reserved) // 4096, free // 4096, 0, 0, 0, 0, 255))

    def statvfs(self, fd: int) -> os.statvfs_result:
        self.fstat(fd)
        return self._space

    def file_system(self, fd: int) -> int:
        return super().file_system(fd) if self._kind is None else self._kind


def test_a_save_that_cannot_fit_is_refused_with_needed_and_free_space() -> None:
    backend = LocalBackend("/data/store", Sized(10 * BLOCK))
    backend.check_space(10 * BLOCK)
    with pytest.raises(
        StorageError, match=r"40,961 bytes are needed at least and 40,960 are free.*/data/store"
    ) as told:
        backend.check_space(10 * BLOCK + 1)
    assert told.value.errno == errno.ENOSPC


@pytest.mark.parametrize("root", [True, False])
def test_reserved_blocks_are_for_root(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    backend = LocalBackend("/store", Sized(10 * BLOCK, reserved=5 * BLOCK))
    if root:
        backend.check_space(15 * BLOCK)
    else:
        with pytest.raises(StorageError):
            backend.check_space(15 * BLOCK)


def test_a_save_that_may_fit_is_not_refused() -> None:
    LocalBackend("/store", Sized(10, kind=BTRFS)).check_space(1 << 40)  # it may compress
    LocalBackend("/store", Sized(0, blocks=0)).check_space(1 << 40)  # a tmpfs without a limit
    MemoryBackend("space").check_space(1 << 60)
    MemoryBackend.forget("space")
    backend = LocalBackend("/store", Sized(10 * BLOCK), recycle="always")
    write_segment(backend, filled(8 * BLOCK))
    backend.release("seg/0000000001/0123456789abcdef.safetensors")
    backend.check_space(18 * BLOCK)  # spare files are space
    with pytest.raises(StorageError, match="73,728 are free"):
        backend.check_space(18 * BLOCK + 1)


def test_a_save_that_cannot_fit_writes_nothing_and_the_writer_continues() -> None:
    disk = Sized(64 << 10)
    store = Store(LocalBackend("/store", disk))
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        writer.save(state(1, 1000), 1)
        before = [path for path, _ in disk.image().walk()]
        with pytest.raises(StorageError, match="are needed at least"):
            writer.save(state(2), 2)
        with pytest.raises(StorageError, match="are needed at least"):
            writer.save_async(state(3, 1 << 20), 3).result()
        assert [path for path, _ in disk.image().walk()] == before
        writer.save(state(4, 1000), 4)
    assert [info.step for info in store.checkpoints()] == [1, 4]


# Spare files go first


@pytest.mark.parametrize("call", ["pwrite", "fallocate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_spare_files_go_before_a_segment_fails(call: str, code: int) -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", disk, recycle="always")
    keys = [f"seg/0000000001/{number}.safetensors" for number in range(3)]
    for key in keys:
        write_segment(backend, filled(8 * BLOCK), key)
    for key in keys:
        backend.release(key)
    # The second write: the first is of the cleared header, or within the file's present blocks.
    full = LocalBackend("/store", FaultyPosix(disk, Fault(frozenset({call}), 1, 1, code)), recycle="never")
    write_segment(full, filled(16 * BLOCK, 4), "seg/0000000002/new.safetensors")
    assert read_segment(backend, "seg/0000000002/new.safetensors") == filled(16 * BLOCK, 4)
    assert backend.shrink_spare(1 << 40) == 0


def test_a_save_continues_where_another_thread_deleted_first() -> None:
    disk = Sized(BLOCK)
    backend = LocalBackend("/store", disk)
    backend.create("log/00000000000000000000", b"slot")

    def reclaim(_: object) -> int:  # nothing is left: another thread was faster
        disk.resize(16 * BLOCK)
        return 0

    backend.reclaim_with(reclaim)
    backend.check_space(8 * BLOCK)


def test_a_save_deletes_again_where_others_took_what_it_freed() -> None:
    disk = Sized(BLOCK)
    backend = LocalBackend("/store", disk)
    backend.create("log/00000000000000000000", b"slot")
    free = iter([2, 2, 16])

    def reclaim(_: object) -> int:
        disk.resize(next(free) * BLOCK)
        return BLOCK

    backend.reclaim_with(reclaim)
    backend.check_space(8 * BLOCK)


def test_spare_files_go_before_a_commit_fails() -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", disk, recycle="always")
    write_segment(backend, filled(BLOCK), "seg/0000000001/0.safetensors")
    backend.release("seg/0000000001/0.safetensors")
    full = LocalBackend("/store", FaultyPosix(disk, Fault(frozenset({"pwrite"}), 1, 1, errno.ENOSPC)))
    full.create("log/00000000000000000000", b"slot")
    assert backend.get("log/00000000000000000000") == b"slot"
    assert backend.shrink_spare(1 << 40) == 0
    assert full.stray_temporaries() == ()
    again = LocalBackend("/store", FaultyPosix(disk, Fault(frozenset({"pwrite"}), 1, 1, errno.ENOSPC)))
    with pytest.raises(StorageError, match="No space"):
        again.create("log/00000000000000000001", b"slot")


# Real file systems that are full


def _small_disk(kind: str, folder: Path) -> tuple[list[str], ...]:
    if kind == "tmpfs":
        return (["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder / "disk")],)
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(DISK)
    return (
        ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(folder / "disk")],
    )


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    if request.param == "ext4" and shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is missing (Debian: apt-get install e2fsprogs)")
    (tmp_path / "disk").mkdir()
    for command in _small_disk(request.param, tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(command[:4])} fails here: {done.stderr.strip()}")
    try:
        yield tmp_path / "disk"
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "disk")], check=True)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    (tmp_path / "tiny").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(tmp_path / "tiny")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system fails here")
    try:
        yield tmp_path / "tiny"
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "tiny")], check=True)


def _blind(backend: LocalBackend) -> None:
    """Only the disk itself reports that it is full, as if other processes filled it meanwhile."""
    backend.check_space = lambda _nbytes: None  # type: ignore[method-assign]


def _whole(store: Store, *steps: int) -> None:
    """Check that these checkpoints exist, no others, and no other byte."""
    assert [info.step for info in store.checkpoints()] == list(steps)
    for step in steps:
        found = store.load(step, framework="numpy")
        assert np.array_equal(found["weight"], state(step, len(found["weight"]))["weight"])
    report = verify(store, threads=1)
    assert report.ok, report.damage


@pytest.mark.root
def test_a_writer_that_outlives_its_handle_deletes_what_is_retired(disk: Path) -> None:
    with Store(LocalBackend(disk / "store")).writer(keep=["last:1"]) as writer:
        for step in range(1, 13):
            writer.save({"weight": np.full(DISK // 4 // 5, step, "f4")}, step)
    assert Store(LocalBackend(disk / "store")).latest_step() == 12


@pytest.mark.root
@pytest.mark.parametrize("way", ["refused", "by the disk", "by the disk, through the page cache"])
def test_a_full_disk_leaves_the_store_as_it_was(disk: Path, way: str) -> None:
    backend = LocalBackend(disk / "store", direct="page" not in way, recycle="never")
    store = Store(backend)
    save(store, 1, 2, nbytes=4 * MIB)
    if way != "refused":
        _blind(backend)
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        with pytest.raises(StorageError) as told:
            writer.save(state(3, 32 * MIB), 3)
        assert told.value.errno == errno.ENOSPC
        assert ("are needed at least" in str(told.value)) == (way == "refused")
        assert len(list((disk / "store").rglob("*.safetensors"))) == 2, "nothing is half written"
        writer.save(state(4, 2 * MIB), 4)  # there is space again
    _whole(Store(LocalBackend(disk / "store")), 1, 2, 4)
    retire(store, 1, 2)
    collect(store.journal)
    save(store, 5, nbytes=12 * MIB)
    _whole(store, 4, 5)


@pytest.mark.root
def test_a_disk_full_of_spare_files_has_space(disk: Path) -> None:
    store = recycling_store(disk / "store")
    save(store, 1, 2, 3, nbytes=5 * MIB)
    retire(store, 1, 2)
    collect(store.journal)
    assert len(spare(disk / "store")) == 2
    free = shutil.disk_usage(disk).free
    assert free < 9 * MIB
    save(store, 4, nbytes=14 * MIB)  # more than is free, and more than any spare file
    _whole(store, 3, 4)
    assert spare(disk / "store") == []


@pytest.mark.root
def test_a_disk_filled_by_others_to_the_last_byte(disk: Path) -> None:
    """Whatever the writer writes when nothing fits any more: slots, folders, pins, segments. Then space is made."""
    store = Store(LocalBackend(disk / "store", recycle="never"))
    save(store, 1, nbytes=MIB)
    others = disk / "others"
    with others.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * BLOCK):
            pass
    for attempt in (2, 3):
        with pytest.raises(CkptError):
            save(store, attempt, nbytes=MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpinnedWarning)  # there is no space for a pin
        loaded = store.load(1, framework="numpy")
    assert np.array_equal(loaded["weight"], state(1, MIB)["weight"])
    others.unlink()
    save(store, 4, nbytes=MIB)
    _whole(store, 1, 4)


@pytest.mark.root
def test_only_what_the_system_gives_counts(disk: Path) -> None:
    """The check is for this disk: a save that just fits is not refused."""
    store = Store(LocalBackend(disk / "store", recycle="never"))
    save(store, 1, nbytes=BLOCK)
    nbytes = shutil.disk_usage(disk).free - MIB
    save(store, 2, nbytes=nbytes)
    _whole(store, 1, 2)
    assert segment_path(store, disk / "store", 2).stat().st_size > nbytes


# The reserve, and retirement


def _filled_to_the_last_byte(disk: Path) -> Path:
    """Another process fills the free space."""
    others = disk / "others"
    with others.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * BLOCK):
            pass
    return others


@pytest.mark.root
@pytest.mark.parametrize("writer", ["alive", "gone"])
def test_pruning_and_collecting_make_space_where_there_is_none(disk: Path, writer: str) -> None:
    """Retiring writes to the log. The reserve is given up for that, and made again."""
    store = Store(LocalBackend(disk / "store", recycle="never"))
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=0.2) as own:
        for step in (1, 2, 3):
            own.save(state(step, 3 * MIB), step)
        assert (disk / "store" / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
        if writer == "alive":
            _filled_to_the_last_byte(disk)
            other = Store(LocalBackend(disk / "store"))
            pruned = other.prune("last:1")
            assert not (disk / "store" / RESERVE).exists()
    if writer == "gone":
        _filled_to_the_last_byte(disk)
        pruned = store.prune("last:1", take_over=True)
    assert len(pruned.retired) == 2
    assert store.gc().nbytes >= 6 * MIB
    assert (disk / "store" / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
    save(store, 5, nbytes=4 * MIB)
    _whole(store, 3, 5)


@pytest.mark.root
def test_the_reserve_is_for_no_save(disk: Path) -> None:
    store = Store(LocalBackend(disk / "store", recycle="never"))
    save(store, 1, nbytes=MIB)
    _filled_to_the_last_byte(disk)
    with pytest.raises(CkptError):
        save(store, 2, nbytes=BLOCK)
    assert (disk / "store" / RESERVE).exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("how", "knows"), in_turn(["save", "save_async", "diffs", "deltas", "ranks"], ["beforehand", "from the disk"])
)
def test_a_save_that_is_short_of_space_has_what_is_retired_deleted(disk: Path, how: str, knows: str) -> None:
    """`last:1`, no pause between two saves, and a disk for three states: no other process collects."""
    backend = LocalBackend(disk / "store", recycle="never")
    if knows == "from the disk":
        backend.free_bytes = lambda: None  # type: ignore[method-assign]
        _blind(backend)
    store = Store(backend)
    options: dict[str, Any] = {
        "diffs": {"diffs": DiffOptions(full_every=1)},
        "deltas": {"deltas": DeltaOptions(interval=1)},
        "ranks": {"group": Group(0, 1, LocalMailbox())},
    }.get(how, {})
    noise = np.random.default_rng(0)
    nbytes = 5 * MIB // 2 if how == "deltas" else 6 * MIB  # several of a chain are needed at once
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None, keep=["last:1"], **options) as writer:
        for step in range(1, 13):
            weight = noise.integers(0, 256, nbytes, np.uint8)
            if how == "save":
                writer.save({"weight": weight}, step)
            else:
                writer.save_async({"weight": weight}, step).result()
    assert [info.step for info in store.checkpoints()] == [12]
    assert np.array_equal(store.load(framework="numpy")["weight"], weight)
    assert verify(store, threads=1).ok


@pytest.mark.root
@pytest.mark.parametrize("how", ["fulls", "ranks"])
def test_a_save_that_is_short_of_space_waits_for_those_beside_it(disk: Path, how: str) -> None:
    """A disk for two states: of two in flight the second fits once the first is committed and has retired one."""
    backend = LocalBackend(disk / "store", recycle="never")
    create = backend.create

    def late(key: str, data: bytes) -> None:
        time.sleep(0.1)  # the next save checks for space before this one is committed
        create(key, data)

    backend.create = late  # type: ignore[method-assign]
    store = Store(backend)
    options: dict[str, Any] = {"group": Group(0, 1, LocalMailbox())} if how == "ranks" else {}
    options["max_in_flight"] = 2
    noise = np.random.default_rng(0)
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None, keep=["last:1"], **options) as writer:
        for step in range(1, 9):
            weight = noise.integers(0, 256, 9 * MIB, np.uint8)
            writer.save_async({"weight": weight}, step)
    assert [info.step for info in store.checkpoints()] == [8]
    assert np.array_equal(store.load(framework="numpy")["weight"], weight)
    assert verify(store, threads=1).ok


def test_a_commit_of_ranks_is_not_refused_for_the_space_that_the_save_beside_it_claims() -> None:
    """Its own segment is a header. The save beside it allocates what it has claimed: for a moment that counts twice."""
    allocated, committed = threading.Event(), threading.Event()

    class Counting(Sized):
        left, large = 25 * MIB, 0

        def fallocate(self, fd: int, size: int) -> None:
            super().fallocate(fd, size)
            if size > MIB:
                self.left -= size
                self.resize(self.left)
                self.large += 1
                if self.large == 2:
                    allocated.set()
                    assert committed.wait(60)

    backend = LocalBackend("/store", Counting(25 * MIB), recycle="never")
    check = backend.check_space

    def late(nbytes: int) -> None:
        if nbytes <= BLOCK:  # the segment of the commit
            assert allocated.wait(60)
        check(nbytes)

    backend.check_space = late  # type: ignore[method-assign]
    store = Store(backend)
    group = Group(0, 1, LocalMailbox())
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None, group=group, max_in_flight=2) as writer:
        first = writer.save_async(state(1, 9 * MIB), 1)
        first.when_done(lambda _: committed.set())
        second = writer.save_async(state(2, 9 * MIB), 2)
        assert [first.result().step, second.result().step] == [1, 2]


@pytest.mark.root
def test_an_agent_that_is_short_of_space_does_likewise(disk: Path) -> None:
    store = Store(LocalBackend(disk / "store", recycle="never"))
    noise = np.random.default_rng(0)
    with agent.writer(store, keep=["last:1"]) as writer:
        for step in range(1, 9):
            weight = noise.integers(0, 256, 6 * MIB, np.uint8)
            writer.save_async({"weight": weight}, step).result()
    assert [info.step for info in store.checkpoints()] == [8]
    assert np.array_equal(store.load(framework="numpy")["weight"], weight)


@pytest.mark.root
def test_a_store_that_was_deleted_and_made_again_collects_still(disk: Path) -> None:
    store = Store(LocalBackend(disk / "store", recycle="never"))
    store.create()
    shutil.rmtree(disk / "store")
    store.create()
    save(store, 1, 2, nbytes=BLOCK)
    retired = segment_path(store, disk / "store", 1)
    retire(store, 1)
    assert retired.exists()
    with pytest.raises(StorageError, match="are needed at least"):
        store.backend.check_space(DISK)
    assert not retired.exists()
    _whole(store, 2)


@pytest.mark.root
def test_a_save_for_which_nothing_can_be_deleted_fails_as_ever(disk: Path) -> None:
    store = Store(LocalBackend(disk / "store", recycle="never"))
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        writer.save(state(1, 9 * MIB), 1)
        writer.save(state(2, 9 * MIB), 2)
        with pytest.raises(StorageError) as told:
            writer.save(state(3, 9 * MIB), 3)
        assert told.value.errno == errno.ENOSPC
    _whole(store, 1, 2)


def test_several_threads_that_find_no_space_collect_once() -> None:
    """The second waits for the first, and then tries again."""
    # On a busy machine the second may come when the first has ended, and collects, too.
    assert any(collections_of_two(pause) == 1 for pause in (0.1, 1.0, 10.0))


def collections_of_two(pause: float) -> int:
    """How often two threads collect that find no space at the same time; the second has `pause` seconds to come."""
    disk = RamPosix()
    folders = Folders("/store", disk)
    room = Room(folders, disk, SpareFiles(folders, disk, Recycling(folders, disk, "never")))
    entered, leave = threading.Event(), threading.Event()
    calls: list[int] = []

    def reclaim() -> int:
        calls.append(1)
        entered.set()
        assert leave.wait(120)
        assert not room.make(), "within itself"
        return 10 if len(calls) == 1 else 0

    assert not room.make(), "nobody said how"
    room.reclaiming.reclaim = reclaim
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(room.make)
        assert entered.wait(120)
        second = pool.submit(room.make)
        time.sleep(pause)
        leave.set()
        assert first.result()
        made = second.result()
    found = len(calls)
    assert made == (found == 1)
    assert not room.make(), "there is nothing more"
    return found


class Allocating(Sized):
    """Records how much was allocated."""

    allocated: tuple[int, ...] = ()

    def fallocate(self, fd: int, size: int) -> None:
        super().fallocate(fd, size)
        self.allocated += (size,)


def test_the_reserve_is_no_more_than_a_sixteenth_of_what_is_free() -> None:
    kib = 1024
    for free, wanted in ((511, None), (512, 32), (1000, 60), (3072, 192), (4095, 252), (4096, 256), (1 << 20, 256)):
        disk = Allocating(free * kib)
        backend = LocalBackend("/store", disk)
        backend.create("FORMAT", b"{}")
        backend.keep_reserve()
        assert any(path.endswith(RESERVE) for path, _ in disk.image().walk()) is (wanted is not None)
        assert disk.allocated == (() if wanted is None else (wanted * kib,))
        backend.keep_reserve()  # once is enough
        assert backend.list("") == ["FORMAT"]


@pytest.mark.root
@pytest.mark.parametrize("tiny", [3 * MIB, MIB], indirect=True)
@pytest.mark.parametrize("how", ["retire", "prune"])
def test_a_small_medium_that_is_full_can_be_pruned(tiny: Path, how: str) -> None:
    store = Store(LocalBackend(tiny / "store", recycle="never"))
    for step in (1, 2, 3):
        save(store, step, nbytes=100 << 10)
    _filled_to_the_last_byte(tiny)
    if how == "retire":
        store.retire("1", "2", take_over=True)
    else:
        store.prune("last:1", take_over=True)
    assert store.gc().nbytes >= 200 << 10
    save(store, 4, nbytes=100 << 10)
    _whole(store, 3, 4)


@pytest.mark.root
@pytest.mark.parametrize("tiny", [400 << 10], indirect=True)
def test_where_there_is_no_reserve_the_error_says_what_helps(tiny: Path) -> None:
    store = Store(LocalBackend(tiny / "store", recycle="never"))
    save(store, 1, nbytes=BLOCK)
    save(store, 2, nbytes=BLOCK)
    others = _filled_to_the_last_byte(tiny)
    with pytest.raises(StorageError, match=r"no reserve left .* 512 KiB are free\): delete something"):
        store.retire("1", take_over=True)
    others.unlink()
    store.retire("1", take_over=True)
    assert store.gc().segments


# Messages of a full medium


def _fails_for_want_of_space(store: Store, nbytes: int, *, asynchronous: bool, first: int, **options: Any) -> str:
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None, **options) as writer:
        for step in range(first, first + 99):
            weight = np.random.default_rng(step).integers(0, 256, nbytes, np.uint8)
            try:
                if asynchronous:
                    writer.save_async({"weight": weight}, step).result()
                else:
                    writer.save({"weight": weight}, step)
            except StorageError as error:
                return str(error)
    raise AssertionError("it never was full")


@pytest.mark.root
@pytest.mark.parametrize("tiny", [8 * MIB], indirect=True)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("ranks", [True, False])
def test_a_store_without_rules_says_how_to_have_some(tiny: Path, asynchronous: bool, ranks: bool) -> None:
    store = Store(LocalBackend(tiny / "store", recycle="never"))
    options = {"group": Group(0, 1, LocalMailbox())} if ranks else {}
    text = _fails_for_want_of_space(store, MIB, asynchronous=asynchronous, first=1, **options)
    assert f"every checkpoint is kept: `ckpt prune {tiny}/store --keep last:3 --gc` keeps three" in text
    assert text.count("in this store") == 1


@pytest.mark.root
@pytest.mark.parametrize("tiny", [8 * MIB], indirect=True)
def test_pinned_bytes_are_reported_with_the_remedy(tiny: Path) -> None:
    store = Store(LocalBackend(tiny / "store", recycle="never"))
    for step in (1, 2, 3):
        save(store, step, nbytes=MIB)
    store.keep("last:9", take_over=True)
    with Pin(store.backend, [entry.id for entry in store.view().catalog.segments.values()]):
        retire(store, 1)
        text = _fails_for_want_of_space(store, 3 * MIB, asynchronous=True, first=4)
        assert re.search(r"retired checkpoints that are not deleted yet take 1\S* MiB: `ckpt gc", text), text
        assert "no reader has pinned it" in text
    assert store.gc().nbytes >= MIB


@pytest.mark.root
@pytest.mark.parametrize("tiny", [8 * MIB], indirect=True)
def test_bytes_of_bases_are_reported(tiny: Path) -> None:
    store = Store(LocalBackend(tiny / "store", recycle="never"))
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None, deltas=DeltaOptions(interval=9)) as writer:
        weight = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
        for step in (1, 2):
            weight[step] += 1
            writer.save({"weight": weight}, step)
    store.retire("1", take_over=True)
    store.keep("last:9", take_over=True)
    text = _fails_for_want_of_space(store, 3 * MIB, asynchronous=True, first=4)
    assert re.search(r"1\S* MiB of retired checkpoints stay, because others build on them", text), text


def test_space_is_not_short_where_the_rules_are_not_known() -> None:
    """There a full in place of a step diff frees nothing: nothing is retired."""
    held = {(1, step): _entry(step) for step in range(1, 6)}
    kept = {(1, 6): _entry(6)}
    for rules, short in ((("last:1",), True), (("last:1", "phase:9"), False), ((), False)):
        catalog: Any = SimpleNamespace(
            keep=rules, damage=(), lost=0, term=1, held=held, checkpoints=kept, latest=lambda: _entry(6)
        )
        assert short_of_space(catalog, lambda: 2000) is short
        assert not short_of_space(catalog, lambda: 999), "no full fits"


def _entry(step: int) -> Any:
    return SimpleNamespace(nbytes=1000, step=step)
