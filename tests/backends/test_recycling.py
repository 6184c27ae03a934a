"""Segments that overwrite deleted ones: no reader's bytes change, and no old byte shows."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from ckptstore.backends.local_disk.directio import FileSink
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.overwriting import LOCAL, WORTH, measure
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.backends.local_disk.spare_files import SpareFiles
from ckptstore.errors import CkptError, CorruptSegmentError, KeyExistsError, KeyNotFoundError, StorageError, UsageError
from ckptstore.host.pages import BLOCK
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store
from tests.backends import inside
from tests.backends.backend_conformance import (
    SEGMENT,
    BackendConformance,
    Opener,
    filled,
    read_segment,
    write_segment,
)
from tests.backends.inside import node_of
from tests.backends.recycled_data import NBYTES, recycling_store, retire, save, segment_path, spare, state
from tools.crash.enumerate import crash_states
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.forgetful import ForgetfulBackend
from tools.crash.old_headers import files_of, mixed
from tools.crash.ramfs import RamPosix
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import CHAIN

NEXT = "seg/0000000002/fedcba9876543210.safetensors"
NFS = 0x6969


def opened(path: Path, posix: Posix = SYSTEM, mode: str = "always") -> LocalBackend:
    backend = recycling_store(path, posix, mode).backend
    assert isinstance(backend, LocalBackend)
    return backend


def release(backend: LocalBackend, size: int = 8 * BLOCK, key: str = SEGMENT) -> int:
    """Write a segment and release it -> the number of its file."""
    write_segment(backend, filled(size, 1), key)
    node = node_of(backend, key)
    backend.release(key)
    return node


def stock(backend: LocalBackend, *sizes: int) -> dict[int, int]:
    """Make spare files of these sizes in blocks -> their numbers, by size."""
    keys = {size: f"seg/0000000001/{size}.safetensors" for size in sizes}
    for size, key in keys.items():
        write_segment(backend, filled(size * BLOCK, size), key)
    nodes = {size: node_of(backend, key) for size, key in keys.items()}
    for key in keys.values():
        backend.release(key)
    assert backend.shrink_spare(1 << 40) == sum(sizes) * BLOCK
    return nodes


# The same suite, on recycled files


class TestLocalRecycling(BackendConformance):
    processes = True
    rounds = 20

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        stock(opened(tmp_path / "store"), *range(1, 40, 5))
        return functools.partial(LocalBackend, tmp_path / "store", recycle="always")


class TestLocalInMemoryRecycling(BackendConformance):
    rounds = 20

    @pytest.fixture
    def opener(self) -> Opener:
        disk = RamPosix()
        stock(LocalBackend("/store", disk, recycle="always"), *range(1, 40, 5))
        return functools.partial(LocalBackend, "/store", disk, recycle="always")


# A store's life


def test_a_new_checkpoint_has_the_file_of_one_that_was_deleted(tmp_path: Path) -> None:
    store = recycling_store(tmp_path)
    save(store, 1, 2)
    old = segment_path(store, tmp_path, 1).stat().st_ino
    retire(store, 1)
    done = collect(store.journal)
    assert len(done.segments) == 1
    assert [path.stat().st_ino for path in spare(tmp_path)] == [old]
    assert done.spare_nbytes == sum(path.stat().st_size for path in spare(tmp_path)) > NBYTES
    assert store.backend.list("") == [key for key in store.backend.list("") if not key.startswith(".")]
    save(store, 3)
    assert spare(tmp_path) == []
    new = segment_path(store, tmp_path, 3)
    assert new.stat().st_ino == old
    for step in (2, 3):
        assert np.array_equal(store.load(step, framework="numpy")["weight"], state(step)["weight"])
    with safe_open(str(new), "np") as file:
        assert np.array_equal(file.get_tensor("weight"), state(3)["weight"])


def test_the_kept_spare_files_fit_the_next_checkpoints(tmp_path: Path) -> None:
    store = recycling_store(tmp_path)
    save(store, *range(1, 8), nbytes=1 << 20)
    retire(store, *range(1, 7))
    done = collect(store.journal)
    assert len(done.segments) == 6
    assert len(spare(tmp_path)) == 3
    assert 3 << 20 < done.spare_nbytes < 4 << 20
    LocalBackend(tmp_path, recycle="never").shrink_spare(1 << 30)
    assert spare(tmp_path) == [], "who does not recycle keeps nothing"


def test_a_pin_that_was_taken_for_dead_allows_deleting_and_no_more(tmp_path: Path) -> None:
    from ckptstore.log.pins import Pin, PinWatch

    store = recycling_store(tmp_path)
    save(store, 1, 2, 3)
    ((entry, _),) = store.describe(1)
    retire(store, 1, 2)
    Pin(store.backend, [entry.id]).renew()  # and never again
    now = [0.0]
    watch = PinWatch(store.backend, dead_after=60, clock=lambda: now[0])
    assert collect(store.journal, watch).pinned == (entry.key,)
    assert len(spare(tmp_path)) == 1  # step 2's
    now[0] = 61
    assert collect(store.journal, watch).segments == (entry.key,)
    assert len(spare(tmp_path)) == 1
    assert not (tmp_path / entry.key).exists()


def test_a_dead_pin_that_nobody_can_read_may_have_claimed_anything(tmp_path: Path) -> None:
    from ckptstore.log.pins import PinWatch

    store = recycling_store(tmp_path)
    save(store, 1, 2)
    retire(store, 1)
    store.backend.replace("pins/" + "a" * 32, b"damaged")
    now = [0.0]
    watch = PinWatch(store.backend, dead_after=60, clock=lambda: now[0])
    assert collect(store.journal, watch).segments == ()
    now[0] = 61
    assert len(collect(store.journal, watch).segments) == 1
    assert spare(tmp_path) == []


# A process that has the file open keeps it


def hold_by_safetensors(path: Path) -> Callable[[], bytes]:
    file = safe_open(str(path), "np")
    file.__enter__()
    return lambda: bytes(file.get_tensor("weight").tobytes())


def hold_by_mapping_alone(path: Path) -> Callable[[], bytes]:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.close(os.dup(file.fileno()))
    size = path.stat().st_size
    return lambda: mapping[size - NBYTES :]


def hold_by_descriptor(path: Path) -> Callable[[], bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    size = path.stat().st_size
    return lambda: os.pread(descriptor, NBYTES, size - NBYTES)


def hold_by_hard_link(path: Path) -> Callable[[], bytes]:
    backup = path.parents[2].parent / "backup"
    os.link(path, backup)
    return lambda: backup.read_bytes()[-NBYTES:]


@pytest.mark.parametrize(
    "hold",
    [hold_by_safetensors, hold_by_mapping_alone, hold_by_descriptor, hold_by_hard_link],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("when", ["before gc", "after gc"])
def test_a_process_that_has_a_file_open_keeps_its_bytes(
    tmp_path: Path, hold: Callable[[Path], Callable[[], bytes]], when: str
) -> None:
    root = tmp_path / "store"
    store = recycling_store(root)
    save(store, 1, 2)
    path = segment_path(store, root, 1)
    node = path.stat().st_ino
    read = hold(path) if when == "before gc" else None
    retire(store, 1)
    collect(store.journal)
    if read is None:
        (kept,) = spare(root)
        read = hold(kept)
    save(store, 3, 4)
    assert read() == state(1)["weight"].tobytes()
    assert node not in {segment_path(store, root, step).stat().st_ino for step in (3, 4)}
    assert spare(root) == [], "what somebody has is let go"


def test_a_mapping_of_ours_holds_the_file_without_a_descriptor(tmp_path: Path) -> None:
    store = recycling_store(tmp_path)
    save(store, 1, 2)
    mapped = store.load(1, framework="numpy", mmap=True)["weight"]
    node = segment_path(store, tmp_path, 1).stat().st_ino
    retire(store, 1)
    collect(store.journal)
    save(store, 3)
    assert segment_path(store, tmp_path, 3).stat().st_ino != node
    assert np.array_equal(mapped, state(1)["weight"])


def test_another_process_that_has_the_file_open_keeps_it(tmp_path: Path) -> None:
    backend = opened(tmp_path / "store")
    write_segment(backend, filled(8 * BLOCK, 1))
    program = (
        "import hashlib, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "print('open', flush=True)\n"
        "sys.stdin.read(1)\n"
        "print(hashlib.sha256(file.read()).hexdigest())"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, f"{backend.root}/{SEGMENT}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    backend.release(SEGMENT)
    write_segment(backend, filled(8 * BLOCK, 2), NEXT)
    assert reader.communicate("x", timeout=120)[0].strip() == hashlib.sha256(filled(8 * BLOCK, 1)).hexdigest()
    assert read_segment(backend, NEXT) == filled(8 * BLOCK, 2)


@pytest.mark.parametrize("missing", ["_require_lock", "_require_alone"])
def test_a_reader_of_ours_is_safe_by_either_lock_alone(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpareFiles, missing, lambda _self, _descriptor: None)
    backend = opened(tmp_path)
    write_segment(backend, filled(8 * BLOCK, 1))
    with backend.open_source(SEGMENT) as source:
        assert source.held
        backend.release(SEGMENT)
        write_segment(backend, filled(8 * BLOCK, 2), NEXT)
        out = filled(8 * BLOCK)
        source.read_into(0, out)
        assert out == filled(8 * BLOCK, 1)


def test_a_reader_that_opens_the_old_path_during_overwriting_is_refused(tmp_path: Path) -> None:
    """It had looked the path up, and opens the file when another segment is being written: here by a second path."""
    backend = opened(tmp_path)
    node = release(backend)
    sink = backend.open_sink(NEXT, 8 * BLOCK)
    assert node_of(backend, NEXT) == node
    os.link(f"{backend.root}/{NEXT}", f"{backend.root}/{SEGMENT}")
    with pytest.raises(KeyNotFoundError, match="another segment takes its place"):
        backend.open_source(SEGMENT)
    sink.write(0, filled(8 * BLOCK, 2))
    sink.seal(8 * BLOCK)
    with backend.open_source(SEGMENT):  # from now on the header's hash shows that it is another one
        pass


def test_a_lease_at_the_moment_of_opening_is_as_good_as_absence(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    write_segment(backend, filled(BLOCK))
    path = f"{backend.root}/{SEGMENT}"
    descriptor = os.open(path, os.O_WRONLY)
    SYSTEM.set_lease(descriptor, fcntl.F_WRLCK)
    with pytest.raises(KeyNotFoundError):
        backend.open_source(SEGMENT)
    os.close(descriptor)
    assert read_segment(backend) == filled(BLOCK)


def test_opening_a_leased_file_does_not_kill_the_holder(tmp_path: Path) -> None:
    """The kernel sends SIGIO, which ends a process by default."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    program = (
        "import os, sys, fcntl, subprocess\n"
        "from ckptstore.backends.local_disk.posix import SYSTEM\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY)\n"
        "SYSTEM.set_lease(fd, fcntl.F_WRLCK)\n"
        "code = 'import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)'\n"
        "assert subprocess.run([sys.executable, '-c', code, sys.argv[1]], stderr=subprocess.DEVNULL).returncode\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=240)
    assert done.returncode == 0
    assert signal.getsignal(signal.SIGURG) in (signal.SIG_DFL, signal.SIG_IGN)


