"""Count what a store costs: requests by kind, and bytes sent and received. Object stores charge for both."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Costs", "Spent"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Costs at one instant.

    Attributes:
        requests: number of requests sent, by kind: ``create`` (conditional PUT), ``put``, ``part`` (requests of a
            multipart upload, its start and completion included), ``get``, ``range``, ``head``, ``list`` (one per 1,000
            keys), ``delete``.
        sent, received: bytes of objects, without headers; a repeated transfer counts again.
        repeated: requests that were sent again because the previous one failed or got no answer.
    """

    requests: Mapping[str, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    repeated: int = 0

    @property
    def total(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())

    def __sub__(self, earlier: Spent) -> Spent:
        """Costs between an earlier instant and this one."""
        kinds = {kind: number - earlier.requests.get(kind, 0) for kind, number in self.requests.items()}
        return Spent(
            {kind: number for kind, number in kinds.items() if number},
            self.sent - earlier.sent,
            self.received - earlier.received,
            self.repeated - earlier.repeated,
        )


class Costs:
    """Counters of one backend. Thread-safe."""

    def __init__(self) -> None:
        """Start with all counters at zero."""
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._sent = self._received = self._repeated = 0

    def count(self, kind: str, requests: int = 1, *, sent: int = 0, repeated: bool = False) -> None:
        """Count requests that are about to be sent, with `sent` bytes of an object."""
        with self._lock:
            self._requests[kind] += requests
            self._sent += sent
            self._repeated += repeated

    def receive(self, nbytes: int) -> None:
        """Count `nbytes` received bytes of an object."""
        with self._lock:
            self._received += nbytes

    @property
    def spent(self) -> Spent:
        """The current counters."""
        with self._lock:
            return Spent(dict(self._requests), self._sent, self._received, self._repeated)
