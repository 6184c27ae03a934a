"""For how long a remote has given no sign, while a drain is at work there.

A sign is whatever changes: a request that is sent, bytes that were brought, a record. What was given to the medium just
before has time to arrive: as much as a slow line takes, or as the drain is held to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ckptstore.host.bandwidth import bytes_per_second
from ckptstore.tiers.drain import Drain

__all__ = ["Quiet"]

SLOW: Final = 1e6
"""Bytes a second that even a slow line takes."""


class Quiet:
    """Asked again and again, by one thread."""

    def __init__(self, drain: Drain, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds.
        """
        self._drain = drain
        self._clock = clock
        self._bytes = 0
        self._signs: tuple[int, ...] = ()
        self._until = 0.0  # when what was given last has arrived

    def seconds(self) -> float:
        """Seconds without a sign, beyond what the bytes that are on their way may take; 0: the drain is at rest."""
        now = self._clock()
        costs = self._drain.pair.remote.backend.costs
        spent = None if costs is None else costs.spent
        end = 0 if self._drain.remote is None else self._drain.remote.end
        gone = self._drain.moved + (0 if spent is None else spent.sent)
        signs = (end, gone, 0 if spent is None else spent.total + spent.received)
        if signs != self._signs or not self._drain.at_work:
            self._until = now + (gone - self._bytes) / self._rate()
            self._bytes, self._signs = gone, signs
        return max(0.0, now - self._until)

    def _rate(self) -> float:
        pair = self._drain.pair
        limit = pair.remote.backend.storage_options.get("bandwidth")
        return min(SLOW, pair.bandwidth or SLOW, SLOW if limit is None else bytes_per_second(limit))