def test_a_forked_child_does_not_keep_readers_out(tmp_path: Path) -> None:
    """It shares the lock with the writer that forked it, for as long as it lives."""
    backend = opened(tmp_path)
    node = release(backend)
    sink = backend.open_sink(NEXT, 8 * BLOCK)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        sink.write(0, filled(8 * BLOCK, 2))
        sink.seal(8 * BLOCK)
        assert node_of(backend, NEXT) == node
        assert read_segment(backend, NEXT) == filled(8 * BLOCK, 2)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


# Names and races


def test_a_live_segment_with_a_spare_name_is_not_overwritten(tmp_path: Path) -> None:
    """Both names may remain after a power cut during a rename, or after restoring a backup."""
    backend = opened(tmp_path)
    write_segment(backend, filled(8 * BLOCK, 1))
    release(backend, key=NEXT)
    os.link(f"{backend.root}/{SEGMENT}", tmp_path / ".spare" / "a-second-name")
    for number in range(3):
        write_segment(backend, filled(8 * BLOCK, 2), f"seg/0000000003/{number}.safetensors")
    assert read_segment(backend) == filled(8 * BLOCK, 1)
    backend.release(SEGMENT)  # by now it has one name
    assert len(spare(tmp_path)) == 1


@pytest.mark.parametrize("name_taken", [False, True])
def test_a_zombie_that_opens_its_file_late_does_not_overwrite_anothers(name_taken: bool) -> None:
    """It had looked up the path when gc took the file and another writer made a segment of it: then it opens it."""

    class Late(RamPosix):
        meanwhile: Callable[[], None] | None = None

        def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
            if self.meanwhile is None or not flags & os.O_WRONLY or flags & os.O_CREAT or "zombie" not in path:
                return super().open(path, flags, dir_fd)
            node, meanwhile, self.meanwhile = self._node(path, dir_fd), self.meanwhile, None
            meanwhile()
            return self.open_node(node, flags)

    disk = Late()
    zombie, other = (LocalBackend("/store", disk, recycle="always") for _ in range(2))
    release(zombie)

    def meanwhile() -> None:
        other.release("seg/0000000002/zombie.safetensors")
        write_segment(other, filled(8 * BLOCK, 5), "seg/0000000003/live.safetensors")
        if name_taken:
            write_segment(other, filled(8 * BLOCK, 7), "seg/0000000002/zombie.safetensors")

    disk.meanwhile = meanwhile
    write_segment(zombie, filled(8 * BLOCK, 6), "seg/0000000002/zombie.safetensors")
    assert disk.meanwhile is None
    assert read_segment(other, "seg/0000000003/live.safetensors") == filled(8 * BLOCK, 5)
    assert read_segment(zombie, "seg/0000000002/zombie.safetensors") == filled(8 * BLOCK, 6)


