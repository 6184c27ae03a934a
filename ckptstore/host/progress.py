"""How long-running work says how far it is: one protocol for every public function, one counter for its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Advance", "Progress", "Tally", "phase"]

Advance = Callable[[int], None]
"""Within the engine: told how many bytes were just done, from any thread. `Tally.advance` is one."""


class Progress(Protocol):
    """What `Store.load`, `Writer.save`, `Store.verify` and every other long call take as ``progress``."""

    def __call__(self, done: int, total: int, /) -> None:
        """`done` of `total` bytes are done. Called from any thread, one call at a time; `total` may still grow."""


def phase(progress: Progress | None, name: str, done: int, total: int, unit: str = "checkpoints") -> None:
    """Tell of work that is not measured in bytes: ``planning``, 120 of 284 ``checkpoints``.

    Only a `progress` that has a method ``phase(name, done, total, unit)`` hears of it.
    """
    tell = getattr(progress, "phase", None)
    if tell is not None:
        tell(name, done, total, unit)


class Tally:
    """Adds up what threads have done, and tells it.

    Attributes:
        done: bytes so far.
        total: bytes in all; may be raised while work goes on.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.done = 0
        self.total = total
        self._progress = progress
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done. Raises what `progress` raises."""
        if self._progress is None:
            return
        with self._lock:
            self.done += nbytes
            self._progress(self.done, max(self.total, self.done))
