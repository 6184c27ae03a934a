"""A store on persistent memory: ``pmem:///path``, a folder of a DAX file system whose segments are written by stores.

Only the writing of segments differs from `LocalBackend`. Names, slots, syncs of folders and reading are the same. Reads
on such a file system bypass the page cache anyway, and ``read(2)`` reports an error where a mapping would get a SIGBUS.

A segment's file is allocated first, then mapped, then written by stores (`pmem_stores`), the header last. Then its
contents are made durable, then its length, then its name. The allocation comes first because on a full file system a
store into a hole kills the process instead of returning an error.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import SegmentSink, checked_key
from ckptstore.backends.local_disk import libpmem
from ckptstore.backends.local_disk.directio import FileSink
from ckptstore.backends.local_disk.folders import Folders
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem_stores import Library, Stores, mapped
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.backends.local_disk.room import Room
from ckptstore.backends.system_errors import writing
from ckptstore.errors import CkptError, StorageError, UnsupportedBackendError
from ckptstore.host.pages import BLOCK

__all__ = ["PmemBackend", "PmemSink"]

_GROWTH: Final = 256 << 20
"""Maximum bytes by which a file that becomes longer than expected is allocated ahead."""
_NO_ALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class _Region:
    """A mapped part of the file, from byte `begin`."""

    begin: int
    memory: memoryview
    stores: Stores

    @property
    def end(self) -> int:
        return self.begin + len(self.memory)

    def part(self, begin: int, end: int) -> memoryview:
        """The region's part of bytes `begin` to `end` of the file; may be empty."""
        return self.memory[max(begin - self.begin, 0) : max(end - self.begin, 0)]


