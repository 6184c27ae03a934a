"""Stores on persistent memory: the conformance suite in both modes, full media, memory that others store to.

This machine has no persistent memory. libpmem runs on shared memory that it is told to treat as persistent: the code is
the real one, but nothing survives a power cut. ``tests/tools/test_crash_pmem.py`` checks that on a model.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptstore.backends import open_backend
from ckptstore.backends.local_disk import libpmem
from ckptstore.backends.local_disk.libpmem import Libpmem
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.backends.local_disk.posix import Posix, address_of
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError, UnsupportedBackendError
from ckptstore.host.pages import BLOCK
from tests.backends.backend_conformance import SEGMENT, BackendConformance, Opener, filled, read_segment, write_segment
from tools.crash.faults import Fault, FaultyPosix, short_reads, short_writes
from tools.crash.media import assuming, no_library
from tools.crash.ramfs import RamPosix

SHARED_MEMORY = Path("/dev/shm")

needs_libpmem = pytest.mark.skipif(libpmem.load() is None, reason="libpmem.so.1 is not installed")
needs_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no tmpfs here")


def by_msync(folder: Path) -> PmemBackend:
    return PmemBackend(folder, library=no_library)


def by_libpmem(folder: Path) -> PmemBackend:
    return PmemBackend(folder, library=assuming)


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = SHARED_MEMORY / f"ckptstore-test-{uuid.uuid4().hex}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=[by_msync, pytest.param(by_libpmem, marks=needs_libpmem)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> PmemBackend:
    return request.param(tmp_path / "store")


# Conformance


class TestPmemByMsync(BackendConformance):
    processes = True

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return functools.partial(by_msync, tmp_path / "runs" / "gpt")


@needs_shared_memory
class TestPmemByMsyncOnTmpfs(BackendConformance):
    rounds = 20

    @pytest.fixture
    def opener(self, shared: Path) -> Opener:
        return functools.partial(by_msync, shared)


@needs_libpmem
@needs_shared_memory
class TestPmemByLibpmem(BackendConformance):
    processes = True

    @pytest.fixture
    def opener(self, shared: Path) -> Opener:
        return functools.partial(by_libpmem, shared)


class TestPmemInMemory(BackendConformance):
    """On the file system that the crash tests use: proof that its mappings behave like some."""

    rounds = 20

    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(PmemBackend, "/data/store", RamPosix())


class TestPmemWithShortTransfers(BackendConformance):
    rounds = 20

    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(PmemBackend, "/store", FaultyPosix(RamPosix(), short_reads(), short_writes()))


# The library


def test_the_calls_of_the_library() -> None:
    asked: list[tuple[object, ...]] = []

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *arguments: object) -> int:
            asked.append((self.name, *arguments))
            return 1

    class Library(dict[str, Function]):
        def __missing__(self, name: str) -> Function:
            return Function(name)

    library = Libpmem(Library())  # type: ignore[arg-type]
    one, two = memoryview(bytearray(10)), memoryview(bytearray(10))
    assert library.is_pmem(one)
    library.copy(one, two[:7])
    library.flush(one)
    library.drain()
    at, data = address_of(one), address_of(two)
    nodrain_and_nontemporal = 0b11
    assert asked == [
        ("pmem_is_pmem", at, 10),
        ("pmem_memcpy", at, data, 7, nodrain_and_nontemporal),
        ("pmem_flush", at, 10),
        ("pmem_drain",),
    ]


def test_another_library_of_that_name_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for replacement in ("libc.so.6", "no-such-library.so"):
        libpmem.load.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(libpmem, "_NAME", replacement)
            assert libpmem.load() is None
    libpmem.load.cache_clear()


# The mode in use


class Persistent(Posix):
    """Grants MAP_SYNC on any file."""

    def map_shared(self, fd: int, offset: int, size: int, *, sync: bool) -> memoryview:
        return super().map_shared(fd, offset, size, sync=False)


def test_the_medium_says_what_is_in_force(tmp_path: Path) -> None:
    assert by_msync(tmp_path).medium() == "pmem (nothing here can be mapped for writing)"
    by_msync(tmp_path).create("log/0", b"x")
    by_msync(tmp_path).create("FORMAT", b"x")
    assert by_msync(tmp_path).medium() == "pmem (msync: no MAP_SYNC here)"
    assert by_msync(tmp_path).reopened().medium() == "pmem (msync: no MAP_SYNC here)"
    without = PmemBackend(tmp_path, Persistent(), library=no_library)
    assert without.medium() == "pmem (msync: libpmem.so.1 is not installed)"
    if libpmem.load() is not None:
        assert PmemBackend(tmp_path, Persistent()).medium() == "pmem (libpmem, non-temporal stores)"
        assert "no MAP_SYNC here, but PMEM_IS_PMEM_FORCE is set" in by_libpmem(tmp_path).medium()
    assert (tmp_path / "FORMAT").read_bytes() == b"x"


def test_other_media_say_what_they_are(tmp_path: Path) -> None:
    LocalBackend(tmp_path).create("FORMAT", b"x")
    assert LocalBackend(tmp_path, RamPosix()).medium() == "folder (through the page cache)"  # there is nothing to query
    assert LocalBackend(tmp_path, direct=False).medium() == "folder (through the page cache)"
    for direct, text in ((True, "folder (O_DIRECT)"), (False, "folder (through the page cache)")):
        posix = RamPosix(direct=direct)
        LocalBackend("/store", posix).create("FORMAT", b"x")
        assert LocalBackend("/store", posix).medium() == text
    assert MemoryBackend("media").medium() == "memory of this process"
    MemoryBackend.forget("media")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOMEM, errno.ENODEV])
def test_a_mapping_that_fails_for_another_reason_is_an_error(code: int) -> None:
    """Only the refusal of MAP_SYNC means that it is unsupported."""
    posix = FaultyPosix(RamPosix(), Fault(frozenset({"map_shared"}), times=None, code=code))
    backend = PmemBackend("/store", posix)
    with pytest.raises(StorageError) as caught:
        backend.open_sink(SEGMENT, 0).write(0, filled(BLOCK))
    assert caught.value.errno == code
    assert posix.calls["map_shared"] == 1


@needs_libpmem
@needs_shared_memory
def test_a_store_is_saved_and_loaded_by_url_with_the_library_forced(shared: Path) -> None:
    script = (
        "import sys, numpy as np, ckptstore; url = sys.argv[1]; x = np.arange(5_000_000)\n"
        "with ckptstore.open(url).writer() as writer: writer.save({'x': x}, step=1)\n"
        "for mmap in (False, True):\n"
        "    found = ckptstore.open(url, create=False).load(framework='numpy', mmap=mmap)\n"
        "    assert (found['x'] == x).all()\n"
    )
    environment = {**os.environ, "PMEM_IS_PMEM_FORCE": "1"}
    url = f"pmem://{shared}"
    subprocess.run([sys.executable, "-c", script, url], env=environment, check=True)
    shown = subprocess.run(
        [sys.executable, "-c", "from ckptstore.cli.main import main; main()", "inspect", url],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "medium: pmem (libpmem, non-temporal stores; no MAP_SYNC here" in shown


# Full media


def test_a_full_medium_is_reported_and_leaves_nothing_behind() -> None:
    disk = RamPosix()
    full = Fault(frozenset({"fallocate"}), times=None, code=errno.ENOSPC, part=1.0)
    backend = PmemBackend("/store", FaultyPosix(disk, full))
    sink = backend.open_sink(SEGMENT, 1 << 20)
    assert disk.stat(f"/store/{SEGMENT}").st_size == 0, "what others write finds the space as free as it was"
    for attempt in (lambda: sink.write(0, filled(BLOCK)), lambda: sink.map(0, BLOCK)):
        with pytest.raises(StorageError, match=SEGMENT) as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC
    sink.abort()
    assert [path for path, blob in disk.image().walk() if blob is not None] == []
    backend.close()
    assert disk.open_descriptors == 0


def test_a_size_hint_too_large_is_only_a_hint_and_so_is_what_is_allocated_ahead() -> None:
    disk = RamPosix()
    backend = PmemBackend(
        "/store", FaultyPosix(disk, *(Fault(frozenset({"fallocate"}), n, 1, errno.ENOSPC) for n in (1, 3)))
    )
    sink = backend.open_sink(SEGMENT, 1 << 30)
    sink.write(0, filled(2 * BLOCK))
    sink.write(2 * BLOCK, filled(BLOCK, 1))  # would double the file, and settles for a block
    assert disk.stat(f"/store/{SEGMENT}").st_size == 3 * BLOCK
    sink.seal(3 * BLOCK)
    assert read_segment(backend) == bytes(filled(2 * BLOCK)) + bytes(filled(BLOCK, 1))


def test_an_interrupted_allocation_is_repeated() -> None:
    backend = PmemBackend("/store", FaultyPosix(RamPosix(), Fault(frozenset({"fallocate"}), 1, 3, errno.EINTR)))
    write_segment(backend, filled(BLOCK))
    assert read_segment(backend) == filled(BLOCK)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_allocate_ahead_is_refused(code: int) -> None:
    disk = RamPosix()
    backend = PmemBackend("/store", FaultyPosix(disk, Fault(frozenset({"fallocate"}), times=None, code=code)))
    with pytest.raises(UnsupportedBackendError, match="allocate ahead"):
        backend.probe()
    with pytest.raises(UnsupportedBackendError, match=SEGMENT):
        backend.open_sink(SEGMENT, BLOCK).write(0, filled(BLOCK))


@pytest.mark.root
@pytest.mark.parametrize("mode", ["", "1"])
def test_a_tmpfs_that_fills_up_ends_in_an_error_and_not_in_sigbus(tmp_path: Path, mode: str) -> None:
    """On a real tmpfs, in a separate process."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = (
        "import sys, subprocess, mmap; from ckptstore.backends import open_backend\n"
        "from ckptstore.errors import StorageError\n"
        "made = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', sys.argv[1]])\n"
        "if made.returncode: print('cannot mount'); sys.exit()\n"
        "backend = open_backend('pmem://' + sys.argv[1], create=True); data = memoryview(mmap.mmap(-1, 1 << 20))\n"
        "for hint in (0, 16 << 20):\n"
        "    sink = backend.open_sink('seg/1/a', hint)\n"
        "    try:\n"
        "        for number in range(16): sink.write(number << 20, data)\n"
        "    except StorageError as error: print(error.errno, number)\n"
        "    sink.abort()\n"
        "backend.create('log/0', b'x'); print(backend.list(''))\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, tmp_path],
        env={**os.environ, "PMEM_IS_PMEM_FORCE": mode},
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot mount" in done.stdout or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{errno.ENOSPC} 4\n{errno.ENOSPC} 4\n['log/0']\n"


