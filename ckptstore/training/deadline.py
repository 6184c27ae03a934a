"""When a job is about to be ended, as its steps and saves have told so far."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["Deadline"]

_MARGIN: Final = 1.0
"""Seconds for what nobody measures: the end of the process, a medium that is slow for once."""


class Deadline:
    """Counts down from when it is made."""

    def __init__(self, seconds: float | None) -> None:
        """
        Args:
            seconds: from now; None: there is no deadline.
        """
        self._end = None if seconds is None else time.monotonic() + seconds
        self._before: float | None = None
        self._step = 0.0
        self._save = 0.0

    def saved(self, seconds: float) -> None:
        """A save took so long until it was durable."""
        self._save = max(self._save, seconds)

    def near(self, ahead: int = 0) -> bool:
        """A step is done -> whether the next one, and its save, might end too late (twice the longest is allowed).

        Args:
            ahead: so many more steps may follow before the save.
        """
        now = time.monotonic()
        if self._before is not None:
            self._step = max(self._step, now - self._before)
        self._before = now
        longest = (1 + ahead) * self._step + self._save
        return self._end is not None and now + 2 * longest + _MARGIN >= self._end
