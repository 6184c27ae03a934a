"""Limits how many saves are in flight (begun, but not durable): a kill can lose that many."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptstore.write.saves.ledger import Failures

__all__ = ["Place", "Places"]


class Place:
    """A place among the saves in flight. It refers to no memory, so a save's future keeps no memory alive."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Give the place to another save. Any thread may call this; a second call does nothing."""
        with self._lock:
            leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Places:
    """A fixed number of places. A save leaves its place when it is durable, fails, or waits for its batch. Thread-safe.

    A failure is added to `Failures` before its save leaves its place. So a call that waited for that place finds it.

    Attributes:
        limit: the number of places.
    """

    def __init__(self, limit: int, failures: Failures) -> None:
        """
        Args:
            failures: the failures of this writer that no call has raised yet.
        """
        self.limit = limit
        self._free = threading.BoundedSemaphore(limit)
        self._failures = failures

    def take(self) -> tuple[Place, float]:
        """Wait until a place is free -> the place, and the seconds waited.

        Raises:
            the error of an earlier save (`Failures.raise_unseen`). No place is taken then.
        """
        began = time.monotonic()
        self._free.acquire()
        waited = time.monotonic() - began
        try:
            # Prevents: a kill that loses more than `limit` saves. A failed save of which the caller does not know
            # counts as one of them; the save of this call would be one more.
            self._failures.raise_unseen()
        except BaseException:
            self._free.release()
            raise
        return Place(self._free.release), waited