def test_a_file_that_is_cut_under_its_writer_ends_in_an_error_and_not_in_sigbus(
    backend: PmemBackend, tmp_path: Path
) -> None:
    sink = backend.open_sink(SEGMENT, 4 * BLOCK)
    os.truncate(tmp_path / "store" / SEGMENT, BLOCK)
    with pytest.raises(StorageError, match=SEGMENT) as caught:
        sink.write(0, filled(4 * BLOCK))
    assert caught.value.errno == errno.EFAULT
    sink.abort()


# Memory that is mapped for others


def test_a_segment_may_be_stored_to_by_whoever_has_it_mapped(backend: PmemBackend) -> None:
    data = filled(9 * BLOCK + 100)
    sink = backend.open_sink(SEGMENT, BLOCK)
    sink.write(BLOCK, data[BLOCK : 3 * BLOCK])
    views = [(3 * BLOCK, BLOCK + 7), (4 * BLOCK + 7, 5 * BLOCK + 93), (2 * BLOCK + 5, BLOCK), (0, BLOCK)]
    for offset, length in views:  # within a mapping, beyond the last one, across two, at the begin
        view = sink.map(offset, length)
        assert view is not None
        assert len(view) == length
        view[:] = data[offset : offset + length]
        sink.persist(offset, length)
    sink.seal(len(data))
    assert read_segment(backend) == data


