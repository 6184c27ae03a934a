"""A limit on bytes per second, where others need the network, the disk or the processor, too."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.host.cancellable_calls import nap

__all__ = ["PIECE", "Bandwidth", "bytes_per_second", "held_to"]

PIECE: Final = 1 << 20
"""Bytes of an upload that are let go at once."""
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
    """A number of bytes, or a text as ``50MB``, ``1.5 GiB/s``. Raises `UsageError`."""
    found: float = 0
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        found = float(match[1]) * _UNITS[match[2] or ""]
    if not 1 <= found < float(1 << 63):
        raise UsageError(f"bandwidth: {value!r:.40}; bytes in a second, at least 1, or a text as 50MB")
    return found


class Bandwidth:
    """Lets bytes go, in both directions together, no faster than a rate on average. Thread-safe.

    Whoever asks waits until what went before has taken its time; so no more than one piece is ahead.

    Args:
        rate: bytes in a second.
        clock, sleep: of this process; seconds.
    """

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = nap
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free = 0.0  # when all that was let go has taken its time

    def take(self, nbytes: int) -> None:
        """Wait for one's turn to send or receive so many bytes."""
        with self._lock:
            now = self._clock()
            turn = max(now, self._free)
            self._free = turn + nbytes / self.rate
        if turn > now:
            self._sleep(turn - now)


def held_to(rate: float | None, advance: Callable[[int], None]) -> Callable[[int], None]:
    """`advance`, which is told of bytes, for work that may take no more than `rate` of them in a second; None: any.

    Whoever tells waits there until what was told of before has taken its time. Thread-safe if `advance` is.
    """
    if rate is None:
        return advance
    bandwidth = Bandwidth(rate)

    def told(nbytes: int) -> None:
        bandwidth.take(nbytes)
        advance(nbytes)

    return told
