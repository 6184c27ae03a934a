"""Read and write segments on a local disk, past the page cache where the file system allows it.

New preallocated files, written with O_DIRECT in blocks of 16 MiB, are the fastest way we know to durable bytes. They
need a tenth of the CPU time of buffered writes and leave the page cache to the data loader. Every file is also opened
without O_DIRECT: that descriptor serves what O_DIRECT refuses (tmpfs, some FUSE file systems, unaligned ends).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from contextlib import suppress
from typing import Final

from ckptstore.backends.base import SegmentSink, SegmentSource
from ckptstore.backends.local_disk.folders import Folders, kind_of
from ckptstore.backends.local_disk.posix import Posix, address_of, write_some
from ckptstore.backends.local_disk.room import Room
from ckptstore.backends.local_disk.spare_files import FULL, SpareFiles
from ckptstore.backends.system_errors import reading, writing
from ckptstore.errors import (
    CkptError,
    CorruptSegmentError,
    ForeignObjectError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
)
from ckptstore.host.pages import BLOCK

DIRECT_MINIMUM: Final = 1 << 20
"""Reads below this many bytes are faster with the kernel's read-ahead than past the page cache."""


_NO_FILES: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""Errors of the system when it refuses to open a link, a socket or a device without a driver."""
_NO_LOCKS: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK, errno.EBADF})
"""Errors of file systems that have no locks, or no shared locks for readers."""


def open_direct(posix: Posix, name: str, flags: int, folder: int) -> int | None:
    """A second descriptor with O_DIRECT; None if the file system (or a limit of the process) refuses it."""
    try:
        return posix.open(name, flags | os.O_DIRECT | os.O_NOFOLLOW, folder)
    except OSError:
        return None


def open_file(posix: Posix, name: str, folder: int, path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading -> (descriptor, result of fstat). Never blocks, as opening a pipe would.

    Args:
        posix: the system calls.
        name: name of the file.
        folder: handle of its folder.
        path: path of the file, for errors.

    Raises:
        ForeignObjectError: it is not a regular file. A link is refused, too: its target does not belong to the store.
        OSError: from the system.
    """
    try:
        descriptor = posix.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, folder)
    except OSError as error:
        if error.errno in _NO_FILES:
            kind = kind_of(posix.stat(name, folder, follow=False).st_mode)
            raise ForeignObjectError(f"{path} is {kind}, not a file of a store") from error
        raise
    try:
        status = posix.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignObjectError(f"{path} is {kind_of(status.st_mode)}, not a file of a store")
    except BaseException:
        posix.close(descriptor)
        raise
    return descriptor, status