def test_a_reader_that_opens_the_file_at_the_last_moment_waits_and_finds_no_header(tmp_path: Path) -> None:
    """By a path that was looked up before: here by the new one, between the lease and the end of the clearing."""
    seen: list[bytes] = []
    threads: list[threading.Thread] = []

    class Opened(Posix):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if not threads and data == bytes(BLOCK):
                threads.append(threading.Thread(target=lambda: seen.append((tmp_path / NEXT).read_bytes()[:BLOCK])))
                threads[0].start()
                threads[0].join(0.3)
                assert not seen, "the lease keeps it waiting"
            return super().pwrite(fd, data, offset)

    release(opened(tmp_path))
    sink = opened(tmp_path, Opened()).open_sink(NEXT, 8 * BLOCK)
    threads[0].join(120)
    assert seen == [bytes(BLOCK)]
    sink.abort()


def test_a_segment_with_a_second_name_is_deleted_not_kept(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    write_segment(backend, filled(8 * BLOCK, 1))
    os.link(f"{backend.root}/{SEGMENT}", tmp_path / "backup")
    backend.release(SEGMENT)
    assert backend.list("seg/") == []
    assert spare(tmp_path) == []
    assert (tmp_path / "backup").read_bytes() == filled(8 * BLOCK, 1)


def test_of_two_writers_one_gets_the_file(tmp_path: Path) -> None:
    backends = [opened(tmp_path) for _ in range(4)]
    for turn in range(20):
        node = release(backends[0], key=f"seg/0000000001/{turn}.safetensors")
        start = threading.Barrier(len(backends))

        def write(number: int, turn: int = turn, node: int = node, start: threading.Barrier = start) -> bool:
            key = f"seg/0000000002/{turn}-{number}.safetensors"
            start.wait(120)
            sink = backends[number].open_sink(key, 8 * BLOCK)
            sink.write(0, filled(8 * BLOCK, number))
            sink.seal(8 * BLOCK)
            assert read_segment(backends[number], key) == filled(8 * BLOCK, number)
            assert isinstance(sink, FileSink)
            assert sink.recycled == (node_of(backends[number], key) == node)
            return sink.recycled

        with ThreadPoolExecutor(len(backends)) as pool:
            assert sum(pool.map(write, range(len(backends)))) == 1


def test_the_best_fitting_file_is_taken(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    nodes = stock(backend, 2, 4, 8, 16)
    found = []
    for number, size in enumerate((3, 3, 20, 1)):
        key = f"seg/0000000002/{number}.safetensors"
        write_segment(backend, filled(size * BLOCK, number), key)
        found.append(next(s for s, node in nodes.items() if node == (tmp_path / key).stat().st_ino))
        assert read_segment(backend, key) == filled(size * BLOCK, number)
    assert found == [4, 8, 16, 2]


def test_a_name_that_is_taken_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    write_segment(backend, filled(BLOCK, 5), NEXT)
    release(backend)
    with pytest.raises(KeyExistsError):
        backend.open_sink(NEXT, 8 * BLOCK)
    assert read_segment(backend, NEXT) == filled(BLOCK, 5)
    assert len(spare(tmp_path)) == 1


@pytest.mark.parametrize("what", ["folder deleted", "a link", "a file", "folders and pipes in it"])
def test_whatever_lies_there_does_not_matter(tmp_path: Path, what: str) -> None:
    backend = opened(tmp_path / "store")
    release(backend)
    place = tmp_path / "store" / ".spare"
    for path in spare(tmp_path / "store"):
        path.unlink()
    if what == "folders and pipes in it":
        (place / "folder").mkdir()
        os.mkfifo(place / "pipe")
    else:
        place.rmdir()
    if what == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine").write_bytes(b"x" * 8 * BLOCK)
        place.symlink_to(tmp_path / "elsewhere")
    if what == "a file":
        place.write_bytes(b"x" * 8 * BLOCK)
    for key in (SEGMENT, NEXT):
        write_segment(backend, filled(8 * BLOCK, 3), key)
        assert read_segment(backend, key) == filled(8 * BLOCK, 3)
        backend.release(key)
        assert backend.shrink_spare(1 << 30) in (0, 8 * BLOCK, 16 * BLOCK)
        backend.shrink_spare(0)
    if what == "a link":
        assert (tmp_path / "elsewhere" / "mine").read_bytes() == b"x" * 8 * BLOCK


# The contents of the file meanwhile


def test_the_old_header_is_gone_before_anything_is_written(tmp_path: Path) -> None:
    store = recycling_store(tmp_path)
    save(store, 1, 2)
    retire(store, 1)
    collect(store.journal)
    sink = store.backend.open_sink(NEXT, NBYTES)
    with pytest.raises(SafetensorError):
        safe_open(str(tmp_path / NEXT), "np").__enter__()
    assert (tmp_path / NEXT).read_bytes()[:BLOCK] == bytes(BLOCK)
    sink.abort()
    assert store.backend.list("seg/0000000002/") == []


def _recycled_save(backend: LocalBackend, disk: RecordingPosix) -> int:
    """A store in which one save overwrites an old one of the same length -> where in the history that begins."""
    nbytes = 3 * BLOCK
    store = Store(backend)
    save(store, 1, 2, nbytes=nbytes)
    retire(store, 1)
    collect(store.journal)
    begin = len(disk.history)
    save(store, 3, nbytes=nbytes)
    return begin


def test_no_power_cut_shows_the_old_header_over_new_data() -> None:
    disk = RecordingPosix()
    begin = _recycled_save(LocalBackend("/store", disk, recycle="always"), disk)
    states = 0
    for found in crash_states(disk, limit=200, begin=begin):
        assert not mixed(files_of(found.image)), found.explain()
        states += 1
    assert states > 100


@pytest.mark.parametrize("site", ["old header", "recycled data"])
def test_without_either_sync_one_does(site: str) -> None:
    """Negative control."""
    disk = RecordingPosix()
    begin = _recycled_save(ForgetfulBackend("/store", site, disk, recycle="always"), disk)
    assert any(mixed(files_of(found.image)) for found in crash_states(disk, limit=200, begin=begin))


def _go_on_with_both_names() -> int:
    """For every cut that kept both names of a recycled file: save once more, and load everything -> how often."""
    disk = RecordingPosix()
    begin = _recycled_save(LocalBackend("/store", disk, recycle="always"), disk)
    found = 0
    for cut in crash_states(disk, limit=16, begin=begin):
        nodes = [node for names in cut.image.folders.values() for node in names.values() if node in cut.image.files]
        if len(set(nodes)) == len(nodes):
            continue
        store = Store(LocalBackend("/store", cut.mount(), recycle="always"))
        save(store, 9, nbytes=3 * BLOCK)
        for info in store.checkpoints():
            loaded = store.load(info.ref, framework="numpy")["weight"]
            assert np.array_equal(loaded, state(info.step, 3 * BLOCK)["weight"]), cut.explain()
        found += 1
    return found


def test_a_rename_of_which_a_cut_keeps_both_names_harms_no_live_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _go_on_with_both_names() > 20
    inside.forget_own_names(monkeypatch)
    with pytest.raises(CkptError):  # negative control
        _go_on_with_both_names()


# Readers without locks


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS])
def test_without_locks_a_mapping_is_a_copy_and_everything_is_verified(tmp_path: Path, code: int) -> None:
    save(recycling_store(tmp_path), 1)
    store = recycling_store(tmp_path, FaultyPosix(SYSTEM, Fault(frozenset({"flock"}), times=None, code=code)))
    mapped = store.load(1, framework="numpy", mmap=True)["weight"]
    path = segment_path(store, tmp_path, 1)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 10)
        file.write(b"\xff" * 10)
    assert np.array_equal(mapped, state(1)["weight"])
    for options in ({}, {"mmap": True}, {"into": {"weight": np.zeros(NBYTES, np.uint8), "step": 0}}):
        with pytest.raises(CorruptSegmentError):
            store.load(1, framework="numpy", verify=False, **options)
        recycling_store(tmp_path).load(1, framework="numpy", verify=False, **options)


