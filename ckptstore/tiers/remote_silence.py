"""Measures for how long a remote has shown no sign of life while a drain works on it.

A sign of life is any change: a sent request, copied bytes, a new record. Bytes that were passed to the medium need time
to arrive. They get as much as a slow line, or the bandwidth limit of the drain, would need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ckptstore.host.bandwidth import bytes_per_second
from ckptstore.tiers.drain import Drain

__all__ = ["RemoteSilence"]

SLOW: Final = 1e6
"""Bytes a second that even a slow line can carry."""


class RemoteSilence:
    """The silence of a remote. One thread asks repeatedly."""

    def __init__(self, drain: Drain, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: returns seconds.
        """
        self._drain = drain
        self._clock = clock
        self._bytes = 0
        self._signs: tuple[int, ...] = ()
        self._until = 0.0  # time at which the last bytes should have arrived

    def seconds(self) -> float:
        """Seconds without a sign of life, less the time that the bytes in flight may need; 0 if the drain is idle."""
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