class FileSink(SegmentSink):
    """A new file in an existing folder. Raises `KeyExistsError` if the name is taken.

    Args:
        folders: the folders of the store, or of another place to write files in.
        key: path of the file from their root.
        posix: the system calls.
        size_hint: bytes to reserve; a poor guess only costs time.
        direct: whether to try O_DIRECT.
        spare: spare files whose blocks the new file may reuse.
        room: frees space when the disk is full.
        folder: a handle of the file's folder, valid during this call; None: it is opened here.
    """

    _access = os.O_WRONLY

    def __init__(
        self,
        folders: Folders,
        key: str,
        posix: Posix,
        size_hint: int,
        *,
        direct: bool = True,
        spare: SpareFiles | None = None,
        room: Room | None = None,
        folder: int | None = None,
    ) -> None:
        self._folders = folders
        self._folder, _, self._name = key.rpartition("/")
        self._path = f"{folders.root}/{key}"
        self._posix = posix
        self._room = room
        self._save = None if room is None else room.sharing.here()
        self._settled = False  # True once sealed or removed: then `abort` has nothing to do
        with writing(self._path):
            if folder is None:
                with folders.opened(self._folder) as opened:
                    descriptor = self._create(opened, size_hint, direct=direct, spare=spare)
            else:
                descriptor = self._create(folder, size_hint, direct=direct, spare=spare)
        if size_hint > 0:
            self._reserve(descriptor, -(-size_hint // BLOCK) * BLOCK)

    def _create(self, folder: int, size_hint: int, *, direct: bool, spare: SpareFiles | None) -> int:
        """Create the file, or take a spare one, and open it -> its descriptor without O_DIRECT."""
        try:
            taken = None if spare is None else spare.take(folder, self._name, size_hint)
            self._recycled = taken is not None
            # O_EXCL without O_DIRECT: if O_DIRECT is refused, the file would already have been created.
            flags = self._access | os.O_CREAT | os.O_EXCL
            descriptor = self._posix.open(self._name, flags, folder) if taken is None else taken
        except FileExistsError as error:
            raise KeyExistsError(errno.EEXIST, "the segment exists already", self._path) from error
        self._buffered: int | None = descriptor
        self._direct = open_direct(self._posix, self._name, os.O_WRONLY, folder) if direct else None
        return descriptor

    @property
    def recycled(self) -> bool:
        """Whether the file overwrites the blocks of a released segment."""
        return self._recycled

    def _reserve(self, descriptor: int, size: int) -> None:
        # With the blocks and the length reserved, parallel writes need not extend the file one after the other.
        try:
            before = self._posix.fstat(descriptor).st_size
            if self._room is not None:
                if before > size and self._room.bound is not None and self._room.bound.active:
                    self._posix.ftruncate(descriptor, size)
                self._room.sharing.allocated(self._save, before)
                self._room.fit()
            try:
                self._posix.fallocate(descriptor, size)
            except OSError as error:
                if not self._freed(error):
                    raise
                self._posix.fallocate(descriptor, size)
            if self._room is not None:
                self._room.sharing.allocated(self._save, max(0, size - before))
        except OSError:
            # Only a hint: this system has no such call, or the guess was too high for the free space. The writes
            # themselves report a full disk, so give the space back before them.
            with suppress(OSError):
                self._posix.ftruncate(descriptor, before)

    def _freed(self, error: OSError) -> bool:
        """Whether the disk was full and has space now. Before a save fails, spare files and retired checkpoints are
        deleted, and the save waits for other running saves, whose commits may retire more."""
        room = self._room
        if error.errno not in FULL or room is None:
            return False
        return room.make() or room.sharing.outlast(self._save)

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`. Misaligned blocks are slower, not wrong."""
        view = data.cast("B")
        with writing(self._path):
            if self._recycled and offset == 0 and self._buffered is not None:
                # Prevents: a header (written last) over the file's old data after a power cut that kept the header and
                # lost the new data. (In a new file there would be zeros.)
                self._posix.fdatasync(self._buffered)
            while view:
                try:
                    done = self._write_some(offset, view)
                except OSError as error:
                    if not self._freed(error):
                        raise
                    continue
                offset, view = offset + done, view[done:]

    def _write_some(self, offset: int, view: memoryview) -> int:
        buffered, direct = self._buffered, self._direct
        if buffered is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self._path)
        if direct is not None:
            try:
                return write_some(self._posix, direct, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: not aligned as this device requires
                    raise
        return write_some(self._posix, buffered, view, offset)

    def seal(self, size: int) -> None:
        """See `SegmentSink.seal`."""
        if self._buffered is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self._path)
        with writing(self._path):
            try:
                written = self._posix.fstat(self._buffered)
                self._finish_contents(self._buffered, size)
            finally:
                # Close after a failure, too: success of a second fsync would prove nothing, so it is never repeated.
                self._close()
            with self._folders.opened(self._folder) as folder:
                self._check_name(folder, written)
                # Prevents: a committed segment without a name.
                self._folders.sync(folder, self._folder)
        self._settled = True

    def _finish_contents(self, descriptor: int, size: int) -> None:
        # Cuts off the reserved space and the last block's padding: safetensors refuses trailing bytes.
        self._posix.ftruncate(descriptor, size)
        # Prevents: a committed segment that loses its blocks, block map or length in a power cut. O_DIRECT alone
        # flushes neither the disk's cache nor the file's metadata.
        self._posix.fdatasync(descriptor)

    def _check_name(self, folder: int, written: os.stat_result) -> None:
        """Check that the name still refers to this file: its folder may have been moved away meanwhile."""
        found = self._posix.stat(self._name, folder, follow=False)
        if (found.st_dev, found.st_ino) != (written.st_dev, written.st_ino):
            raise StorageError(errno.ESTALE, "the segment was replaced while it was written", self._path)

    def abort(self) -> None:
        """See `SegmentSink.abort`."""
        if self._settled:
            return
        self._settled = True
        with suppress(OSError):
            self._close()
        with suppress(OSError, CkptError), self._folders.opened(self._folder) as folder:
            self._posix.unlink(self._name, folder)  # if this fails, no record names the file: gc removes it

    def _close(self) -> None:
        if self._recycled and self._buffered is not None:
            # Prevents: a lock that survives in a child forked meanwhile (a loader's worker) and blocks readers.
            with suppress(OSError):
                self._posix.flock(self._buffered, fcntl.LOCK_UN)
        descriptors, self._buffered, self._direct = (self._direct, self._buffered), None, None
        for descriptor in descriptors:
            if descriptor is not None:
                self._posix.close(descriptor)


class FileSource(SegmentSource):
    """A file of the store. Raises `KeyNotFoundError`, `ForeignObjectError`, `StorageError`.

    Args:
        folders: the store's folders.
        key: path of the file from their root.
        posix: the system calls.
        direct: whether to try O_DIRECT.
        hold: keep writers from overwriting the file while it is open or mapped. A file that is already being
            overwritten, because nobody needs its old contents, then counts as absent.
    """

    def __init__(self, folders: Folders, key: str, posix: Posix, *, direct: bool = True, hold: bool = False) -> None:
        self._folders = folders
        self._folder, _, self._name = key.rpartition("/")
        self._path = f"{folders.root}/{key}"
        self._posix = posix
        self._opening = threading.Lock()
        self._direct: int | None = None
        self._try_direct = direct
        with reading(self._path), folders.opened(self._folder) as folder:
            opened, self._status = self._open(folder, hold)
        self._buffered: int | None = opened
        self.size = self._status.st_size

    def _open(self, folder: int, hold: bool) -> tuple[int, os.stat_result]:
        try:
            opened, status = open_file(self._posix, self._name, folder, self._path)
            try:
                self.held = hold and self._lock(opened)
            except BaseException:
                self._posix.close(opened)
                raise
        except BlockingIOError as error:  # a lease, or a lock
            raise KeyNotFoundError(f"{self._path} was deleted; another segment takes its place") from error
        return opened, status

    def _lock(self, descriptor: int) -> bool:
        """Take a lock that lasts as long as the descriptor and its mappings; False if there are no locks."""
        try:
            self._posix.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        return True

    def read_into(self, offset: int, out: memoryview) -> None:
        """See `SegmentSource.read_into`.

        Fastest from a cold disk with at least 1 MiB, and `offset` and the address of `out` equal modulo `BLOCK`. Then
        the aligned middle is read past the page cache, unless the cache holds it.
        """
        view = out.cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise CorruptSegmentError(
                f"{self._path} ends at byte {self.size}; bytes {offset} to {offset + len(view)} were asked for"
            )
        if self._buffered is None:
            raise StorageError(errno.EBADF, "the segment is closed", self._path)
        head = -offset % BLOCK
        body = (len(view) - head) // BLOCK * BLOCK
        with reading(self._path):
            done = 0
            if body >= DIRECT_MINIMUM and (address_of(view) + head) % BLOCK == 0:
                descriptor = self._past_the_cache(offset + head, view[head : head + body])
                if descriptor is not None:
                    self._fill(self._buffered, offset, view[:head])
                    done = head + self._fill(descriptor, offset + head, view[head : head + body], direct=True)
            self._fill(self._buffered, offset + done, view[done:])

    def _past_the_cache(self, offset: int, middle: memoryview) -> int | None:
        """The O_DIRECT descriptor; None if there is none or if the page cache holds the end of `middle`.

        A copy from the page cache is three times as fast as the disk, so check the cache first. One block is enough:
        the last one, because the kernel's read-ahead for the bytes before `middle` may have cached the first.
        """
        with self._opening:
            if self._try_direct:
                self._try_direct = False
                self._direct = self._open_direct()
        if self._direct is None or self._buffered is None:
            return None
        try:
            last = len(middle) - BLOCK
            cached = self._posix.preadv_cached(self._buffered, middle[last:], offset + last)
        except OSError:
            cached = 0  # not cached, or the system cannot say; the read itself will report an I/O error
        return None if cached == BLOCK else self._direct

    def _open_direct(self) -> int | None:
        try:
            with self._folders.opened(self._folder) as folder:
                descriptor = open_direct(self._posix, self._name, os.O_RDONLY | os.O_NONBLOCK, folder)
            if descriptor is None:
                return None
            status = self._posix.fstat(descriptor)
            if (status.st_dev, status.st_ino) == (self._status.st_dev, self._status.st_ino):
                return descriptor
            self._posix.close(descriptor)  # another file has this name now
        except (OSError, CkptError):
            pass
        return None

    def _fill(self, descriptor: int, offset: int, out: memoryview, *, direct: bool = False) -> int:
        """Read until `out` is full; with `direct`, until the rest is not aligned. Returns the number of bytes read."""
        done = 0
        while done < len(out):
            try:
                count = self._posix.preadv(descriptor, out[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    break
                raise
            if count == 0 and not direct:
                raise CorruptSegmentError(f"{self._path} ends at byte {offset + done}, although it had {self.size}")
            done += count
            if direct and (count == 0 or count % BLOCK):
                break
        return done

    def map(self) -> memoryview | None:
        """See `SegmentSource.map`."""
        if self._buffered is None:
            raise StorageError(errno.EBADF, "the segment is closed", self._path)
        if not self.size:
            return memoryview(bytearray())
        if not self.held:
            copy = memoryview(mmap.mmap(-1, self.size))
            self.read_into(0, copy)
            return copy
        with reading(self._path):
            return self._posix.map(self._buffered, self.size)

    def close(self) -> None:
        """See `SegmentSource.close`; a second time is harmless."""
        descriptors, self._buffered, self._direct = (self._buffered, self._direct), None, None
        self._try_direct = False
        with reading(self._path):
            for descriptor in descriptors:
                if descriptor is not None:
                    self._posix.close(descriptor)
