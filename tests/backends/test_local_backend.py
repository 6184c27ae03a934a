"""Behaviour that only a backend on a file system has: temporaries, refusals, failed syncs, kills."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.errors import (
    CorruptSegmentError,
    KeyExistsError,
    KeyNotFoundError,
    ReadOnlyError,
    StorageError,
    UnsupportedBackendError,
    UsageError,
)
from ckptstore.host.pages import BLOCK
from tests.backends.backend_conformance import SEGMENT, aligned, filled, read_segment, write_segment
from tools.crash.faults import (
    Fault,
    FaultyPosix,
    acknowledgement_lost,
    disk_full,
    interrupted,
    no_exclusive_rename,
    no_hard_links,
    read_fails,
    read_only_mount,
    short_reads,
    sync_fails,
)
from tools.crash.ramfs import RamPosix


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# Sources


@pytest.mark.parametrize("length", [1, BLOCK, 4 << 20])
def test_a_source_ends_where_the_segment_did_when_it_was_opened(tmp_path: Path, length: int) -> None:
    backend = LocalBackend(tmp_path)
    write_segment(backend, filled(3 * BLOCK))
    with backend.open_source(SEGMENT) as source:
        with (tmp_path / SEGMENT).open("ab") as file:
            file.write(b"x" * length)  # whatever extended it, these are not the segment's bytes
        with pytest.raises(CorruptSegmentError, match=f"ends at byte {3 * BLOCK}"):
            source.read_into(3 * BLOCK, aligned(length))


# Temporaries


def test_nothing_but_the_objects_stays_in_the_folder(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.probe()
    backend.create("log/0", b"x")
    backend.replace("pins/a", b"x")
    with pytest.raises(KeyExistsError):
        backend.create("log/0", b"y")
    assert names_below(tmp_path) == ["0", "a"]


def test_temporaries_are_not_listed_and_strays_can_be_collected(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.create("log/0", b"x")
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()
    dead, alive, ours = f".tmp-{child.pid}-a", f".tmp-{os.getppid()}-b", f".tmp-{os.getpid()}-c"
    for name in (dead, alive, ours):
        (tmp_path / "log" / name).write_bytes(b"partly writ")
    assert backend.list("") == ["log/0"]
    assert backend.stray_temporaries() == tuple(sorted((f"log/{dead}", f"log/{ours}")))
    for key in backend.stray_temporaries():
        backend.discard_stray(key)
        backend.discard_stray(key)
    assert names_below(tmp_path) == sorted(["0", alive])


def test_a_temporary_in_use_is_no_stray(tmp_path: Path) -> None:
    found: list[tuple[str, ...]] = []

    class Watching(Posix):
        def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
            found.append(LocalBackend(tmp_path).stray_temporaries())
            assert (tmp_path / "log" / source).exists()
            super().link(source, target, dir_fd)

    LocalBackend(tmp_path, Watching()).create("log/0", b"x")
    assert found == [()]


@pytest.mark.parametrize(
    ("point", "created"),
    [("create.temp-written", False), ("create.before-link", False), ("create.linked", True), ("create.synced", True)],
)
def test_a_kill_during_create_leaves_all_or_nothing(tmp_path: Path, point: str, created: bool) -> None:
    script = (
        "import sys; from ckptstore.backends.local_disk.local import LocalBackend; b = LocalBackend(sys.argv[1]);"
        "b.create('log/0', b'first'); b.create('log/1', b'second'); b.create('log/2', b'third')"
    )
    environment = {**os.environ, "CKPTSTORE_CRASH_AT": f"{point}:2"}
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    backend = LocalBackend(tmp_path)
    assert backend.list("") == (["log/0", "log/1"] if created else ["log/0"])
    strays = backend.stray_temporaries()
    assert len(strays) == 1
    backend.discard_stray(strays[0])
    if created:
        assert backend.get("log/1") == b"second"
        with pytest.raises(KeyExistsError):
            backend.create("log/1", b"other")
    else:
        backend.create("log/1", b"other")
    assert len(names_below(tmp_path)) == 2


# Media that refuse a call


def test_a_read_only_mount_is_readable_and_says_so() -> None:
    disk = RamPosix()
    before = LocalBackend("/store", disk)
    assert not before.read_only
    before.create("log/0", b"x")
    write_segment(before, filled(BLOCK))
    backend = LocalBackend("/store", FaultyPosix(disk, read_only_mount()))
    assert backend.read_only
    assert backend.get("log/0") == b"x"
    assert read_segment(backend) == filled(BLOCK)
    assert backend.list("") == ["log/0", SEGMENT]
    for refused in (
        lambda: backend.create("log/1", b"y"),
        lambda: backend.replace("pins/a", b"y"),
        lambda: backend.delete("log/0"),
        lambda: backend.open_sink("seg/1/x", 0),
        backend.probe,
    ):
        with pytest.raises(ReadOnlyError, match="/store"):
            refused()
    assert backend.list("") == ["log/0", SEGMENT]


def test_a_folder_without_permission_is_read_only() -> None:
    """Checked in a child that is nobody if this process is root, who may write anywhere (others may not enter
    tmp_path)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LocalBackend(folder).create("FORMAT", b"x")
        folder.chmod(0o555)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                backend = LocalBackend(folder)
                assert backend.read_only
                assert backend.get("FORMAT") == b"x"
                with pytest.raises(ReadOnlyError):
                    backend.create("log/0", b"")
                status = 0
            except BaseException:  # noqa: BLE001  # reported by the exit status; the trace goes to the captured output
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        folder.chmod(0o755)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_a_rename_that_never_replaces_will_do(tmp_path: Path, code: int) -> None:
    posix = FaultyPosix(SYSTEM, no_hard_links(code))
    backend = LocalBackend(tmp_path, posix)
    backend.probe()
    backend.create("log/0", b"x")
    with pytest.raises(KeyExistsError):
        backend.create("log/0", b"y")
    assert backend.get("log/0") == b"x"
    assert posix.calls["rename_exclusive"] > 0
    assert names_below(tmp_path) == ["0"]


