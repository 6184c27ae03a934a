"""Decide whether to overwrite old files on a medium: as the user chose, or after one measurement.

On one machine overwriting allocated blocks was 4 to 5 times as fast as writing new files, on another it was no faster.
So the measurement writes where the segments will be, and in the same way: O_DIRECT, 16 MiB per write, blocks reserved
first. It writes 256 MiB, once per process and medium, and only when a segment is deleted whose space would be kept.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ckptstore.backends.local_disk.folders import Folders
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.errors import CkptError, UsageError

__all__ = ["LOCAL", "MODES", "PAYS", "WORTH", "Recycling", "chosen_mode", "measure"]

MODES: Final = ("auto", "always", "never")
PAYS: Final = 1.3
"""Minimum speed of overwriting, as a multiple of the speed of new files."""
WORTH: Final = 16 << 20
"""Minimum bytes of a file that is kept in the mode ``auto``."""
LOCAL: Final = frozenset({0xEF53, 0x58465342, 0x01021994})
"""ext2 to ext4, XFS, tmpfs. They overwrite in place, in the space that the file already has, and their locks and leases
cover everybody who has a file open. (Btrfs and ZFS never overwrite; with NFS and FUSE other machines may have a file
open.)"""

_BLOCK: Final = 16 << 20
_BLOCKS: Final = 4
_FILES: Final = 2
_VARIABLE: Final = "CKPTSTORE_RECYCLE"

_measured: weakref.WeakKeyDictionary[Posix, dict[int, float | None]] = weakref.WeakKeyDictionary()
_measuring: Final = threading.Lock()


def chosen_mode(mode: str | None) -> str:
    """One of `MODES`: `mode`, else the environment variable, else ``auto``. Raises `UsageError`."""
    chosen = mode or os.environ.get(_VARIABLE) or "auto"
    if chosen not in MODES:
        where = "recycle" if mode else _VARIABLE
        raise UsageError(f"{where}={chosen!r}: one of {', '.join(MODES)}")
    return chosen


class Recycling:
    """The decision for one store's medium. Thread-safe.

    Args:
        folders: the store's folders.
        posix: the system calls.
        mode: one of `MODES`. ``always`` skips the measurement and accepts files of any size; it skips no lock.
    """

    def __init__(self, folders: Folders, posix: Posix, mode: str) -> None:
        self._folders = folders
        self._posix = posix
        self.mode = mode
        self._kind: int | None = None
        self._ratio: float | None = None
        self._asked = False

    def possible(self) -> bool:
        """Whether files may be kept at all: the mode allows it, and the file system's locks are reliable."""
        return self.mode != "never" and self._file_system() in LOCAL

    def enters(self, size: int) -> bool:
        """Whether a new segment of `size` bytes should reuse the blocks of an old one if there is one."""
        return size > 0 and (self.mode == "always" or size >= WORTH) and self.possible()

    def pays(self, size: int, folder: int) -> bool:
        """Whether to keep a released segment of `size` bytes. May measure, which takes a fraction of a second.

        Args:
            folder: handle of a folder on the medium, for the files of the measurement.
        """
        if not self.enters(size):
            return False
        return self.mode == "always" or ((ratio := self._measure(folder)) is not None and ratio >= PAYS)

    @property
    def picky(self) -> bool:
        """Whether a new segment takes only files of a similar size."""
        return self.mode == "auto"

    def _file_system(self) -> int | None:
        if self._kind is None:
            with suppress(OSError, CkptError), self._folders.opened("") as root:
                self._kind = self._posix.file_system(root)
        return self._kind

    def local(self, root: int) -> bool:
        """Whether the store is on a file system of `LOCAL`.

        Args:
            root: handle of the store's folder. It is asked once: a folder that is open stays on its file system.

        Raises:
            OSError: the system does not say.
        """
        if self._kind is None:
            self._kind = self._posix.file_system(root)
        return self._kind in LOCAL

    def _measure(self, folder: int) -> float | None:
        with _measuring:
            known = _measured.setdefault(self._posix, {})
            device = self._posix.fstat(folder).st_dev
            if device not in known:
                known[device] = measure(self._posix, folder)
            self._ratio, self._asked = known[device], True
            return self._ratio

    def __str__(self) -> str:
        """For people: whether files are recycled, and why."""
        if self.mode == "never":
            return "off: recycling is disabled (never)"
        if not self.possible():
            return "off: not on this file system"
        if self.mode == "always":
            return "on: recycling is forced (always)"
        if not self._asked:
            return f"undecided: to be measured when a segment of {WORTH >> 20} MiB or more is deleted"
        if self._ratio is None:
            return "off: the speed could not be measured here"
        verdict = "on" if self._ratio >= PAYS else "off"
        return f"{verdict}: overwriting is {self._ratio:.2f} times as fast as new files ({PAYS} pays)"


def measure(posix: Posix, folder: int, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """How many times as fast overwriting is as writing new files; None if it cannot be measured.

    The best of two runs each, alternating. Removes its files before it returns; after a SIGKILL they remain as spare
    files.

    Args:
        folder: handle of the folder to write in.
    """
    status = posix.statvfs(folder)
    if status.f_blocks and status.f_bavail * status.f_frsize < 4 * _FILES * _BLOCKS * _BLOCK:
        return None  # nearly full: a measurement would say little, and the space is needed
    block = memoryview(mmap.mmap(-1, _BLOCK))
    block[:] = secrets.token_bytes(1 << 20) * (_BLOCK >> 20)  # touched, and not zeros, which could become a hole
    names = [f"measure-{os.getpid()}-{secrets.token_hex(8)}" for _ in range(_FILES)]
    fresh, over = [], []
    try:
        for name in names:  # keep all files until the end, so that none gets the blocks of another
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
            descriptor = posix.open(name, flags, folder)
            try:
                fresh.append(_timed(posix, descriptor, block, clock, reserve=True))
                over.append(_timed(posix, descriptor, block, clock, reserve=False))
            finally:
                posix.close(descriptor)
    except OSError:
        return None
    finally:
        for name in names:
            with suppress(OSError):
                posix.unlink(name, folder)
    return min(fresh) / max(min(over), 1e-9)


def _timed(posix: Posix, descriptor: int, block: memoryview, clock: Callable[[], float], *, reserve: bool) -> float:
    """Write and sync the file of a measurement -> the seconds that this took.

    Args:
        reserve: reserve the blocks first, as for a new file.
    """
    begin = clock()
    if reserve:
        posix.fallocate(descriptor, _BLOCKS * _BLOCK)
    for number in range(_BLOCKS):
        done = 0
        while done < _BLOCK:
            if not (count := posix.pwrite(descriptor, block[done:], number * _BLOCK + done)):
                raise OSError("the system wrote nothing")
            done += count
    posix.fdatasync(descriptor)
    return clock() - begin