class PmemSink(FileSink):
    """A new file that is written through mappings. See `FileSink`.

    Args:
        folders, key, posix, size_hint: see `FileSink`; a size hint that is too small costs another mapping.
        library: returns libpmem, or None.
        room: as for `FileSink`.
    """

    _access = os.O_RDWR

    def __init__(
        self, folders: Folders, key: str, posix: Posix, size_hint: int, library: Library, room: Room | None = None
    ) -> None:
        self._library = library
        self._regions: list[_Region] = []  # contiguous, from the start of the file to `_allocated`
        self._allocated = 0
        self._growing = threading.Lock()
        self._views: list[_Region] = []  # returned by `map` if no single region held the range
        self._lent: list[tuple[int, int]] = []  # ranges that `map` returned and that are not yet persisted
        super().__init__(folders, key, posix, size_hint, direct=False, room=room)

    def _reserve(self, descriptor: int, size: int) -> None:
        with suppress(OSError, CkptError):  # only a hint: the writes report what is wrong
            self._grow(descriptor, size)

    def _opened(self) -> int:
        if self._buffered is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self._path)
        return self._buffered

    def _grow(self, descriptor: int, end: int) -> None:
        """Allocate and map the file's first `end` bytes. Raises `OSError`, `UnsupportedBackendError`."""
        with self._growing:
            begin = self._allocated
            if end <= begin:
                return
            bound = self._room is not None and self._room.bound is not None and self._room.bound.active
            ahead = end if bound else max(end, min(2 * begin, begin + _GROWTH))
            size = self._allocate(descriptor, begin, {-(-ahead // BLOCK) * BLOCK, -(-end // BLOCK) * BLOCK})
            memory, stores = mapped(self._posix, self._library, descriptor, begin, size - begin)
            self._regions.append(_Region(begin, memory, stores))
            self._allocated = size
            if self._room is not None:
                self._room.sharing.allocated(self._save, size - begin)

    def _allocate(self, descriptor: int, begin: int, sizes: set[int]) -> int:
        """Allocate the largest of `sizes` for which there is space -> that size."""
        for size in sorted(sizes, reverse=True):
            try:
                self._fallocate(descriptor, size)
            except OSError as error:
                if error.errno in _NO_ALLOCATION:
                    why = "the file system cannot allocate ahead, and a store into a hole may end the process"
                    raise UnsupportedBackendError(error.errno, why, self._path) from error
                with suppress(OSError):
                    self._posix.ftruncate(descriptor, begin)  # give the space back to others
                if size == min(sizes):
                    raise
            else:
                return size
        raise AssertionError

    def _fallocate(self, descriptor: int, size: int) -> None:
        while True:
            try:
                self._posix.fallocate(descriptor, size)
            except InterruptedError:
                continue
            return

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`. Alignment does not matter."""
        view = data.cast("B")
        if view.readonly:
            view = memoryview(bytearray(view))  # a copy whose address ctypes can take
        with writing(self._path):
            for region, target in self._parts(offset, len(view)):
                self._posix.populate(target)
                region.stores.copy(target, view[: len(target)])
                view = view[len(target) :]
                region.stores.drain()

    def _parts(self, offset: int, length: int) -> Iterator[tuple[_Region, memoryview]]:
        """The mapped memory of these bytes, in order; allocates it if necessary."""
        self._grow(self._opened(), offset + length)
        for region in self._regions:
            if part := region.part(offset, offset + length):
                yield region, part

    def map(self, offset: int, length: int) -> memoryview:
        """See `SegmentSink.map`."""
        with writing(self._path):
            self._grow(descriptor := self._opened(), offset + length)
            end = offset + length
            region = next((one for one in self._regions if one.begin <= offset and end <= one.end), None)
            if region is None:
                begin = offset // BLOCK * BLOCK
                region = _Region(begin, *mapped(self._posix, self._library, descriptor, begin, end - begin))
                self._views.append(region)
            memory = region.part(offset, end)
            self._posix.populate(memory)
        with self._growing:
            self._lent.append((offset, end))
        return memory

    def persist(self, offset: int, length: int) -> None:
        """See `SegmentSink.persist`."""
        with writing(self._path):
            for region, part in self._parts(offset, length):
                region.stores.persist(part)
        with self._growing:
            self._lent = [(begin, end) for begin, end in self._lent if begin < offset or offset + length < end]

    def _finish_contents(self, descriptor: int, size: int) -> None:
        for begin, end in self._lent:
            for region in self._regions:
                if part := region.part(begin, end):
                    region.stores.persist(part)
        for region in self._regions:
            region.stores.sync(region.memory)
        super()._finish_contents(descriptor, size)

    def _close(self) -> None:
        regions, self._regions, self._views = [*self._regions, *self._views], [], []
        try:
            super()._close()
        finally:
            for region in regions:
                self._posix.unmap(region.memory)


class PmemBackend(LocalBackend):
    """The store in the folder `path`; see `LocalBackend`.

    Args:
        path: the folder, relative or absolute.
        posix: the system calls; crash tests pass their own.
        url: the path or URL that the user passed, for messages; None: `path`.
        library: returns libpmem; if it returns None, only msync is used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        posix: Posix = SYSTEM,
        *,
        url: str | None = None,
        library: Library = libpmem.load,
    ) -> None:
        self._library = library
        super().__init__(path, posix, url=url, recycle="never")  # its files are mapped, and new ones cost no more

    def reopened(self) -> PmemBackend:
        """See `Backend.reopened`."""
        return PmemBackend(self.root, self._posix, url=self.url, library=self._library)

    def medium(self) -> str:
        """See `Backend.medium`. Maps one of the store's files to find out, and stores nothing in it."""
        with suppress(OSError, CkptError), self._folders.opened("") as handle:
            for name in self._own_files():
                descriptor = self._posix.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, handle)
                try:
                    size = self._posix.fstat(descriptor).st_size
                    memory, stores = mapped(self._posix, self._library, descriptor, 0, size)
                    self._posix.unmap(memory)
                finally:
                    self._posix.close(descriptor)
                return f"pmem ({stores.text})"
        return "pmem (nothing here can be mapped for writing)"

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """See `Backend.open_sink`."""
        with writing(self._path(key)), self._folders.made(checked_key(key).rpartition("/")[0]):
            return PmemSink(self._folders, key, self._posix, size_hint, self._library, self._room)

    def probe(self) -> None:
        """See `Backend.probe`. Also checks that files can be allocated and mapped here."""
        super().probe()
        with writing(self.root), self._folders.made("") as handle, self._temporary(handle) as name:
            sink = PmemSink(self._folders, name, self._posix, 0, self._library)
            try:
                sink.write(0, memoryview(bytearray(BLOCK)))
            finally:
                sink.abort()