def test_without_locks_deltas_are_verified_as_well(tmp_path: Path) -> None:
    with recycling_store(tmp_path).writer(deltas=CHAIN, threads=1, staging_bytes=32 << 20) as writer:
        for step in (1, 2):
            writer.save({"weight": np.arange(NBYTES, dtype=np.uint8) * step}, step)
    store = recycling_store(tmp_path, FaultyPosix(SYSTEM, Fault(frozenset({"flock"}), times=None, code=errno.ENOSYS)))
    delta = next(entry for entry, doc in store.describe(2) if doc.encodings[doc.steps[0]].kind == "delta")
    size = (tmp_path / delta.key).stat().st_size
    with (tmp_path / delta.key).open("r+b") as file:
        file.seek(delta.header)
        byte = file.read(1)
        file.seek(delta.header)
        file.write(bytes([byte[0] ^ 255]))
    assert (tmp_path / delta.key).stat().st_size == size
    with pytest.raises(CorruptSegmentError, match="checksum mismatch"):
        store.load(2, framework="numpy", verify=False)


def test_another_failure_of_the_lock_is_an_error(tmp_path: Path) -> None:
    write_segment(opened(tmp_path), filled(BLOCK))
    backend = opened(tmp_path, FaultyPosix(SYSTEM, Fault(frozenset({"flock"}), code=errno.EIO)))
    with pytest.raises(StorageError):
        backend.open_source(SEGMENT)
    assert read_segment(backend) == filled(BLOCK)