def test_without_any_exclusive_naming_the_medium_is_refused(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, FaultyPosix(SYSTEM, no_hard_links(), no_exclusive_rename()))
    with pytest.raises(UnsupportedBackendError, match="exclude each other"):
        backend.probe()
    with pytest.raises(UnsupportedBackendError):
        backend.create("log/0", b"x")
    assert names_below(tmp_path) == []


def test_probe_finds_a_medium_that_creates_twice(tmp_path: Path) -> None:
    class Overwriting(Posix):
        def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
            (tmp_path / target).unlink(missing_ok=True)
            super().link(source, target, dir_fd)

    with pytest.raises(UnsupportedBackendError, match="twice"):
        LocalBackend(tmp_path, Overwriting()).probe()
    assert names_below(tmp_path) == []


def test_a_medium_that_cannot_sync_folders_is_refused() -> None:
    class NoFolderSync(RamPosix):
        def fsync(self, fd: int) -> None:
            if not self.fstat(fd).st_size:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().fsync(fd)

    with pytest.raises(UnsupportedBackendError, match="sync folders"):
        LocalBackend("/store/deep", NoFolderSync()).create("log/0", b"x")


def test_folders_above_the_store_that_we_may_not_sync_are_passed_over() -> None:
    class Guarded(RamPosix):
        def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
            if path in ("/", "/home") and flags & os.O_DIRECTORY:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().open(path, flags, dir_fd)

    disk = Guarded()
    disk.mkdir("/home")
    disk.mkdir("/home/user")
    LocalBackend("/home/user/store", disk).create("log/0", b"x")
    disk = Guarded()
    disk.mkdir("/home")
    with pytest.raises(ReadOnlyError, match="/home"):
        LocalBackend("/home/user/store", disk).create("log/0", b"x")


