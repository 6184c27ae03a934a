"""A POSIX file system in memory that `LocalBackend` runs on, so that opening a crash state needs no disk."""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass

from ckptstore.backends.posix import Posix
from tools.crash.disk import (
    ROOT,
    Allocate,
    Image,
    Name,
    Operation,
    Rename,
    Sync,
    Tree,
    Truncate,
    Unname,
    Write,
)

SECTOR = 512
"""Bytes: the disk writes one whole or not at all, and O_DIRECT wants offsets and lengths to be multiples."""

_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class _Open:
    node: int
    flags: int


class RamPosix(Posix):
    """A file system that starts as `image`. Thread-safe; several backends on one object are several processes.

    It is as strict as a disk: O_DIRECT wants whole sectors, nothing is in the page cache, a rename stays in its folder.

    Args:
        image: what is there at first.
        direct: whether O_DIRECT is supported; False behaves like an old tmpfs.
    """

    def __init__(self, image: Image | None = None, *, direct: bool = True) -> None:
        self._tree = Tree(image or Image())
        self._supports_direct = direct
        self._lock = threading.RLock()
        self._descriptors: dict[int, _Open] = {}
        self._next_descriptor = 1 << 20  # far from real ones: a mix-up shows at once
        self._next_node = 1 + max([*self._tree.folders, *self._tree.files])

    @property
    def open_descriptors(self) -> int:
        """How many descriptors are open: none, when everybody has cleaned up."""
        return len(self._descriptors)

    def image(self) -> Image:
        """What a process sees now, synced or not."""
        with self._lock:
            return self._tree.freeze()

    def _apply(self, operation: Operation) -> None:
        self._tree.apply(operation)

    # Paths

    def _start(self, dir_fd: int | None) -> int:
        """The folder that paths begin at: a descriptor's, wherever it is now, or the root."""
        return ROOT if dir_fd is None else self._opened(dir_fd, file=False).node

    def _node(self, path: str, dir_fd: int | None = None) -> int:
        node = self._start(dir_fd)
        for name in filter(lambda part: part not in ("", "."), path.split("/")):
            if node not in self._tree.folders:
                raise _error(errno.ENOTDIR, path)
            if name not in self._tree.folders[node]:
                raise _error(errno.ENOENT, path)
            node = self._tree.folders[node][name]
        return node

    def _place(self, path: str, dir_fd: int | None = None) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        folder = self._node(parent, dir_fd)
        if folder not in self._tree.folders:
            raise _error(errno.ENOTDIR, path)
        return folder, name

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    def open(self, path: str, flags: int, dir_fd: int | None = None) -> int:
        with self._lock:
            if flags & os.O_DIRECT and not self._supports_direct:
                raise _error(errno.EINVAL, path)
            folder, name = self._place(path, dir_fd)
            node = folder if name in ("", ".") else self._tree.folders[folder].get(name)
            if node is None:
                if not flags & os.O_CREAT:
                    raise _error(errno.ENOENT, path)
                node = self._new_node()
                self._apply(Name(folder, name, node, "file"))
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise _error(errno.EEXIST, path)
            if node in self._tree.folders and flags & (os.O_CREAT | os.O_TRUNC | _WRITING):
                raise _error(errno.EISDIR, path)
            if flags & os.O_DIRECTORY and node not in self._tree.folders:
                raise _error(errno.ENOTDIR, path)
            if flags & os.O_TRUNC:
                self._apply(Truncate(node, 0))
            self._next_descriptor += 1
            self._descriptors[self._next_descriptor] = _Open(node, flags)
            return self._next_descriptor

    def stat(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> os.stat_result:  # noqa: ARG002
        with self._lock:  # there are no links to follow
            return self._status(self._node(path, dir_fd))

    def _status(self, node: int) -> os.stat_result:
        is_folder = node in self._tree.folders
        mode = stat.S_IFDIR | 0o755 if is_folder else stat.S_IFREG | 0o644
        size = 0 if is_folder else len(self._tree.contents(node))
        return os.stat_result((mode, node, 1, 1, 0, 0, size, 0, 0, 0))

    def writable(self, fd: int) -> bool:
        return bool(self.fstat(fd).st_mode & stat.S_IWUSR)

    def link(self, source: str, target: str, dir_fd: int | None = None) -> None:
        with self._lock:
            node, (folder, name) = self._node(source, dir_fd), self._place(target, dir_fd)
            if name in self._tree.folders[folder]:
                raise _error(errno.EEXIST, target)
            if node in self._tree.folders:
                raise _error(errno.EPERM, source)
            self._apply(Name(folder, name, node))

    def rename_exclusive(self, source: str, target: str, dir_fd: int | None = None) -> None:
        with self._lock:
            folder, name = self._place(target, dir_fd)
            if name in self._tree.folders[folder]:
                raise _error(errno.EEXIST, target)
            self.replace(source, target, dir_fd)

    def replace(self, source: str, target: str, dir_fd: int | None = None) -> None:
        with self._lock:
            folder, name = self._place(source, dir_fd)
            target_folder, target_name = self._place(target, dir_fd)
            if folder != target_folder:
                raise _error(errno.EXDEV, target)
            self._apply(Rename(folder, name, target_name, self._node(source, dir_fd)))

    def unlink(self, path: str, dir_fd: int | None = None) -> None:
        with self._lock:
            node, (folder, name) = self._node(path, dir_fd), self._place(path, dir_fd)
            if node in self._tree.folders:
                raise _error(errno.EISDIR, path)
            self._apply(Unname(folder, name, node))

    def mkdir(self, path: str, dir_fd: int | None = None) -> None:
        with self._lock:
            folder, name = self._place(path, dir_fd)
            if not name or name in self._tree.folders[folder]:
                raise _error(errno.EEXIST, path)
            self._apply(Name(folder, name, self._new_node(), "folder"))

    def scandir(self, folder: str | int) -> list[tuple[str, bool]]:
        with self._lock:
            node = self._node(folder) if isinstance(folder, str) else self._start(folder)
            if node not in self._tree.folders:
                raise _error(errno.ENOTDIR, str(folder))
            return [(name, child in self._tree.folders) for name, child in self._tree.folders[node].items()]

    # Descriptors

    def _opened(self, fd: int, *, file: bool = True) -> _Open:
        if fd not in self._descriptors:
            raise _error(errno.EBADF)
        opened = self._descriptors[fd]
        if file and opened.node in self._tree.folders:
            raise _error(errno.EISDIR)
        return opened

    def _written(self, fd: int, refusal: int) -> int:
        opened = self._opened(fd, file=False)
        if not opened.flags & _WRITING:
            raise _error(refusal)
        return opened.node

    def _transfer(self, fd: int, length: int, offset: int) -> int:
        opened = self._opened(fd)
        if opened.flags & os.O_DIRECT and (offset % SECTOR or length % SECTOR):
            raise _error(errno.EINVAL)
        return opened.node

    def close(self, fd: int) -> None:
        with self._lock:
            self._opened(fd, file=False)
            del self._descriptors[fd]

    def fstat(self, fd: int) -> os.stat_result:
        with self._lock:
            return self._status(self._opened(fd, file=False).node)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            node = self._written(fd, errno.EBADF)
            self._transfer(fd, len(data), offset)
            self._apply(Write(node, offset, bytes(data)))
            return len(data)

    def preadv(self, fd: int, out: memoryview, offset: int) -> int:
        with self._lock:
            contents = self._tree.contents(self._transfer(fd, len(out), offset))
            count = max(0, min(len(out), len(contents) - offset))
            out[:count] = memoryview(contents)[offset : offset + count]
            return count

    def preadv_cached(self, fd: int, out: memoryview, offset: int) -> int:  # noqa: ARG002 - nothing is cached
        raise _error(errno.EAGAIN)

    def map(self, fd: int, size: int) -> memoryview:
        with self._lock:
            return memoryview(bytearray(self._tree.contents(self._opened(fd).node)[:size]))

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._apply(Truncate(self._written(fd, errno.EINVAL), size))

    def fallocate(self, fd: int, size: int) -> None:
        with self._lock:
            self._apply(Allocate(self._written(fd, errno.EBADF), size))

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._apply(Sync(self._opened(fd, file=False).node))

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)


def _error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path)