@pytest.mark.parametrize("call", ["flock", "set_lease", "fdatasync", "pwrite", "rename_between", "file_system"])
def test_whatever_a_writer_cannot_have_it_does_without(tmp_path: Path, call: str) -> None:
    release(opened(tmp_path))
    fault = Fault(frozenset({call}), times=1 if call in ("fdatasync", "pwrite") else None, code=errno.EOPNOTSUPP)
    backend = LocalBackend(tmp_path, FaultyPosix(SYSTEM, fault), recycle="always")
    sink = backend.open_sink(NEXT, 8 * BLOCK)
    assert isinstance(sink, FileSink)
    assert not sink.recycled
    sink.write(0, filled(8 * BLOCK, 2))
    sink.seal(8 * BLOCK)
    assert (tmp_path / NEXT).read_bytes() == filled(8 * BLOCK, 2)


# Whether to recycle


def test_a_mode_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_RECYCLE", raising=False)
    assert LocalBackend(tmp_path).recycling.startswith("undecided")
    assert LocalBackend(tmp_path).reopened().recycling.startswith("undecided")
    monkeypatch.setenv("CKPTSTORE_RECYCLE", "always")
    assert LocalBackend(tmp_path).recycling.startswith("on")
    assert LocalBackend(tmp_path, recycle="never").recycling.startswith("off")
    assert LocalBackend(tmp_path, recycle="never").reopened().recycling.startswith("off")
    monkeypatch.setenv("CKPTSTORE_RECYCLE", "sometimes")
    with pytest.raises(UsageError, match="CKPTSTORE_RECYCLE='sometimes'"):
        LocalBackend(tmp_path)
    with pytest.raises(UsageError, match="recycle='yes'"):
        LocalBackend(tmp_path, recycle="yes")


