"""After which steps to save: every so many, or when a controller says so, which is told what steps and saves take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from ckptstore.training.slowed import Slowed
from ckptstore.write.ledger import PendingSave

__all__ = ["Pace", "Pacing"]

_P = TypeVar("_P", bound=PendingSave)


@runtime_checkable
class Pace(Protocol):
    """What says when to save (`ckptstore.tuning.IntervalController`: PCcheck, section 3.4)."""

    def iterated(self, seconds: float) -> None:
        """An iteration took so long, without what its save took."""

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Asked once after every step."""

    def save(self, begin: Callable[[], _P]) -> _P:
        """Begin a save, and measure it."""


class Pacing:
    """`save_every` of a `Checkpointer`.

    Attributes:
        slowed: what saves cost training.
    """

    def __init__(self, every: int | Pace, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every = every
        self._clock = clock
        self._since: float | None = None
        self._trained: float | None = None
        self._came = 0.0
        self.slowed = Slowed()

    def came(self) -> None:
        """Training calls: an iteration is over."""
        self._came = self._clock()
        self._trained = None if self._since is None else max(self._came - self._since, 1e-9)
        if self._trained is not None and isinstance(self._every, Pace):
            self._every.iterated(self._trained)

    def goes_on(self) -> None:
        """Training begins the next iteration."""
        self._since = self._clock()
        if self._trained is not None:
            self.slowed.stepped(self._trained, self._since - self._came)

    def due(self, step: int) -> bool:
        """Whether to save after `step`. To be asked once after every step."""
        return step % self._every == 0 if isinstance(self._every, int) else self._every.due(step)

    def save(self, begin: Callable[[], PendingSave | None]) -> PendingSave | None:
        """Begin a save."""
        if isinstance(self._every, int):
            return begin()

        def begun() -> PendingSave:
            pending = begin()
            assert pending is not None  # only a replica leaves saves out, which takes no controller
            return pending

        return self._every.save(begun)
