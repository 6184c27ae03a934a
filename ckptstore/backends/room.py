"""Space on a medium that is full: what gives way before a save fails, and a reserve for those who make space.

Retiring and collecting free space, but each needs a record in the log first, for which a full medium has none. So a
store keeps a small file, `RESERVE`, whose blocks are allocated. It is deleted when a record of upkeep does not fit
(`Room.upkeep`), never for a save, and made again when there is space.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ckptstore.backends.folders import Folders
from ckptstore.backends.overwriting import LOCAL
from ckptstore.backends.posix import Posix
from ckptstore.backends.sharing import Sharing
from ckptstore.backends.spare_files import FULL, SpareFiles
from ckptstore.errors import CkptError
from ckptstore.host.pages import BLOCK

__all__ = ["LEAST_RESERVE", "RESERVE", "RESERVE_BYTES", "Room"]

RESERVE: Final = ".reserve"
"""In the store's folder. `LocalBackend.list` passes over names that begin with a dot."""
RESERVE_BYTES: Final = 256 << 10
"""For a few records of 256 retirements each, their names, and a new term."""
LEAST_RESERVE: Final = 32 << 10
"""For a new term, a pin, and one such record: eight blocks."""
_ENOUGH: Final = 16
"""The reserve takes no more than this part of what is free: a medium of next to nothing shall not lose that."""
_NO_RESERVE: Final = (
    f". Records that free space need a few KiB, and this store has no reserve left ({RESERVE}: made by a writer or gc "
    f"where {_ENOUGH * LEAST_RESERVE >> 10} KiB are free): delete something else on this file system first"
)


class Room:
    """What makes space in one store. Thread-safe.

    Attributes:
        reclaim: deletes what nothing needs any more -> the bytes of it; None: nobody said how.
        sharing: the saves that are under way.
    """

    def __init__(self, folders: Folders, posix: Posix, spare: SpareFiles) -> None:
        """
        Args:
            folders: the store's.
            posix: the system calls.
            spare: files that go first.
        """
        self.reclaim: Callable[[], int] | None = None
        self.sharing = Sharing()
        self._folders = folders
        self._posix = posix
        self._spare = spare
        self._lock = threading.Lock()
        self._freed = 0  # how often something was
        self._here = threading.local()

    def make(self) -> bool:
        """The medium is full: delete spare files, or else what nothing needs -> whether it is worth another try."""
        return self._spare.shrink(0) > 0 or self.collect()

    def collect(self) -> bool:
        """Delete what nothing needs -> whether it is worth another try."""
        if self.reclaim is None or getattr(self._here, "reclaiming", False):
            return False
        before = self._freed
        with self._lock:
            if self._freed != before:  # another thread has done so, while this one waited for it
                return True
            self._here.reclaiming = True
            try:
                freed = self.reclaim()
            except CkptError:  # the save that found no space says that
                return False
            finally:
                self._here.reclaiming = False
            self._spare.shrink(0)  # what was deleted may have been kept as a spare file
            self._freed += freed > 0
        return freed > 0

    # -- the reserve

    @contextmanager
    def upkeep(self) -> Iterator[None]:
        """What this thread creates within may take the reserve: it leads to more space."""
        depth = getattr(self._here, "upkeep", 0)
        self._here.upkeep = depth + 1
        try:
            yield
        finally:
            self._here.upkeep = depth

    def give_up_reserve(self, error: OSError) -> bool:
        """Whether what failed is worth another try, because it was upkeep, and the reserve is given up for it.

        Raises `OSError`, in place of `error`: it was upkeep, and there is no reserve.
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
        """Make the reserve, if there is none and space enough. Raises nothing: without it the store works as well.

        On a small medium it is smaller than `RESERVE_BYTES`; below `LEAST_RESERVE` there is none.
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
        except OSError:  # no such call here, and an empty file is no reserve
            self._posix.unlink(RESERVE, root)
        finally:
            self._posix.close(descriptor)
