"""A file system whose calls fail on demand.

::

    posix = FaultyPosix(RecordingPosix(), sync_fails(nth=2))
    backend = LocalBackend("/store", posix)

Faults wrap any `Posix`, also one of a real disk. On a `RecordingPosix` a failed sync is also recorded as failed, so the
enumerator knows that its data stays in doubt. `FaultyPosix.calls` counts the calls: run a scenario once without faults
to learn how many places can fail, then visit each.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptstore.backends.local_disk.posix import Posix
from tools.crash.ramfs import RamPosix
from tools.crash.recording import RecordingPosix

SYNCS = frozenset({"fsync", "fdatasync", "msync"})
READS = frozenset({"preadv", "preadv_cached"})
CHANGES = frozenset(
    {
        "pwrite",
        "ftruncate",
        "fallocate",
        "link",
        "rename_exclusive",
        "rename_between",
        "replace",
        "unlink",
        "mkdir",
        "create",
    }
)
"""Calls that change something; "create" is an `open` with O_CREAT."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: which calls fail, and how.

    Attributes:
        calls: names of `Posix` methods, counted together.
        nth: the first of them to fail, from 1.
        times: how many in a row fail; None: all from there on.
        code: errno to raise, or None for none.
        part: how much of the call still happens: of a read or write this share of the bytes (at least one byte), of
            another call nothing (0) or everything (1).
    """

    calls: frozenset[str]
    nth: int = 1
    times: int | None = 1
    code: int | None = None
    part: float = 0.0


def sync_fails(nth: int = 1, times: int | None = 1) -> Fault:
    """The `nth` fsync or fdatasync, of a file or a folder, reports EIO."""
    return Fault(SYNCS, nth, times, errno.EIO)


def sync_forgotten(nth: int = 1, times: int | None = 1) -> Fault:
    """The `nth` sync reports success and does nothing: a line deleted from the code, or a disk that lies."""
    return Fault(SYNCS, nth, times)


def disk_full(nth: int = 1) -> tuple[Fault, Fault]:
    """The `nth` write writes half its bytes, and from then on every write and reservation reports ENOSPC."""
    return Fault(frozenset({"pwrite"}), nth, 1, None, 0.5), Fault(frozenset({"pwrite"}), nth + 1, None, errno.ENOSPC)


def short_writes(nth: int = 1, times: int | None = None, part: float = 0.3) -> Fault:
    """Writes write fewer bytes than they were given, without an error."""
    return Fault(frozenset({"pwrite"}), nth, times, None, part)


def short_reads(nth: int = 1, times: int | None = None, part: float = 0.3) -> Fault:
    """Reads return fewer bytes than were requested, without an error."""
    return Fault(READS, nth, times, None, part)


def interrupted(nth: int = 1, times: int | None = 1) -> Fault:
    """Reads and writes report EINTR and do nothing."""
    return Fault(READS | {"pwrite"}, nth, times, errno.EINTR)


def read_fails(nth: int = 1, times: int | None = 1) -> Fault:
    """Reads report EIO."""
    return Fault(READS, nth, times, errno.EIO)


def acknowledgement_lost(nth: int = 1, times: int | None = 1) -> Fault:
    """The `nth` link or exclusive rename takes effect and then reports EIO, as over NFS."""
    return Fault(frozenset({"link", "rename_exclusive"}), nth, times, errno.EIO, 1.0)


def no_hard_links(code: int = errno.EPERM) -> Fault:
    """The file system has no hard links."""
    return Fault(frozenset({"link"}), 1, None, code)


def no_exclusive_rename() -> Fault:
    """The file system also lacks RENAME_NOREPLACE."""
    return Fault(frozenset({"rename_exclusive"}), 1, None, errno.EINVAL)


def read_only_mount() -> Fault:
    """Every call that would change the disk reports EROFS."""
    return Fault(CHANGES, 1, None, errno.EROFS)


class FaultyPosix(Posix):
    """`inner` (a `RamPosix` by default) with faults. Thread-safe.

    Attributes:
        calls: how often each method was called so far; an `open` with O_CREAT also counts as "create".
    """

    def __init__(self, inner: Posix | None = None, *faults: Fault) -> None:
        self.inner = inner or RamPosix()
        self.calls: Counter[str] = Counter()
        self._faults = [(fault, Counter[str]()) for fault in faults]
        # The garbage collector may close an unused handle in any thread, also inside this lock.
        self._lock = threading.RLock()

    def _fault(self, *names: str) -> Fault | None:
        """Count a call; returns the fault that hits it, if any."""
        with self._lock:
            self.calls.update(names)
            hit = None
            for fault, seen in self._faults:
                if fault.calls.isdisjoint(names):
                    continue
                seen["calls"] += 1
                past = seen["calls"] - fault.nth
                if past >= 0 and (fault.times is None or past < fault.times):
                    hit = hit or fault
            return hit

    def _do(self, call: Callable[[], _Result], *names: str) -> _Result:
        fault = self._fault(*names)
        if fault is None or fault.code is None:
            return call()
        if fault.part:
            call()
        raise OSError(fault.code, os.strerror(fault.code))

    def _transfer(self, call: Callable[[memoryview], int], name: str, view: memoryview) -> int:
        fault = self._fault(name)
        done = 0
        if fault is None or fault.part:
            part = 1.0 if fault is None else fault.part
            done = call(view[: max(1, int(len(view) * part))])
        if fault is not None and fault.code is not None:
            raise OSError(fault.code, os.strerror(fault.code))
        return done

    def _sync(self, call: Callable[[int], None], name: str, fd: int) -> None:
        fault = self._fault(name)
        if fault is None:
            call(fd)
        elif fault.code is not None:
            if isinstance(self.inner, RecordingPosix):
                self.inner.fail_sync(fd)
            raise OSError(fault.code, os.strerror(fault.code))

    def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
        names = ("open", "create") if flags & os.O_CREAT else ("open",)
        return self._do(lambda: self.inner.open(path, flags, dir_fd), *names)

    def close(self, fd: int) -> None:
        self._do(lambda: self.inner.close(fd), "close")

    def stat(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> os.stat_result:
        return self._do(lambda: self.inner.stat(path, dir_fd, follow=follow), "stat")

    def fstat(self, fd: int) -> os.stat_result:
        return self._do(lambda: self.inner.fstat(fd), "fstat")

    def writable(self, fd: int) -> bool:
        refused = any("create" in fault.calls and fault.code == errno.EROFS for fault, _ in self._faults)
        return not refused and self.inner.writable(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._transfer(lambda view: self.inner.pwrite(fd, view, offset), "pwrite", data)

    def preadv(self, fd: int, out: memoryview, offset: int) -> int:
        return self._transfer(lambda view: self.inner.preadv(fd, view, offset), "preadv", out)

    def preadv_cached(self, fd: int, out: memoryview, offset: int) -> int:
        return self._transfer(lambda view: self.inner.preadv_cached(fd, view, offset), "preadv_cached", out)

    def map(self, fd: int, size: int) -> memoryview:
        return self._do(lambda: self.inner.map(fd, size), "map")

    def map_shared(self, fd: int, offset: int, size: int, *, sync: bool) -> memoryview:
        return self._do(lambda: self.inner.map_shared(fd, offset, size, sync=sync), "map_shared")

    def unmap(self, memory: memoryview) -> None:
        self.inner.unmap(memory)

    def populate(self, memory: memoryview) -> None:
        self._do(lambda: self.inner.populate(memory), "populate")

    def msync(self, memory: memoryview) -> None:
        fault = self._fault("msync")
        if fault is None:
            self.inner.msync(memory)
        elif fault.code is not None:
            if isinstance(self.inner, RecordingPosix):
                self.inner.fail_msync(memory)
            raise OSError(fault.code, os.strerror(fault.code))

    def ftruncate(self, fd: int, size: int) -> None:
        self._do(lambda: self.inner.ftruncate(fd, size), "ftruncate")

    def fallocate(self, fd: int, size: int) -> None:
        self._do(lambda: self.inner.fallocate(fd, size), "fallocate")

    def fsync(self, fd: int) -> None:
        self._sync(self.inner.fsync, "fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._sync(self.inner.fdatasync, "fdatasync", fd)

    def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
        self._do(lambda: self.inner.link(source, target, dir_fd), "link")

    def rename_exclusive(self, source: str, target: str, dir_fd: int | None = None) -> None:
        self._do(lambda: self.inner.rename_exclusive(source, target, dir_fd), "rename_exclusive")

    def replace(self, source: str, target: str, dir_fd: int | None = None) -> None:
        self._do(lambda: self.inner.replace(source, target, dir_fd), "replace")

    def rename_between(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        self._do(lambda: self.inner.rename_between(source, source_fd, target, target_fd), "rename_between")

    def flock(self, fd: int, operation: int) -> None:
        self._do(lambda: self.inner.flock(fd, operation), "flock")

    def set_lease(self, fd: int, kind: int) -> None:
        self._do(lambda: self.inner.set_lease(fd, kind), "set_lease")

    def statvfs(self, fd: int) -> os.statvfs_result:
        return self._do(lambda: self.inner.statvfs(fd), "statvfs")

    def file_system(self, fd: int) -> int:
        return self._do(lambda: self.inner.file_system(fd), "file_system")

    def unlink(self, path: str, dir_fd: int | None = None) -> None:
        self._do(lambda: self.inner.unlink(path, dir_fd), "unlink")

    def mkdir(self, path: str, dir_fd: int | None = None) -> None:
        self._do(lambda: self.inner.mkdir(path, dir_fd), "mkdir")

    def scandir(self, folder: str | int) -> list[tuple[str, bool]]:
        return self._do(lambda: self.inner.scandir(folder), "scandir")
