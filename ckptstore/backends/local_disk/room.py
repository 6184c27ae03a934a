"""Free space on a full medium before a save fails, and keep a reserve for operations that free space.

Retiring and collecting free space, but each first needs a record in the log, for which a full medium has no space. So a
store keeps a small file, `RESERVE`, with allocated blocks. It is deleted when a record of upkeep does not fit
(`Room.upkeep`), never for a save, and created again when there is space.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ckptstore.backends.local_disk.folders import Folders
from ckptstore.backends.local_disk.overwriting import LOCAL
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.backends.local_disk.spare_files import FULL, SpareFiles
from ckptstore.backends.sharing import Sharing
from ckptstore.backends.space_bound import Reclaiming, SpaceBound
from ckptstore.errors import CkptError
from ckptstore.host.pages import BLOCK

__all__ = ["LEAST_RESERVE", "RESERVE", "RESERVE_BYTES", "Room"]

RESERVE: Final = ".reserve"
"""In the store's folder. `LocalBackend.list` omits names that begin with a dot."""
RESERVE_BYTES: Final = 256 << 10
"""Enough for a few records of 256 retirements each, their names, and a new term."""
LEAST_RESERVE: Final = 32 << 10
"""Enough for a new term, a pin, and one such record: eight blocks."""
_ENOUGH: Final = 16
"""The reserve takes at most this fraction (1/16) of the free space, because a tiny medium needs the rest."""
_NO_RESERVE: Final = (
    f". Records that free space need a few KiB, and this store has no reserve left ({RESERVE}: made by a writer or gc "
    f"where {_ENOUGH * LEAST_RESERVE >> 10} KiB are free): delete something else on this file system first"
)


class Room:
    """Frees space in one store. Thread-safe.

    Attributes:
        reclaiming: deletes unneeded data.
        sharing: the saves that are running.
        bound: the store's own limit; None: it has none.
    """

    def __init__(self, folders: Folders, posix: Posix, spare: SpareFiles) -> None:
        """
        Args:
            folders: the store's folders.
            posix: the system calls.
            spare: spare files, which are deleted first.
        """
        self.reclaiming = Reclaiming()
        self.sharing = Sharing()
        self.bound: SpaceBound | None = None
        self._folders = folders
        self._posix = posix
        self._spare = spare
        self._here = threading.local()

    def make(self) -> bool:
        """On a full medium, delete spare files, or else unneeded data -> whether to try again."""
        return self._spare.shrink(0) > 0 or self.collect()

    def collect(self) -> bool:
        """Delete unneeded data -> whether to try again."""
        return self.reclaiming.collect(lambda: self._spare.shrink(0))  # deleted segments may be spare files now

    def fit(self) -> None:
        """Before new blocks are allocated, delete spare files for which the store's limit leaves no space."""
        if self.bound is not None and (left := self.bound.spare()) is not None:
            self._spare.shrink(left)

    # -- the reserve

    @contextmanager
    def upkeep(self) -> Iterator[None]:
        """Objects that this thread creates within may use the reserve, because they lead to more space."""
        depth = getattr(self._here, "upkeep", 0)
        self._here.upkeep = depth + 1
        try:
            yield
        finally:
            self._here.upkeep = depth

    def give_up_reserve(self, error: OSError) -> bool:
        """Delete the reserve for a failed operation of upkeep -> whether to try the operation again.

        Raises `OSError` in place of `error` if it was upkeep and there is no reserve.
        """
        if error.errno not in FULL or not getattr(self._here, "upkeep", 0):
            return False
        with suppress(OSError, CkptError), self._folders.opened("") as root:
            self._posix.unlink(RESERVE, root)
            return True
        told = OSError(error.errno, f"{error.strerror}{_NO_RESERVE}")
        told.unsent = getattr(error, "unsent", False)  # type: ignore[attr-defined]
        raise told from error

    def keep_reserve(self) -> None:
        """Create the reserve if it is missing and there is enough space. Never raises: the store works without it.

        On a small medium it is smaller than `RESERVE_BYTES`; below `LEAST_RESERVE` none is created.
        """
        with suppress(OSError, CkptError), self._folders.opened("") as root:
            with suppress(FileNotFoundError):
                self._posix.stat(RESERVE, root, follow=False)
                return
            status = self._posix.statvfs(root)
            if self._posix.file_system(root) not in LOCAL or not status.f_blocks:
                return
            fits = min(RESERVE_BYTES, status.f_bavail * status.f_frsize // _ENOUGH // BLOCK * BLOCK)
            # Prevents: a medium of a few MiB on which nothing can be retired once it is full.
            if fits >= LEAST_RESERVE:
                self._make_reserve(root, fits)

    def _make_reserve(self, root: int, nbytes: int) -> None:
        descriptor = self._posix.open(RESERVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, root)
        try:
            self._posix.fallocate(descriptor, nbytes)
        except OSError:  # no such call here, and an empty file reserves nothing
            self._posix.unlink(RESERVE, root)
        finally:
            self._posix.close(descriptor)