# Failures


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_failed_sync_is_reported_and_never_repeated_for_a_folder(nth: int) -> None:
    disk = RamPosix()
    LocalBackend("/store", disk).create("log/0", b"x")
    posix = FaultyPosix(disk, sync_fails(nth))
    backend = LocalBackend("/store", posix)
    with pytest.raises(StorageError) as caught:  # /, /store, the temporary, /store/log
        backend.create("log/1", b"y")
    assert caught.value.errno == errno.EIO
    syncs = posix.calls["fsync"]
    if nth == 3:
        backend.create("log/1", b"y")  # a new temporary is not a repetition
        return
    for _ in range(2):
        with pytest.raises(StorageError):
            backend.create("log/2", b"z")
        with pytest.raises(StorageError):
            backend.settle("log/")
    assert posix.calls["fsync"] - syncs == (2 if nth == 4 else 0), "only fresh temporaries are synced"
    assert (b"y" in [backend.get(key) for key in backend.list("log/")]) == (nth == 4), "linked, but in doubt"


def test_a_lost_acknowledgement_leaves_the_object_to_be_read_back() -> None:
    backend = LocalBackend("/store", FaultyPosix(RamPosix(), acknowledgement_lost()))
    with pytest.raises(StorageError) as caught:
        backend.create("log/0", b"x")
    assert not isinstance(caught.value, KeyExistsError)
    assert backend.get("log/0") == b"x"
    backend.settle("log/")
    assert backend.stray_temporaries() == ()


def test_a_full_disk_is_reported_and_leaves_nothing_behind() -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", FaultyPosix(disk, *disk_full()))
    with pytest.raises(StorageError) as caught:
        backend.create("log/0", b"x" * 100)
    assert caught.value.errno == errno.ENOSPC
    assert "/store/log/0" in str(caught.value)
    sink = backend.open_sink(SEGMENT, BLOCK)
    with pytest.raises(StorageError, match="No space"):
        sink.write(0, filled(BLOCK))
    sink.abort()
    with pytest.raises(StorageError):
        backend.replace("pins/a", b"x")
    assert [path for path, blob in disk.image().walk() if blob is not None] == []
    backend.close()
    assert disk.open_descriptors == 0


def test_a_size_hint_too_large_for_the_disk_is_only_a_hint() -> None:
    full = Fault(frozenset({"fallocate"}), times=None, code=errno.ENOSPC)
    backend = LocalBackend("/store", FaultyPosix(RamPosix(), full))
    write_segment(backend, filled(3 * BLOCK))
    assert read_segment(backend) == filled(3 * BLOCK)


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_a_reservation_that_failed_keeps_no_space(part: float) -> None:
    """`fallocate` may have reserved some space before it fails; other writers must find the disk as free as before."""
    disk = RamPosix()
    full = Fault(frozenset({"fallocate"}), times=None, code=errno.ENOSPC, part=part)
    sink = LocalBackend("/store", FaultyPosix(disk, full)).open_sink(SEGMENT, 1 << 30 if part == 0.0 else 1 << 20)
    assert disk.stat(f"/store/{SEGMENT}").st_size == 0
    sink.write(0, filled(BLOCK))
    assert disk.stat(f"/store/{SEGMENT}").st_size == BLOCK
    sink.seal(BLOCK)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_segment_whose_sync_failed_is_never_sealed(nth: int) -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", disk)
    write_segment(backend, filled(BLOCK), "seg/0000000001/first")
    posix = FaultyPosix(disk, Fault(frozenset({"fdatasync"}), code=errno.EIO) if nth == 1 else sync_fails(5))
    failing = LocalBackend("/store", posix)
    sink = failing.open_sink(SEGMENT, BLOCK)  # syncs /, /store and /store/seg
    sink.write(0, filled(BLOCK))
    for _ in range(2):
        with pytest.raises(StorageError):
            sink.seal(BLOCK)
    assert posix.calls["fdatasync"] == 1, "a failed sync is not repeated"
    sink.abort()
    assert backend.list("") == ["seg/0000000001/first"]
    for opened in (backend, failing):
        opened.close()
    assert disk.open_descriptors == 0