def test_two_views_of_the_same_bytes_are_one(backend: PmemBackend) -> None:
    sink = backend.open_sink(SEGMENT, BLOCK)
    sink.write(BLOCK, filled(BLOCK))
    one, two = sink.map(0, 2 * BLOCK), sink.map(BLOCK - 4, 8)
    one[BLOCK - 4 : BLOCK] = b"abcd"
    assert two == b"abcd" + bytes(filled(BLOCK)[:4])
    sink.abort()


def test_a_finished_segment_is_mapped_for_nobody(backend: PmemBackend) -> None:
    sealed, aborted = backend.open_sink(SEGMENT, BLOCK), backend.open_sink(SEGMENT + "2", BLOCK)
    sealed.seal(0)
    aborted.abort()
    for sink in (sealed, aborted):
        for attempt in (sink.map, sink.persist):
            with pytest.raises(StorageError) as caught:
                attempt(0, BLOCK)
            assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("medium", ["folder", "memory"])
def test_a_medium_without_mappings_says_so(medium: str, tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path) if medium == "folder" else MemoryBackend(uuid.uuid4().hex)
    sink = backend.open_sink(SEGMENT, BLOCK)
    assert sink.map(0, BLOCK) is None
    with pytest.raises(StorageError, match="mapped"):
        sink.persist(0, BLOCK)
    sink.abort()


