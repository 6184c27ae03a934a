"""Spare files: segments that gc released, kept so that new segments overwrite their blocks.

On some disks (thin-provisioned ones, which allocate blocks on first touch) overwriting allocated blocks is several
times as fast as writing new ones; `overwriting` measures it. On such disks a released segment is moved to
``.spare/<name>`` in the store's folder instead of being unlinked, and `SpareFiles.take` makes a new segment of it.
Nothing depends on the contents of that folder: it may be deleted at any time, and no reader looks there.

**No reader's bytes change.** A released segment may still be open: in a reader whose pin was presumed dead, in a
safetensors library, or mapped by a program that has closed the file. So a writer that takes a file

1. renames it to the new segment's name. Only one of several writers succeeds, and no path leads to the old segment;
2. holds ``flock(LOCK_EX)`` until the new segment is complete. Readers of the store hold ``LOCK_SH`` while they have the
   file open or mapped, and a reader that opens the old path at the last moment is refused;
3. requests a write lease, which the system refuses while anybody else has the file open or mapped;
4. refuses the file if it now has any other name: a backup made of hard links, or a rename that a power cut interrupted;
5. overwrites the old header and syncs that before it returns the lease and writes any other byte, and syncs the data
   before it writes the new header. So neither a power cut nor a concurrent open shows a header over foreign data.

``tools/protocol/recycle_model.py`` explores this protocol, and what fails without each step. A refused file is
unlinked, which does not affect its readers. On file systems whose locks do not cover other machines nothing is kept
(`overwriting.LOCAL`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ckptstore.backends.local_disk.folders import Folders
from ckptstore.backends.local_disk.overwriting import Recycling
from ckptstore.backends.local_disk.posix import Posix, write_some
from ckptstore.errors import CkptError, ForeignObjectError
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK

__all__ = ["FULL", "SPARE_FOLDER", "SpareFiles"]

SPARE_FOLDER: Final = ".spare"
"""Below the store's folder. `LocalBackend.list` omits names that begin with a dot."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of the system when the medium or a quota is full."""
_ALIKE: Final = 4
"""Files that are this many times as large or as small as the new segment are left for others."""


class _InUseError(Exception):
    """Someone may read the file: it must not be overwritten."""


