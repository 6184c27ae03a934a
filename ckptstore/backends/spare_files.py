"""Spare files: segments that gc released, kept so that new segments overwrite their blocks.

On some disks (thin-provisioned ones, whose blocks are made when they are first touched) overwriting allocated blocks is
several times as fast as writing new ones; `overwriting` finds out. There a released segment goes to ``.spare/<name>``
in the store's folder instead of being unlinked, and `SpareFiles.take` makes a new segment of it. Nothing depends on
what is in that folder: it may be deleted at any time, and no reader looks there.

**Nobody's bytes change under him.** A released segment may still be open: by a reader whose pin was taken for dead, by
somebody's safetensors, or mapped by a program that has long closed the file. So who takes a file

1. renames it to the new segment's name. Of several writers one succeeds, and no path leads to the old segment;
2. holds ``flock(LOCK_EX)`` until the new segment is whole. Readers of the store hold ``LOCK_SH`` for as long as they
   have the file open or mapped, and who comes by the old path at the last moment is turned away;
3. asks for a write lease, which the system gives to nobody while anybody else has the file open or mapped;
4. refuses it if it has any other name by now: a backup made of hard links, or what a power cut left of a rename;
5. overwrites the old header and syncs that before it gives the lease back and writes any other byte, and syncs the data
   before the new header goes out: neither a power cut nor anybody's open shows a header over data that is not its own.

``tools/protocol/recycle_model.py`` explores this, and what goes wrong without each of it. What is refused is unlinked,
which takes nothing from who reads it. On file systems whose locks say nothing about other machines nothing is kept
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

from ckptstore.backends.folders import Folders
from ckptstore.backends.overwriting import Recycling
from ckptstore.backends.posix import Posix, write_some
from ckptstore.errors import CkptError, ForeignObjectError
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK

__all__ = ["FULL", "SPARE_FOLDER", "SpareFiles"]

SPARE_FOLDER: Final = ".spare"
"""Below the store's folder. `LocalBackend.list` passes over names that begin with a dot."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""How the system says that nothing more fits."""
_ALIKE: Final = 4
"""A file this many times as large, or as small, as the new segment is left for another."""


class _InUseError(Exception):
    """Somebody may read the file: it must not be overwritten."""


class SpareFiles:
    """The spare files of one store. Thread-safe, and any number of processes may share them.

    Args:
        folders: the store's.
        posix: the system calls.
        recycling: whether to keep any.
    """

    def __init__(self, folders: Folders, posix: Posix, recycling: Recycling) -> None:
        self._folders = folders
        self._posix = posix
        self.recycling = recycling

    def keep(self, folder: str, name: str) -> bool:
        """Take in a segment that nothing needs -> False if it has to be deleted instead.

        Args:
            folder: the segment's, from the store's root.
            name: of its file, unique in the store.

        Raises:
            whatever keeps the segment's folder from being opened.
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
            except (OSError, CkptError):  # there is one of this name, no such call, a link for a folder: it is deleted
                return False
        crash_point("recycle.kept")
        return True

    def take(self, folder: int, name: str, size: int) -> int | None:
        """Make a spare file the new segment `name` -> its descriptor; None: there is none that fits.

        It is as long as it was, holds ``LOCK_EX``, and begins with a page of zeros.

        Args:
            folder: handle of the new segment's folder.
            size: bytes that the segment will have, about.

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
                self._posix.unlink(name, folder)  # whoever has it open keeps it
        return None

    def _fitting(self, spare: int, size: int) -> list[tuple[str, int]]:
        """Spare files in the order to try them: the shortest that is long enough, then the longest of the others."""
        files = [
            (name, length)
            for name, length in self._files(spare)
            if not self.recycling.picky or size <= length * _ALIKE <= size * _ALIKE**2
        ]
        return sorted(files, key=lambda file: (file[1] < size, file[1] if file[1] >= size else -file[1]))

    def _claimed(self, folder: int, name: str) -> int | None:
        """The descriptor of a file that is ours alone, its header cleared; None: it is not."""
        try:
            descriptor = self._posix.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW, folder)
        except OSError:
            return None
        try:
            self._require_lock(descriptor)
            self._require_alone(descriptor)
            self._require_own_name(descriptor, folder, name)
            self._clear_header(descriptor)
            self._posix.set_lease(descriptor, fcntl.F_UNLCK)  # it is to be opened once more, for O_DIRECT
        except (_InUseError, OSError):
            self._posix.close(descriptor)
            return None
        except BaseException:
            self._posix.close(descriptor)
            raise
        return descriptor

    def _require_lock(self, descriptor: int) -> None:
        # Prevents: a reader that comes by the old path after the lease was given back. It finds the file locked now,
        # and another header once it is not.
        self._posix.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _require_alone(self, descriptor: int) -> None:
        # Prevents: overwriting what anybody has open or mapped, who knows nothing of our locks. Who opens it now waits
        # until the lease is given back, and then finds no header.
        self._posix.set_lease(descriptor, fcntl.F_WRLCK)

    def _require_own_name(self, descriptor: int, folder: int, name: str) -> None:
        # Prevents: overwriting a live segment under a second name, which a power cut or a backup of hard links gave it;
        # and one that another writer made of this file, after gc took it from this one, whose term is over.
        mine, found = self._posix.fstat(descriptor), self._posix.stat(name, folder, follow=False)
        if not self._reusable(mine) or (mine.st_dev, mine.st_ino) != (found.st_dev, found.st_ino):
            raise _InUseError

    def _clear_header(self, descriptor: int) -> None:
        """Prevents: the old header over new data, which any safetensors would read without a word."""
        page, done = memoryview(bytes(BLOCK)), 0
        while done < BLOCK:
            done += write_some(self._posix, descriptor, page[done:], done)
        # Prevents: a power cut that keeps data which was written later, and loses this.
        self._posix.fdatasync(descriptor)
        crash_point("recycle.cleared")

    @staticmethod
    def _reusable(status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def nbytes(self) -> int:
        """Bytes that the spare files hold, and that new segments may have. Raises nothing."""
        with suppress(OSError, CkptError), self._opened() as spare:
            return sum(size for _, size in self._files(spare))
        return 0

    def shrink(self, limit: int) -> int:
        """Delete spare files, the shortest first, until they hold `limit` bytes at most -> bytes deleted.

        Raises nothing: they are in nobody's way, and what stays goes another time.
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
        """Name and length of each. What is no file was put there by somebody, and stays."""
        for name, is_folder in self._posix.scandir(spare):
            if is_folder:
                continue
            with suppress(FileNotFoundError):
                status = self._posix.stat(name, spare, follow=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status.st_size

    @contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """A handle of the folder. It is not synced: that a power cut takes it, or a name in it, harms nobody."""
        if make:
            with self._folders.opened("") as root, suppress(FileExistsError):
                self._posix.mkdir(SPARE_FOLDER, root)
        with self._folders.opened(SPARE_FOLDER) as handle:
            own = self._posix.open(".", os.O_RDONLY | os.O_DIRECTORY, handle)  # its place in a listing is its own
            try:
                yield own
            finally:
                self._posix.close(own)
