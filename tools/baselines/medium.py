"""A slower disk, for every way to save alike: ``CKPTSTORE_BENCH_DISK=RATE,STREAM,LINK`` in a worker's environment.

What is written takes its turn on one channel of RATE bytes a second, and in addition its own time at STREAM bytes a
second, which other streams overlap: one stream alone gets ``1 / (1 / RATE + 1 / STREAM)``, many together get RATE. So
does a network-attached disk, of which one stream gets only a part. Data still goes to the real disk: the rate is an
upper limit. What goes to a peer's memory takes its time at LINK bytes a second.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from ckptstore.backends.local_disk.posix import Posix

__all__ = ["DISK", "Disk", "limit", "sent", "taken", "written"]

DISK: Final = "CKPTSTORE_BENCH_DISK"


class Disk:
    """A channel that all streams share, and the time that each stream takes by itself."""

    def __init__(self, rate: float, stream: float, link: float = float("inf")) -> None:
        self._rate, self._stream, self.link = rate, stream, link
        self._lock = threading.Lock()
        self._free = 0.0

    def take(self, nbytes: int) -> None:
        """Return when so many bytes of a stream are written."""
        with self._lock:
            self._free = end = max(self._free, time.monotonic()) + nbytes / self._rate
        time.sleep(max(0.0, end - time.monotonic()) + nbytes / self._stream)


_disk: Disk | None = None


def limit() -> None:
    """Use the disk of the environment from now on, also for what ckptstore writes in this process."""
    global _disk
    if _disk is not None or not (said := os.environ.get(DISK)):
        return
    disk = _disk = Disk(*map(float, said.split(",")))
    pwrite = Posix.pwrite

    def paced(posix: Posix, fd: int, data: memoryview, offset: int) -> int:
        count = pwrite(posix, fd, data, offset)
        disk.take(count)
        return count

    Posix.pwrite = paced  # type: ignore[method-assign]


def written(path: Path) -> None:
    """Return when the disk has taken a file, or all files of a folder, in one stream."""
    if _disk is not None:
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        _disk.take(sum(one.stat().st_size for one in files))


def sent(nbytes: int, began: float) -> None:
    """Return when the link has taken so many bytes. `began`: on the monotonic clock."""
    if _disk is not None:
        time.sleep(max(0.0, began + nbytes / _disk.link - time.monotonic()))


def taken(nbytes: int) -> None:
    """Return when the disk has taken so many bytes of one stream."""
    if _disk is not None:
        _disk.take(nbytes)