def test_read_only_memory_is_written_as_well(backend: PmemBackend) -> None:
    sink = backend.open_sink(SEGMENT, BLOCK)
    sink.write(0, memoryview(bytes(filled(BLOCK))))
    sink.seal(BLOCK)
    assert read_segment(backend) == filled(BLOCK)


def test_nothing_stays_open_or_mapped(backend: PmemBackend, tmp_path: Path) -> None:
    for number in range(3):
        sink = backend.open_sink(f"seg/0000000001/{number}", 0)
        for block in range(4):
            sink.write(block * BLOCK, filled(BLOCK))
        sink.map(BLOCK - 1, 2)
        if number:
            sink.abort()
        else:
            sink.seal(4 * BLOCK)
    assert backend.medium().startswith("pmem")
    backend.probe()
    opened = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert sorted(path for path in opened if path.startswith(str(tmp_path))) == [
        f"{tmp_path}/store",
        f"{tmp_path}/store/seg",
    ]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_threads_that_make_a_segment_longer_do_not_meet(backend: PmemBackend) -> None:
    data = filled(64 * BLOCK)
    sink = backend.open_sink(SEGMENT, 0)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(sink.write, at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]:
            done.result()
    sink.seal(len(data))
    assert read_segment(backend) == data


def test_a_writer_that_comes_too_late_harms_nothing(backend: PmemBackend) -> None:
    """Memory that another thread still copies to is not unmapped during the copy."""
    sink = backend.open_sink(SEGMENT, BLOCK)
    view = sink.map(0, BLOCK)
    sink.abort()
    view[:] = filled(BLOCK)
    assert backend.list("") == []


def test_a_pmem_url_names_a_folder(tmp_path: Path) -> None:
    backend = open_backend(f"pmem://{tmp_path}/run", create=True)
    assert isinstance(backend, PmemBackend)
    backend.create("FORMAT", b"x")
    assert (tmp_path / "run" / "FORMAT").read_bytes() == b"x"
    assert backend.reopened().get("FORMAT") == b"x"
    assert isinstance(backend.reopened(), PmemBackend)
