"""When to save: after every N steps, or when a controller says so; and whether saves slow training down too much."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

from ckptstore.write.saves.ledger import PendingSave

__all__ = ["ContinuousSaves", "SavePace", "SavePolicy"]

_P = TypeVar("_P", bound=PendingSave)

_FIRST: Final = 3
"""Steps that do not count: the first ones open the store and allocate memory."""
STEPS: Final = 20
LONG: Final = 10.0
"""Steps, and seconds of waiting in them, after which the share of the waiting is not a coincidence."""


@runtime_checkable
class SavePolicy(Protocol):
    """Decides when to save (`ckptstore.tuning.IntervalController`: PCcheck, section 3.4)."""

    def iterated(self, seconds: float) -> None:
        """Note how long an iteration took, without its save."""

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Asked once after every step."""

    def save(self, begin: Callable[[], _P]) -> _P:
        """Begin a save, and measure it."""


class ContinuousSaves:
    """A policy that begins a save as soon as the one before is durable, or has failed (Orbax calls it continuous)."""

    def __init__(self) -> None:
        self._newest: PendingSave | None = None

    def iterated(self, seconds: float) -> None:
        """Ignored: the time of a save alone decides."""

    def due(self, step: int) -> bool:  # noqa: ARG002 - a policy's interface
        """Whether no save is in flight."""
        return self._newest is None or self._newest.done()

    def save(self, begin: Callable[[], _P]) -> _P:
        """Begin a save, and remember it."""
        self._newest = pending = begin()
        return pending


class SavePace:
    """The option `save_every` of a `Checkpointer`; measures what steps and saves take."""

    def __init__(
        self, every: int | SavePolicy | Literal["continuous"], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if every == "continuous":
            every = ContinuousSaves()
        self._every = every if isinstance(every, SavePolicy) else operator.index(every)
        self._clock = clock
        self._since: float | None = None
        self._trained: float | None = None
        self._came = 0.0
        self._count = 0
        self._training = self._waiting = 0.0
        self._said = False

    def came(self) -> None:
        """Training calls: an iteration is over."""
        self._came = self._clock()
        self._trained = None if self._since is None else max(self._came - self._since, 1e-9)
        if self._trained is not None and not isinstance(self._every, int):
            self._every.iterated(self._trained)

    def left(self) -> None:
        """The call returns: training begins the next iteration."""
        self._since = self._clock()
        if self._trained is None:
            return
        self._count += 1
        if self._count > _FIRST:
            self._training += self._trained
            self._waiting += self._since - self._came

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Ask once after every step."""
        return step % self._every == 0 if isinstance(self._every, int) else self._every.due(step)

    def save(self, begin: Callable[[], PendingSave | None]) -> PendingSave | None:
        """Begin a save."""
        if isinstance(self._every, int):
            return begin()

        def begun() -> PendingSave:
            pending = begin()
            assert pending is not None  # only a replica leaves saves out, and it takes no controller
            return pending

        return self._every.save(begun)

    def slow_saves(self, url: str, strategy: str, *, bucket: bool) -> str | None:
        """What to say, once, if training runs at less than half of its pace; None: nothing.

        A controller knows what saves take: with one there is nothing to say.

        Args:
            url, strategy: of the run.
            bucket: the store is in an object store.
        """
        enough = self._count >= STEPS and self._waiting >= LONG and self._waiting > self._training
        if self._said or not isinstance(self._every, int) or not enough:
            return None
        self._said = True
        total = self._training + self._waiting
        advice = ["save_every=N, or save_every=IntervalController(slowdown=1.05), saves less often"]
        if bucket:
            tiers = f"ckptstore.open(FOLDER, remote={url!r}) in place of the URL saves to a disk, then to the bucket"
            advice.insert(0, tiers)
        if strategy == "full":
            advice.append("strategy='gradient' or 'delta' stores less")
        return (
            f"{url}: training runs at {self._training / total:.0%} of its pace: saving took {self._waiting:.0f} s of "
            f"the last {total:.0f} s. {'; '.join(advice)}"
        )
