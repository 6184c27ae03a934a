"""How long-running work says how far it is: one protocol for every public function, one counter for its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Advance", "Progress", "Tally"]

Advance = Callable[[int], None]
"""Within the engine: told how many bytes were just done, from any thread. `Tally.advance` is one."""


class Progress(Protocol):
    """What `Store.load`, `Writer.save`, `Store.verify` and every other long call take as ``progress``."""

    def __call__(self, done: int, total: int, /) -> None:
        """`done` of `total` bytes are done. Called from any thread, one call at a time; `total` may still grow."""


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
