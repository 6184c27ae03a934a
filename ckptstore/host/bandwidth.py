"""Limit the bytes per second of background work, so that it leaves network, disk and processor to others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.host.cancellable_calls import nap

__all__ = ["PIECE", "Bandwidth", "bytes_per_second", "rate_limited"]

PIECE: Final = 1 << 20
"""Bytes of an upload that are sent at once."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]i?)?B?(?:/s)?")
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def bytes_per_second(value: object) -> float:
    """Convert a number of bytes or a string such as ``50MB`` or ``1.5 GiB/s`` to bytes per second.

    Raises:
        UsageError: the value is neither, or less than 1.
    """
    found: float = 0
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        found = float(match[1]) * _UNITS[match[2] or ""]
    if not 1 <= found < float(1 << 63):
        raise UsageError(f"bandwidth: {value!r:.40}; pass bytes per second, at least 1, or a string such as 50MB")
    return found


class Bandwidth:
    """Limits the average rate of bytes, of both directions together. Thread-safe.

    A caller waits until all earlier bytes have used up their time, so at most one piece is ahead of the rate.

    Args:
        rate: bytes per second.
        clock, sleep: read the time and wait, in seconds.
    """

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = nap
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free = 0.0  # the time at which all earlier bytes have used up their time

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` may be sent or received."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._free)
            self._free = turn + nbytes / self.rate
        if turn > now:
            self._sleep(turn - now)


def rate_limited(rate: float | None, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap a progress callback so that the work which calls it is limited to `rate` bytes per second.

    A call waits until all bytes reported before have used up their time. Thread-safe if `advance` is.

    Args:
        rate: bytes per second; None: no limit.
        advance: takes the number of bytes done.
    """
    if rate is None:
        return advance
    bandwidth = Bandwidth(rate)

    def limited(nbytes: int) -> None:
        bandwidth.take(nbytes)
        advance(nbytes)

    return limited
