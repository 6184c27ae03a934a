"""A POSIX file system in memory that `LocalBackend` runs on, so that opening a crash state needs no disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from dataclasses import dataclass

from ckptstore.backends.local_disk.posix import Posix
from tools.crash.disk import (
    LINE,
    ROOT,
    Allocate,
    Drain,
    Image,
    Name,
    Operation,
    Rename,
    Store,
    Sync,
    Tree,
    Truncate,
    Unname,
    Write,
)
from tools.crash.rammaps import SharedMaps

SECTOR = 512
"""Sector size in bytes: a disk writes a sector whole or not at all. O_DIRECT requires offsets and lengths in multiples.
"""

_WRITING = os.O_WRONLY | os.O_RDWR
EXT4 = 0xEF53
"""The kind of file system that it reports."""


@dataclass(frozen=True, slots=True)
class _Open:
    node: int
    flags: int


class RamPosix(Posix):
    """A file system that starts as `image`. Thread-safe; several backends on one object act as several processes.

    It is as strict as a disk: O_DIRECT requires whole sectors, and nothing is in the page cache. A rename to another
    folder is two changes, and a power cut may keep either: more than any journal allows.

    Args:
        image: the initial contents.
        direct: whether O_DIRECT is supported; False behaves like an old tmpfs.
    """

    def __init__(self, image: Image | None = None, *, direct: bool = True) -> None:
        self._tree = Tree(image or Image())
        self._supports_direct = direct
        self._lock = threading.RLock()
        self._descriptors: dict[int, _Open] = {}
        self._next_descriptor = 1 << 20  # far from real descriptors: a mix-up shows at once
        self._locks: dict[int, int] = {}
        self._leases: dict[int, int] = {}
        self._next_node = 1 + max([*self._tree.folders, *self._tree.files])
        self._maps = SharedMaps()
        self._stores: list[Store] = []  # that nothing has drained yet
        self._stored = 0

    @property
    def mapped(self) -> bool:
        """Whether a file is mapped."""
        return bool(self._maps.nodes)

    @property
    def open_descriptors(self) -> int:
        """The number of open descriptors: 0 after every user has cleaned up."""
        return len(self._descriptors)

    def image(self) -> Image:
        """The file system as a process sees it now, synced or not."""
        with self._lock:
            self._look()
            return self._tree.freeze()

    def _apply(self, operation: Operation) -> None:
        self._tree.apply(operation)
        match operation:
            case Write(node, offset, data):
                self._maps.write(node, offset, data)
            case Truncate(node, size):
                self._maps.resize(node, size)
            case Allocate(node):
                self._maps.resize(node, len(self._tree.contents(node)))

    # Paths

    def _start(self, dir_fd: int | None) -> int:
        """The folder where a path starts: that of a descriptor, at its present place, or the root."""
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
            if node in self._leases.values():
                raise _error(errno.EWOULDBLOCK, path)  # as with O_NONBLOCK
            if flags & os.O_TRUNC:
                self._apply(Truncate(node, 0))
            return self.open_node(node, flags)

    def open_node(self, node: int, flags: int) -> int:
        """Open a file whose path was looked up before, even if another file has its name now -> a descriptor."""
        with self._lock:
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
        names = 1 if is_folder else sum(list(names.values()).count(node) for names in self._tree.folders.values())
        return os.stat_result((mode, node, 1, names, 0, 0, size, 0, 0, 0))

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

    def rename_between(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        with self._lock:
            (folder, name), (target_folder, target_name) = (
                self._place(source, source_fd),
                self._place(target, target_fd),
            )
            node = self._node(source, source_fd)
            if target_name in self._tree.folders[target_folder]:
                raise _error(errno.EEXIST, target)
            self._apply(Name(target_folder, target_name, node))
            self._apply(Unname(folder, name, node))

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

    # Mappings

    def map_shared(self, fd: int, offset: int, size: int, *, sync: bool) -> memoryview:
        with self._lock:
            if sync:
                raise _error(errno.EOPNOTSUPP)
            node = self._written(fd, errno.EACCES)
            if offset + size > len(self._tree.contents(node)):
                raise _error(errno.ESTALE)
            self._look()
            return self._maps.map(node, self._tree.contents(node), offset, size)

    def unmap(self, memory: memoryview) -> None:
        with self._lock:
            self._look()
            self._maps.unmap(memory)
        super().unmap(memory)

    def populate(self, memory: memoryview) -> None:
        with self._lock:
            node, offset = self._maps.place(memory)
            if offset + len(memory) > len(self._tree.contents(node)):
                raise _error(errno.EFAULT)

    def msync(self, memory: memoryview) -> None:
        self.drained(frozenset(store.number for store in self.pending_stores(memory)))

    def _look(self, *bounds: int) -> None:
        """Note the stores into mapped memory since the last look, divided at `bounds`."""
        for node in self._maps.nodes:
            for offset, data in self._maps.stored(node, self._tree.contents(node), bounds):
                self._store(node, offset, data)

    def _store(self, node: int, offset: int, data: bytes) -> int:
        self._stored += 1
        self._stores.append(Store(node, offset, data, self._stored))
        self._apply(self._stores[-1])
        return self._stored

    def store(self, target: memoryview, data: memoryview) -> int:
        """Copy into mapped memory, as one store -> its number."""
        with self._lock:
            node, offset = self._maps.place(target)
            self._look()
            target[:] = data
            return self._store(node, offset, bytes(data))

    def pending_stores(self, memory: memoryview) -> list[Store]:
        """Stores that lie wholly in the lines of mapped `memory` and that nothing has drained yet."""
        with self._lock:
            node, offset = self._maps.place(memory)
            begin, end = offset // LINE * LINE, -(-(offset + len(memory)) // LINE) * LINE
            self._look(begin, end)
            return [
                store
                for store in self._stores
                if store.node == node and begin <= store.offset and store.offset + len(store.data) <= end
            ]

    def drained(self, stores: frozenset[int]) -> None:
        """Note that these stores have reached the medium."""
        with self._lock:
            self._stores = [store for store in self._stores if store.number not in stores]
            self._apply(Drain(stores))

    def close(self, fd: int) -> None:
        with self._lock:
            self._opened(fd, file=False)
            del self._descriptors[fd]
            self._locks.pop(fd, None)
            self._leases.pop(fd, None)

    def flock(self, fd: int, operation: int) -> None:
        with self._lock:
            node = self._opened(fd, file=False).node
            kind = operation & ~fcntl.LOCK_NB
            if kind == fcntl.LOCK_UN:
                self._locks.pop(fd, None)
                return
            others = {held for other, held in self._locks.items() if other != fd and self._opened(other).node == node}
            if others and (kind == fcntl.LOCK_EX or fcntl.LOCK_EX in others):
                raise _error(errno.EWOULDBLOCK)
            self._locks[fd] = kind

    def set_lease(self, fd: int, kind: int) -> None:
        with self._lock:
            node = self._opened(fd).node
            users = [other for other, opened in self._descriptors.items() if opened.node == node]
            if kind == fcntl.F_UNLCK:
                self._leases.pop(fd, None)
                return
            if users != [fd]:
                raise _error(errno.EAGAIN)
            self._leases[fd] = node

    def statvfs(self, fd: int) -> os.statvfs_result:
        with self._lock:
            self._opened(fd, file=False)
            return os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, 0, 0, 0, 0, 255))

    def file_system(self, fd: int) -> int:
        with self._lock:
            self._opened(fd, file=False)
            return EXT4

    def fstat(self, fd: int) -> os.stat_result:
        with self._lock:
            return self._status(self._opened(fd, file=False).node)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self._look()
            node = self._written(fd, errno.EBADF)
            self._transfer(fd, len(data), offset)
            self._apply(Write(node, offset, bytes(data)))
            return len(data)

    def preadv(self, fd: int, out: memoryview, offset: int) -> int:
        with self._lock:
            self._look()
            contents = self._tree.contents(self._transfer(fd, len(out), offset))
            count = max(0, min(len(out), len(contents) - offset))
            out[:count] = memoryview(contents)[offset : offset + count]
            return count

    def preadv_cached(self, fd: int, out: memoryview, offset: int) -> int:  # noqa: ARG002 - nothing is cached
        raise _error(errno.EAGAIN)

    def map(self, fd: int, size: int) -> memoryview:
        with self._lock:
            self._look()
            return memoryview(bytearray(self._tree.contents(self._opened(fd).node)[:size]))

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._look()
            self._apply(Truncate(self._written(fd, errno.EINVAL), size))

    def fallocate(self, fd: int, size: int) -> None:
        with self._lock:
            self._look()
            self._apply(Allocate(self._written(fd, errno.EBADF), size))

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._look()
            self._apply(Sync(self._opened(fd, file=False).node))

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)


def _error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path)