@pytest.mark.parametrize("nth", range(1, 7))
def test_interrupted_calls_are_repeated(nth: int) -> None:
    posix = FaultyPosix(RamPosix(), interrupted(nth, 2))
    backend = LocalBackend("/store", posix)
    backend.create("log/0", b"x" * 1000)
    write_segment(backend, filled(300 * BLOCK), block=150 * BLOCK)
    assert backend.get("log/0") == b"x" * 1000
    assert read_segment(backend) == filled(300 * BLOCK)
    assert sum(posix.calls[name] for name in ("pwrite", "preadv", "preadv_cached")) > 6, "one of them was repeated"


def test_a_failing_read_is_a_storage_error() -> None:
    disk = RamPosix()
    write_segment(LocalBackend("/store", disk), filled(2 << 20))
    backend = LocalBackend("/store", FaultyPosix(disk, read_fails(2)))
    with backend.open_source(SEGMENT) as source, pytest.raises(StorageError, match=r"cannot read.*0123456789abcdef"):
        source.read_into(0, aligned(2 << 20))


def test_a_write_that_makes_no_progress_is_an_error_not_a_hang() -> None:
    class Stuck(RamPosix):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    backend = LocalBackend("/store", Stuck())
    sink = backend.open_sink(SEGMENT, BLOCK)
    with pytest.raises(StorageError, match="wrote nothing"):
        sink.write(0, filled(BLOCK))
    with pytest.raises(StorageError, match="wrote nothing"):
        backend.create("log/0", b"x")


@pytest.mark.parametrize("faults", [(), (short_reads(part=0.9),)])
def test_a_segment_that_shrinks_while_it_is_read_is_corrupt(faults: tuple[Fault, ...]) -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", FaultyPosix(disk, *faults))
    write_segment(backend, filled(3 << 20))
    with backend.open_source(SEGMENT) as source:
        descriptor = disk.open(f"/store/{SEGMENT}", os.O_WRONLY)
        for left in ((2 << 20) + 100, 2 << 20, 0):
            disk.ftruncate(descriptor, left)
            with pytest.raises(CorruptSegmentError, match="0123456789abcdef"):
                source.read_into(0, aligned(3 << 20))


# Direct I/O


def test_segments_pass_by_the_page_cache_and_unaligned_ends_do_not(tmp_path: Path) -> None:
    direct: list[tuple[str, int, int]] = []
    descriptors: set[int] = set()

    class Watching(RamPosix):
        def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
            descriptor = super().open(path, flags, dir_fd)
            if flags & os.O_DIRECT:
                descriptors.add(descriptor)
            return descriptor

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if fd in descriptors:
                direct.append(("write", offset, len(data)))
            return super().pwrite(fd, data, offset)

        def preadv(self, fd: int, out: memoryview, offset: int) -> int:
            if fd in descriptors:
                direct.append(("read", offset, len(out)))
            return super().preadv(fd, out, offset)

    backend = LocalBackend("/store", Watching())
    sink = backend.open_sink(SEGMENT, 2 << 20)
    sink.write(0, filled(2 << 20))
    sink.seal((2 << 20) - 1)
    with backend.open_source(SEGMENT) as source:
        memory = aligned(2 << 20)
        source.read_into(0, memory[: (2 << 20) - 1])
        source.read_into(100, memory[100 : (2 << 20) - 1])  # the same place in its page: the middle is aligned
        source.read_into(100, memory[: (1 << 20) + BLOCK])  # cannot be aligned
        source.read_into(0, memory[:BLOCK])  # too small to be worth it
    whole = (2 << 20) - BLOCK
    assert direct == [("write", 0, 2 << 20), ("read", 0, whole), ("read", BLOCK, whole - BLOCK)]