def test_files_that_other_machines_may_have_open_are_never_kept(tmp_path: Path) -> None:
    class Network(RamPosix):
        def file_system(self, fd: int) -> int:
            super().file_system(fd)
            return NFS

    assert NFS not in LOCAL
    disk = RamPosix()
    here = LocalBackend("/store", disk, recycle="always")
    write_segment(here, filled(8 * BLOCK))
    here.release(SEGMENT)
    assert here.shrink_spare(1 << 30) == 8 * BLOCK
    there = LocalBackend("/store", Network(disk.image()), recycle="always")
    assert there.recycling == "off: not on this file system"
    write_segment(there, filled(8 * BLOCK), NEXT)
    there.release(NEXT)
    assert there.list("seg/") == []
    assert there.shrink_spare(1 << 30) == 0, "nor is what was kept elsewhere"


class Timed(RamPosix):
    """A disk on which writing new blocks takes `slower` times as long as old ones, until they exist.

    It keeps none of the measured data.
    """

    def __init__(self, slower: float) -> None:
        super().__init__()
        self.slower = slower
        self.now = 0.0
        self.unsynced = 0.0
        self.written: set[tuple[int, int]] = set()
        self.calls = 0

    def clock(self) -> float:
        return self.now

    def fallocate(self, fd: int, size: int) -> None:
        if size < WORTH:
            super().fallocate(fd, size)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if len(data) < WORTH:
            return super().pwrite(fd, data, offset)
        self.calls += 1
        place = self.fstat(fd).st_ino, offset
        self.unsynced += 1.0 if place in self.written else self.slower
        self.written.add(place)
        return len(data)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.now, self.unsynced = self.now + self.unsynced, 0.0