class SpareFiles:
    """The spare files of one store. Thread-safe, and any number of processes may share them.

    Args:
        folders: the store's folders.
        posix: the system calls.
        recycling: decides whether to keep files.
    """

    def __init__(self, folders: Folders, posix: Posix, recycling: Recycling) -> None:
        self._folders = folders
        self._posix = posix
        self.recycling = recycling

    def keep(self, folder: str, name: str) -> bool:
        """Keep a segment that nothing needs -> False if the caller must delete it instead.

        Args:
            folder: the segment's folder, from the store's root.
            name: name of its file, unique in the store.

        Raises:
            OSError, CkptError: the segment's folder cannot be opened.
        """
        with self._folders.opened(folder) as source:
            try:
                status = self._posix.stat(name, source, follow=False)
                if not (self._reusable(status) and self.recycling.enters(status.st_size)):
                    return False
                with self._opened(make=True) as spare:
                    if not self.recycling.pays(status.st_size, spare):
                        return False
                    self._posix.rename_between(name, source, name, spare)
            except (OSError, CkptError):  # the name exists, no such system call, or a link in place of the folder
                return False
        crash_point("recycle.kept")
        return True

    def take(self, folder: int, name: str, size: int) -> int | None:
        """Turn a spare file into the new segment `name` -> its descriptor; None if none fits.

        The file keeps its length, is locked with ``LOCK_EX``, and begins with a page of zeros.

        Args:
            folder: handle of the new segment's folder.
            size: approximate bytes of the segment.

        Raises:
            FileExistsError: there is a file of this name.
        """
        if not self.recycling.enters(size):
            return None
        with suppress(FileNotFoundError, NotADirectoryError, ForeignObjectError), self._opened() as spare:
            for found, _ in self._fitting(spare, size):
                try:
                    self._posix.rename_between(found, spare, name, folder)
                except FileNotFoundError:
                    continue  # another writer took it
                except FileExistsError:
                    raise
                except OSError:
                    return None
                crash_point("recycle.taken")
                if (descriptor := self._claimed(folder, name)) is not None:
                    return descriptor
                self._posix.unlink(name, folder)  # processes that have it open can still read it
        return None

    def _fitting(self, spare: int, size: int) -> list[tuple[str, int]]:
        """Spare files in the order to try: the shortest that is long enough, then the longest of the others."""
        files = [
            (name, length)
            for name, length in self._files(spare)
            if not self.recycling.picky or size <= length * _ALIKE <= size * _ALIKE**2
        ]
        return sorted(files, key=lambda file: (file[1] < size, file[1] if file[1] >= size else -file[1]))

    def _claimed(self, folder: int, name: str) -> int | None:
        """The descriptor of a file that only this writer uses, with its header cleared; None if others use it."""
        try:
            descriptor = self._posix.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW, folder)
        except OSError:
            return None
        try:
            self._require_lock(descriptor)
            self._require_alone(descriptor)
            self._require_own_name(descriptor, folder, name)
            self._clear_header(descriptor)
            self._posix.set_lease(descriptor, fcntl.F_UNLCK)  # it must be opened once more, for O_DIRECT
        except (_InUseError, OSError):
            self._posix.close(descriptor)
            return None
        except BaseException:
            self._posix.close(descriptor)
            raise
        return descriptor

    def _require_lock(self, descriptor: int) -> None:
        # Prevents: a reader that opens the old path after the lease was returned. Now it finds the file locked, and
        # later another header.
        self._posix.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _require_alone(self, descriptor: int) -> None:
        # Prevents: overwriting a file that a program without our locks has open or mapped. A later open waits until the
        # lease is returned, and then finds no header.
        self._posix.set_lease(descriptor, fcntl.F_WRLCK)

    def _require_own_name(self, descriptor: int, folder: int, name: str) -> None:
        # Prevents: overwriting a live segment through a second name, which a power cut or a backup of hard links left.
        # Also prevents: after this writer's term has ended, overwriting a segment that another writer made of this
        # file, which gc had taken back.
        mine, found = self._posix.fstat(descriptor), self._posix.stat(name, folder, follow=False)
        if not self._reusable(mine) or (mine.st_dev, mine.st_ino) != (found.st_dev, found.st_ino):
            raise _InUseError

    def _clear_header(self, descriptor: int) -> None:
        """Prevents: the old header over new data, which any safetensors reader would accept silently."""
        page, done = memoryview(bytes(BLOCK)), 0
        while done < BLOCK:
            done += write_some(self._posix, descriptor, page[done:], done)
        # Prevents: a power cut that keeps data written later and loses the cleared header.
        self._posix.fdatasync(descriptor)
        crash_point("recycle.cleared")

    @staticmethod
    def _reusable(status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def nbytes(self) -> int:
        """Bytes in spare files, which new segments may use. Never raises."""
        with suppress(OSError, CkptError), self._opened() as spare:
            return sum(size for _, size in self._files(spare))
        return 0

    def shrink(self, limit: int) -> int:
        """Delete spare files until they hold at most `limit` bytes, and keep the longest that fit -> bytes deleted.

        Never raises: spare files do no harm, and a later call deletes what is left.
        """
        freed = held = 0
        with suppress(OSError, CkptError), self._opened() as spare:
            for name, size in sorted(self._files(spare), key=lambda file: -file[1]):
                if held + size <= limit:
                    held += size
                    continue
                with suppress(FileNotFoundError):
                    self._posix.unlink(name, spare)
                    freed += size
        return freed

    def _files(self, spare: int) -> Iterator[tuple[str, int]]:
        """Name and length of each file. Anything else was put there by someone, and stays."""
        for name, is_folder in self._posix.scandir(spare):
            if is_folder:
                continue
            with suppress(FileNotFoundError):
                status = self._posix.stat(name, spare, follow=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status.st_size

    @contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """A handle of the folder of spare files.

        The folder is not synced: a power cut that loses it, or a name in it, does no harm.

        Args:
            make: create the folder if it is missing.
        """
        if make:
            with self._folders.opened("") as root, suppress(FileExistsError):
                self._posix.mkdir(SPARE_FOLDER, root)
        with self._folders.opened(SPARE_FOLDER) as handle:
            own = self._posix.open(".", os.O_RDONLY | os.O_DIRECTORY, handle)  # with its own read position
            try:
                yield own
            finally:
                self._posix.close(own)