def test_a_device_with_larger_blocks_gets_buffered_writes_and_reads() -> None:
    class LargeBlocks(RamPosix):
        def _transfer(self, fd: int, length: int, offset: int) -> int:
            if self._descriptors[fd].flags & os.O_DIRECT and length % 65536:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super()._transfer(fd, length, offset)

    backend = LocalBackend("/store", LargeBlocks())
    write_segment(backend, filled((2 << 20) + BLOCK), block=(1 << 20) + BLOCK)
    assert read_segment(backend) == filled((2 << 20) + BLOCK)


def test_what_the_page_cache_holds_is_read_from_there(tmp_path: Path) -> None:
    class Counting(Posix):
        direct = 0

        def preadv(self, fd: int, out: memoryview, offset: int) -> int:
            import fcntl

            self.direct += bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            return super().preadv(fd, out, offset)

    posix = Counting()
    backend = LocalBackend(tmp_path, posix)
    (tmp_path / "seg").mkdir()
    (tmp_path / "seg" / "cached").write_bytes(filled(4 << 20))
    with backend.open_source("seg/cached") as source:
        out = aligned(4 << 20)
        source.read_into(0, out)
        assert out == filled(4 << 20)
    assert posix.direct == 0


def test_no_descriptor_is_left_open() -> None:
    disk = RamPosix()
    backend = LocalBackend("/store", disk)
    backend.probe()
    backend.create("log/0", b"x")
    with pytest.raises(KeyExistsError):
        backend.create("log/0", b"x")
    write_segment(backend, filled(2 << 20))
    read_segment(backend)
    with pytest.raises(KeyExistsError):
        backend.open_sink(SEGMENT, 0)
    with pytest.raises(CorruptSegmentError):
        backend.open_source("log")
    with pytest.raises(KeyNotFoundError):
        backend.open_source("log/1")
    backend.open_sink("seg/1/x", 0).abort()
    backend.settle("")
    assert disk.open_descriptors == 3  # the store, log/ and seg/, in which it has made a file
    backend.close()
    backend.close()
    assert disk.open_descriptors == 0
    LocalBackend("/store", disk).create("log/2", b"x")
    assert disk.open_descriptors == 0, "whoever lets go of a backend has closed it"


def test_two_dots_behind_a_link_lead_where_every_other_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "name").symlink_to(tmp_path / "far")
    monkeypatch.chdir(tmp_path)
    LocalBackend("link/../store").create("FORMAT", b"x")
    assert Path("link/../store/FORMAT").read_bytes() == b"x"
    assert not Path("store").exists()
    assert LocalBackend("./link/.././store/").get("FORMAT", 9) == b"x"
    assert LocalBackend("name/store").root == str(tmp_path / "name" / "store")  # no `..`: the link stays
    assert LocalBackend("absent/../store").root == str(tmp_path / "store")


def test_every_call_after_close_says_that_the_store_was_closed(tmp_path: Path) -> None:
    """Another folder may have the closed handle's number by then."""
    backend = LocalBackend(tmp_path / "s")
    backend.create("log/0", b"x")
    backend.close()
    handles = [os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(4)]
    calls: list[Callable[[], object]] = [
        backend.deleted,
        lambda: backend.get("log/0"),
        lambda: backend.size("log/0"),
        lambda: backend.list("log/"),
        lambda: backend.create("log/1", b"x"),
        lambda: backend.replace("log/0", b"y"),
        lambda: backend.delete("log/0"),
        lambda: backend.open_sink("seg/0", BLOCK),
        lambda: backend.open_source("log/0"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="was closed; open the store again"):
            call()
    for one in handles:
        os.close(one)