def test_overwriting_is_measured_against_new_files() -> None:
    for slower in (1.0, 4.0):
        disk = Timed(slower)
        folder = disk.open("/", os.O_RDONLY)
        assert measure(disk, folder, disk.clock) == pytest.approx(slower)
        assert disk.scandir("/") == []
    assert measure(FaultyPosix(disk, Fault(frozenset({"create"}), code=errno.EINVAL)), folder) is None, "no O_DIRECT"


def test_nothing_is_measured_where_space_is_short() -> None:
    class Full(Timed):
        def statvfs(self, fd: int) -> os.statvfs_result:
            super().statvfs(fd)
            return os.statvfs_result((4096, 4096, 1 << 20, 10, 10, 0, 0, 0, 0, 255))

    disk = Full(4.0)
    assert measure(disk, disk.open("/", os.O_RDONLY), disk.clock) is None
    assert disk.calls == 0


@pytest.mark.parametrize(("slower", "kept"), [(1.2, False), (1.4, True)])
def test_a_measurement_decides_once(slower: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends.local_disk import overwriting

    disk = Timed(slower)
    monkeypatch.setattr(overwriting.measure, "__defaults__", (disk.clock,))
    backend = LocalBackend("/store", disk, recycle="auto")
    small = filled(BLOCK)
    write_segment(backend, small)
    backend.release(SEGMENT)
    assert disk.calls == 0, "too small to be worth it"
    for number in range(2):
        key = f"seg/0000000001/{number}.safetensors"
        sink = backend.open_sink(key, BLOCK)
        sink.seal(WORTH)
        backend.release(key)
        assert disk.calls == 16, "measured once"
    assert backend.shrink_spare(1 << 40) == (2 * WORTH if kept else 0)
    assert backend.recycling.startswith("on" if kept else "off")
    assert f"{slower:.2f} times" in backend.recycling
    sink = backend.open_sink(NEXT, BLOCK)
    assert backend.shrink_spare(1 << 40) == (2 * WORTH if kept else 0), "a small segment takes no large file"
    sink.abort()
    backend.open_sink(NEXT, 8 * WORTH).abort()
    assert backend.shrink_spare(1 << 40) == (2 * WORTH if kept else 0), "and a large one none that is much shorter"
    backend.open_sink(NEXT, WORTH).abort()
    assert backend.shrink_spare(1 << 40) == (WORTH if kept else 0)


# Readers that race


def _read_without_pins(root: str, stop: Any, seed: int, loads: Any, results: Any) -> None:
    """Load what the log names, unpinned, again and again: each load is right, or an error says that the checkpoint is
    gone. `loads` counts them."""
    from ckptstore.host.threads import workers
    from ckptstore.segments.segment_reader import SegmentReader, load_tensors, map_tensors

    store = recycling_store(root)
    loaded = errors = wrong = 0
    rng = np.random.default_rng(seed)
    held: list[tuple[int, Any]] = []
    with workers(1, "read") as pool:
        while not stop.is_set():
            catalog = store.view().catalog
            for entry in list(catalog.checkpoints.values()):
                (encoding,) = catalog.encodings[entry.id.node]
                try:
                    reader = SegmentReader(store.backend, catalog.segments[encoding.segments[0]])
                    try:
                        (tensor,) = reader.doc.tensors[entry.id.step].values()
                        fetch = map_tensors if rng.random() < 0.5 else load_tensors
                        data = fetch(reader, [tensor], pool.pool)[tensor.name]
                    finally:
                        reader.close()
                except CkptError:
                    errors += 1
                    continue
                loaded += 1
                loads.release()
                held.append((entry.id.step, data))
                held = held[-4:]
            wrong += sum(bool((data != step % 251).any()) for step, data in held)
    results.put((loaded, errors, wrong))


def test_readers_beside_a_writer_that_recycles_never_see_wrong_bytes(tmp_path: Path) -> None:
    store = recycling_store(tmp_path)
    save(store, 1)
    spawn = multiprocessing.get_context("spawn")
    stop, loads, results = spawn.Event(), spawn.Semaphore(0), spawn.Queue()
    readers = [
        spawn.Process(target=_read_without_pins, args=(str(tmp_path), stop, seed, loads, results), daemon=True)
        for seed in (1, 2)
    ]
    for reader in readers:
        reader.start()
    recycled, before = 0, segment_path(store, tmp_path, 1).stat().st_ino
    try:
        for step in range(2, 20):
            assert loads.acquire(timeout=120)  # on a busy machine they might have no turn until the end
            save(store, step)
            retire(store, step - 1)
            collect(store.journal)
            node = segment_path(store, tmp_path, step).stat().st_ino
            recycled += node == before
            before = next((path.stat().st_ino for path in spare(tmp_path)), 0)
    finally:
        stop.set()
    found = [results.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join(120)
    assert sum(wrong for _, _, wrong in found) == 0, found
    assert sum(loaded for loaded, _, _ in found) > 10, found
    assert recycled > 0


@pytest.fixture(autouse=True)
def _no_mode_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_RECYCLE", raising=False)
