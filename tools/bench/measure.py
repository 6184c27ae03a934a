"""Measuring one operation: seconds, CPU seconds, bytes to and from the disk, peak memory above the start."""

from __future__ import annotations

import gc
import mmap
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc/self")
_MADV_POPULATE_WRITE = 23


def _status_bytes(name: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def _disk_bytes() -> tuple[int, int]:
    """Bytes this process caused to be read from and written to storage so far."""
    counters = dict(line.split(": ") for line in (_PROC / "io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Ballast:
    """Memory that a driver keeps touched, and releases right before a worker measures.

    A virtual machine with free page reporting gives freed memory back to its host within seconds, and the next touch of
    such a page costs ten times a page fault (measured: 512 MiB in 1.4 s instead of 0.12 s; a buffered write of 96 MB in
    0.40 s instead of 0.07 s). The allocations of a measured operation, page cache included, must not depend on earlier
    users of the memory. Half of it are huge pages: freed small pages do not reliably join to huge ones. On a host that
    takes no memory back this changes nothing.

    Args:
        nbytes: how much, at most a third of the available memory.
    """

    def __init__(self, nbytes: int) -> None:
        available = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        self._half = min(nbytes, available // 3) // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory: list[mmap.mmap] = []

    def hold(self) -> None:
        """Take the memory and touch it."""
        if not self._memory and self._half:
            self._memory = [_touched(self._half, huge=True), _touched(self._half, huge=False)]

    def release(self) -> None:
        """Return the memory to the system."""
        while self._memory:
            self._memory.pop(0).close()


def _touched(nbytes: int, *, huge: bool) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        for start in range(0, nbytes, mmap.PAGESIZE):
            memory[start] = 1
    return memory


def _nothing() -> None:
    """The default action before a measurement: none."""


@dataclass(slots=True)
class Measurement:
    """Context manager around the measured operation; `mark` names moments inside it.

    Attributes:
        before: called right before the start.
        seconds: wall time of the block.
        cpu_seconds: user and system time of this process, its threads included (kernel writeback threads are not).
        peak_rss: bytes by which resident memory rose above the start at its highest, mapped file pages included.
        read_bytes, written_bytes: from and to storage; reads from the page cache do not count.
        marks: name -> seconds since the start.
    """

    before: Callable[[], None] = _nothing
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    _started: float = 0.0
    _cpu: float = 0.0
    _rss: int = 0
    _disk: tuple[int, int] = (0, 0)

    def __enter__(self) -> Self:
        gc.collect()
        self.before()
        (_PROC / "clear_refs").write_text("5")  # resets the high-water mark of resident memory
        self._rss = _status_bytes("VmRSS")
        self._disk = _disk_bytes()
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()
        return self

    def mark(self, name: str) -> None:
        """Remember the seconds since the start under `name`."""
        self.marks[name] = time.perf_counter() - self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = _cpu_seconds() - self._cpu
        self.peak_rss = max(0, _status_bytes("VmHWM") - self._rss)
        read, written = _disk_bytes()
        self.read_bytes, self.written_bytes = read - self._disk[0], written - self._disk[1]

    def as_dict(self) -> dict[str, float]:
        """The reading as flat numbers; a mark appears as ``<name>_s``."""
        return {
            "seconds": self.seconds,
            "cpu_s": self.cpu_seconds,
            "peak_rss": self.peak_rss,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            **{f"{name}_s": seconds for name, seconds in self.marks.items()},
        }
