"""The system calls of the local backend, as one plain object.

`LocalBackend`, its sinks and its sources access the disk only through a `Posix`. Crash tests replace it with one that
keeps everything in memory, records writes, forgets what was not synced, or fails (``tools/crash``). Every method does
what the call of its name does and raises `OSError`; the backend interprets the error.
"""

# This module works with plain strings, because system calls take them.

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import signal
from contextlib import suppress
from typing import Final, TypeAlias

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_MAP_SHARED_VALIDATE: Final = 0x03
_MAP_SYNC: Final = 0x80000
_MS_SYNC: Final = 4
_MADV_POPULATE_WRITE: Final = 23


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_Argument: TypeAlias = int | bytes | ctypes.c_int64 | ctypes.c_void_p | ctypes.c_size_t | ctypes.Array[ctypes.c_char]


def _call(name: str, *arguments: _Argument) -> None:
    """Call a libc function that Python does not offer. Raises `OSError` if it fails, ENOSYS if libc lacks it."""
    function = getattr(_libc(), name, None)
    code = errno.ENOSYS
    if function is not None:
        if function(*arguments) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def address_of(memory: memoryview) -> int:
    """The address of writable, nonempty `memory` in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _call_on_pages(name: str, memory: memoryview, advice: int) -> None:
    """`_call` with address and length of the pages that hold `memory`."""
    with memory[:1]:  # an export: prevents an unmap meanwhile
        address = address_of(memory)
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        _call(name, ctypes.c_void_p(begin), ctypes.c_size_t(address + len(memory) - begin), advice)


class Posix:
    """The real system calls. Descriptors are plain integers.

    Paths are absolute, or relative to the folder whose descriptor is `dir_fd` (``openat(2)`` and similar). A relative
    call reaches that folder even after it was moved, and never a folder that took its place.
    """

    def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
        """``openat(2)``, close-on-exec; the umask determines the mode."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """``close(2)``."""
        os.close(fd)

    def stat(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> os.stat_result:
        """``fstatat(2)``; without `follow` it describes a symbolic link itself."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)

    def fstat(self, fd: int) -> os.stat_result:
        """``fstat(2)``."""
        return os.fstat(fd)

    def writable(self, fd: int) -> bool:
        """``faccessat(2)``: whether this process may write to the folder `fd` (permissions, read-only mounts)."""
        return os.access(".", os.W_OK, dir_fd=fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """``pwrite(2)``; returns the number of bytes written, which may be less than `data` has."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, out: memoryview, offset: int) -> int:
        """``preadv(2)`` into one buffer; returns the number of bytes read: may be less than requested, 0 at the end."""
        return os.preadv(fd, [out], offset)

    def preadv_cached(self, fd: int, out: memoryview, offset: int) -> int:
        """`preadv` from the page cache only; raises `BlockingIOError` if the disk would be needed."""
        return os.preadv(fd, [out], offset, os.RWF_NOWAIT)

    def map(self, fd: int, size: int) -> memoryview:
        """``mmap(2)`` of the first `size` > 0 bytes, copy on write; it lives as long as the memoryview."""
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))

    def map_shared(self, fd: int, offset: int, size: int, *, sync: bool) -> memoryview:
        """``mmap(2)`` of `size` > 0 bytes of the file, readable, writable, shared; see `unmap`.

        Args:
            fd: open for reading and writing.
            offset: a multiple of the page size.
            sync: with MAP_SYNC, which only persistent memory supports: mapped blocks keep their place in the file after
                a power cut. Elsewhere this raises EOPNOTSUPP (EINVAL before Linux 4.15).
        """
        flags = _MAP_SHARED_VALIDATE | _MAP_SYNC if sync else mmap.MAP_SHARED
        try:
            return memoryview(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset))
        except ValueError as error:  # Python checks the length before it maps
            raise OSError(errno.ESTALE, "the file has been cut short") from error

    def unmap(self, memory: memoryview) -> None:
        """Release a mapping; if parts of it are still in use, it is released with the last of them."""
        with suppress(BufferError):
            memory.release()

    def populate(self, memory: memoryview) -> None:
        """``madvise(2)`` with MADV_POPULATE_WRITE: prepare the pages of mapped `memory` for stores.

        Raises EFAULT where a store would kill the process with SIGBUS. Does nothing before Linux 5.14.
        """
        while True:
            try:
                _call_on_pages("madvise", memory, _MADV_POPULATE_WRITE)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            return

    def msync(self, memory: memoryview) -> None:
        """``msync(2)`` with MS_SYNC of the pages that hold mapped `memory`."""
        _call_on_pages("msync", memory, _MS_SYNC)

    def ftruncate(self, fd: int, size: int) -> None:
        """``ftruncate(2)``."""
        os.ftruncate(fd, size)

    def fallocate(self, fd: int, size: int) -> None:
        """``fallocate(2)`` of bytes [0, size), extending the file.

        Not ``posix_fallocate``: on a file system without the call, that writes a byte into every block instead.
        """
        _call("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))

    def fsync(self, fd: int) -> None:
        """``fsync(2)``, of a file or a folder."""
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """``fdatasync(2)``: contents, length and block map, but not the times."""
        os.fdatasync(fd)

    def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
        """``linkat(2)`` within one folder; raises `FileExistsError`, never replaces."""
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_exclusive(self, source: str, target: str, dir_fd: int | None = None) -> None:
        """``renameat2(2)`` with RENAME_NOREPLACE; raises `FileExistsError`, never replaces."""
        folder = _AT_FDCWD if dir_fd is None else dir_fd
        _call("renameat2", folder, os.fsencode(source), folder, os.fsencode(target), _RENAME_NOREPLACE)

    def replace(self, source: str, target: str, dir_fd: int | None = None) -> None:
        """``renameat(2)``; replaces `target`."""
        os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_between(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        """``renameat2(2)`` with RENAME_NOREPLACE from one folder to another; raises `FileExistsError`."""
        names = os.fsencode(source), os.fsencode(target)
        _call("renameat2", source_fd, names[0], target_fd, names[1], _RENAME_NOREPLACE)

    def flock(self, fd: int, operation: int) -> None:
        """``flock(2)``; with LOCK_NB raises `BlockingIOError` if another holder has it.

        The lock belongs to the open file description, not to the process. Forked children and mappings share it, until
        the last of them is gone or one calls LOCK_UN.
        """
        fcntl.flock(fd, operation)

    def set_lease(self, fd: int, kind: int) -> None:
        """``fcntl(F_SETLEASE)``: F_WRLCK raises `BlockingIOError` while anyone else has the file open or mapped."""
        # When someone opens a leased file, the holder gets a signal. The default is SIGIO, which would kill this
        # process, so choose SIGURG, which is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)

    def statvfs(self, fd: int) -> os.statvfs_result:
        """``fstatvfs(3)``: how full the file system of this file or folder is."""
        return os.fstatvfs(fd)

    def file_system(self, fd: int) -> int:
        """``fstatfs(2)``: the kind of file system of this file or folder, as in ``linux/magic.h``."""
        status = ctypes.create_string_buffer(512)  # enough for every libc; the kind is the first field
        _call("fstatfs", fd, status)
        return ctypes.c_ulong.from_buffer(status).value & 0xFFFFFFFF

    def unlink(self, path: str, dir_fd: int | None = None) -> None:
        """``unlinkat(2)``."""
        os.unlink(path, dir_fd=dir_fd)

    def mkdir(self, path: str, dir_fd: int | None = None) -> None:
        """``mkdirat(2)``."""
        os.mkdir(path, dir_fd=dir_fd)

    def scandir(self, folder: str | int) -> list[tuple[str, bool]]:
        """``readdir(3)`` of a path or descriptor: names in any order, and whether each is a folder (links are not)."""
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def write_some(posix: Posix, fd: int, data: memoryview, offset: int) -> int:
    """`Posix.pwrite` for use in a loop: returns 0 if interrupted, and raises instead of writing 0 bytes forever."""
    try:
        count = posix.pwrite(fd, data, offset)
    except InterruptedError:
        return 0
    if count == 0:
        raise OSError(errno.EIO, "the system wrote nothing")
    return count


SYSTEM: Final = Posix()
"""The `Posix` that every `LocalBackend` uses unless a test passes another."""
