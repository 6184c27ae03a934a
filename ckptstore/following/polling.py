"""The iteration that a follower and a publisher share: poll a run until there is something new, a time is over, or the
iteration is ended."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from ckptstore.errors import UsageError

__all__ = ["LONGEST", "SHORTEST", "Polling", "check_polling"]

SHORTEST: Final = 0.01
LONGEST: Final = 86400.0
"""Limits of the seconds between two polls."""
_NAP: Final = 0.2
"""Seconds after which a waiting thread checks whether it should end."""
_T = TypeVar("_T")


def check_polling(poll: float, timeout: float | None) -> None:
    """Raise `UsageError` if these are not the seconds between two polls and those of a timeout (None: no timeout)."""
    if not _seconds(poll) or not SHORTEST <= poll <= LONGEST:
        raise UsageError(f"poll: {poll!r:.80}; it takes {SHORTEST:g} to {LONGEST:g} seconds between two polls")
    if timeout is not None and (not _seconds(timeout) or not timeout >= 0):
        raise UsageError(f"timeout: {timeout!r:.80}; a number of seconds, or None, is needed")


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Polling(ABC, Generic[_T]):
    """An iterator that polls. One thread iterates; any thread may call `close`."""

    def __init__(self, poll: float, timeout: float | None, stop: threading.Event | None) -> None:
        """
        Args:
            poll: seconds between two polls.
            timeout: seconds without something new after which the iteration ends; None: it never ends.
            stop: an event that ends the iteration when any thread sets it.
        """
        self._pause = poll
        self._timeout = timeout
        self._stop = stop
        self._closed = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End the iteration: a waiting ``next`` raises `StopIteration` soon."""

    @abstractmethod
    def look(self) -> _T | None:
        """What is new, if there is something already, else None: ``next`` without waiting."""

    @property
    def ended(self) -> bool:
        """Whether `close` was called, or the event `stop` is set."""
        return self._closed.is_set() or (self._stop is not None and self._stop.is_set())

    def __next__(self) -> _T:
        """What is new; waits for it. Raises what `look` raises; `StopIteration`: ended, or timed out."""
        began = time.monotonic()
        while not self.ended:
            if (found := self.look()) is not None:
                return found
            until = time.monotonic() + self._pause
            if self._timeout is not None:
                if time.monotonic() - began >= self._timeout:
                    break
                until = min(until, began + self._timeout)
            while not self.ended and (left := until - time.monotonic()) > 0:
                self._closed.wait(min(left, _NAP))
        raise StopIteration
