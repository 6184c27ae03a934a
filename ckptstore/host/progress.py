"""Progress reports of long calls: one protocol for all public functions, one counter shared by their threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Advance", "Progress", "Tally", "as_progress", "phase"]

Advance = Callable[[int], None]
"""Internal callback: takes the number of bytes just done, from any thread. `Tally.advance` is one."""


class Progress(Protocol):
    """The type of ``progress`` in `Store.load`, `Writer.save`, `Store.verify` and every other long call."""

    def __call__(self, done: int, total: int, /) -> None:
        """Report that `done` of `total` bytes are done.

        Called from any thread, one call at a time. `total` may still grow.
        """


def phase(progress: Progress | None, name: str, done: int, total: int, unit: str = "checkpoints") -> None:
    """Report work that is not measured in bytes, such as ``planning``: 120 of 284 ``checkpoints``.

    Only a `progress` that has a method ``phase(name, done, total, unit)`` receives it.
    """
    tell = getattr(progress, "phase", None)
    if tell is not None:
        tell(name, done, total, unit)


class Tally:
    """Adds up the bytes that threads have done, and reports the sum.

    Attributes:
        done: bytes so far.
        total: bytes in all. May be raised during the work.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.done = 0
        self.total = total
        self._progress = progress
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` and report. Raises what `progress` raises."""
        if self._progress is None:
            return
        with self._lock:
            self.done += nbytes
            self._progress(self.done, max(self.total, self.done))


def as_progress(progress: Progress | bool | None) -> Progress | None:
    """Convert a public ``progress=`` argument.

    A function is returned as it is. True: a progress line on stderr. False and None: no reports.
    """
    if progress is True:
        return _Line()
    return progress or None


class _Line:
    """A progress line on stderr, rewritten at most ten times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, /) -> None:
        now, complete = time.monotonic(), done >= total
        if not complete and now < self._next:
            return
        self._next = now + 0.1
        text = f"\r{done / (1 << 20):,.1f} of {total / (1 << 20):,.1f} MiB ({done / max(total, 1):.0%})"
        print(text, end="\n" if complete else "", file=sys.stderr, flush=True)
