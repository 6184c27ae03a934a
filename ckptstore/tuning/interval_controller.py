"""How often to save, while training runs: f* for what iterations and saves take now (PCcheck §3.4: planned there).

The interval is raised at once when a save or the iterations beside it cost more than `slowdown` allows, a little
further than needed, and lowered only when it could be clearly shorter, by half at most: so noise does not move it, and
the bound comes first.

T_w is that of N saves at once, but at the interval that Eq. (3) finds for it fewer are under way, and they are quicker:
taken for T_w, they would ask for an interval at which it is longer again, and so on for ever. So each save is measured
with how many were under way beside it, T_w is taken to grow in a straight line with that number, and how steep the line
is (0: saves do not disturb each other, 1: N of them take N times as long) is remembered.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol, TypeVar

from ckptstore.errors import UsageError
from ckptstore.tuning.save_interval import Setting, Timing, least_interval, slowdown

__all__ = ["IntervalController"]

_SHRINK: Final = 2
"""One change makes the interval at most this much shorter."""
_ALONE: Final = 1.25
"""A save beside which fewer were under way, itself included, counts as alone."""
_AMONG: Final = 1.5
"""A save beside which so many were under way shows how they disturb each other."""
_FEW: Final = 4
"""Fewer numbers than this have no spread to speak of."""
_MEDIAN_ERROR: Final = 1.4826 * 1.2533
"""Standard error of the median of n normal values, times sqrt(n), over the median distance to the median."""


class _Pending(Protocol):
    """What `Writer.save_async` returns, as far as it is looked at."""

    def when_done(self, call: Callable[[bool], None], /) -> None:
        """Have `call` told whether the checkpoint is durable, once that is known."""


_P = TypeVar("_P", bound=_Pending)


@dataclass(slots=True)
class _Averages:
    """The newest numbers of each kind, in seconds."""

    quiet: deque[float]
    """Iterations with no save under way."""
    beside: deque[float]
    """Iterations during which a save was under way."""
    writes: deque[tuple[float, float]]
    """T_w of each save, and how many were under way meanwhile, on average, itself included."""
    calls: deque[float]


class _Crowd:
    """How many saves were under way, summed over time."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def change(self, under_way: int, now: float) -> float:
        """So many were under way until now -> the sum in seconds."""
        self._sum += under_way * (now - self._at)
        self._at = now
        return self._sum


class IntervalController:
    """Says after which steps to save, so that saving slows training by at most `slowdown`. One thread asks it.

    Args:
        slowdown: q, above 1: the time of the loop with saves over that without.
        in_flight: N, as the writer has it (``max_in_flight``).
        first: iterations before the first save, which measure the pace without saves; at least 1.
        shortest, longest: bounds of the interval in iterations.
        hysteresis: how much shorter (0.15: 15 %) the interval has to become for that to be done. It is raised by half
            as much more than needed.
        memory: how many iterations and how many saves (a fourth as many) are remembered.
        clock: seconds, for `save`.

    Attributes:
        interval: iterations from one save to the next; None until the first save is durable.

    Raises:
        UsageError: an argument out of range.

    Example:
        >>> controller = IntervalController(slowdown=1.05, in_flight=2, first=3)
        >>> for step in range(1, 4):
        ...     controller.iterated(0.1)
        ...     controller.due(step)
        False
        False
        True
        >>> controller.saved(write=2.1, call=0.02)
        >>> controller.interval  # ceil(2.1 / (2 x 1.05 x 0.1)) iterations
        10
    """

    def __init__(
        self,
        *,
        slowdown: float = 1.05,
        in_flight: int = 1,
        first: int = 10,
        shortest: int = 1,
        longest: int = 100_000,
        hysteresis: float = 0.15,
        memory: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not slowdown > 1:
            raise UsageError(f"slowdown: {slowdown:g}, more than 1 is needed")
        if in_flight < 1 or first < 1 or memory < 4:
            raise UsageError("in_flight and first have to be at least 1, memory at least 4")
        if not 1 <= shortest <= longest:
            raise UsageError(f"shortest {shortest} and longest {longest}: 1 <= shortest <= longest is needed")
        if not 0 <= hysteresis < 1:
            raise UsageError(f"hysteresis: {hysteresis:g}, 0 or more and less than 1 is needed")
        self.interval: int | None = None
        self._tolerated = slowdown
        self._in_flight = in_flight
        self._first = first
        self._bounds = shortest, longest
        self._hysteresis = hysteresis
        self._clock = clock
        saves = memory // 4
        self._seen = _Averages(deque(maxlen=memory), deque(maxlen=memory), deque(maxlen=saves), deque(maxlen=saves))
        self._steepness = 0.0
        self._last: int | None = None
        """The step of the newest save, or the one before the first that was asked about."""
        self._asked = False
        # What the threads of the writer tell, under the condition's lock.
        self._changed = threading.Condition()
        self._under_way = 0
        self._crowd = _Crowd()
        self._finished: list[tuple[float, float, float] | None] = []
        self._was_busy = False

    @property
    def estimated_slowdown(self) -> float | None:
        """What saving costs by what was measured and the present interval (1: nothing); None before the first save."""
        if self.interval is None:
            return None
        return slowdown(self._timing(), self.interval, self._pace())

    def iterated(self, seconds: float) -> None:
        """An iteration took so long, without what its save took. Raises `UsageError` unless that is above 0."""
        if not seconds > 0:
            raise UsageError(f"an iteration of {seconds:g} s: more than 0 is needed")
        with self._changed:
            busy, self._was_busy = self._was_busy or self._under_way > 0, self._under_way > 0
        (self._seen.beside if busy else self._seen.quiet).append(seconds)

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Asked once after every step; steps may go back, as after a rollback."""
        self._take_finished()
        if self._last is None or step < self._last:
            self._last = step - 1
        if self.interval is None:
            due = not self._asked and step - self._last >= self._first and bool(self._seen.quiet or self._seen.beside)
            # One save at a time until there is something to go by.
            self._asked = self._asked or due
        else:
            due = step - self._last >= self.interval
        if due:
            self._last = step
        return due

    def save(self, begin: Callable[[], _P]) -> _P:
        """Begin a save (``lambda: writer.save_async(state, step)``), and measure it.

        Waits until fewer than `in_flight` of these are under way, as the writer itself would: so that the call's time
        is the copy's, and the wait is none of it.

        Raises:
            what `begin` raises.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self._in_flight)
            began = self._clock()
            before = self._crowd.change(self._under_way, began)
            self._under_way += 1
            self._was_busy = True
        try:
            pending = begin()
        except BaseException:
            with self._changed:
                self._crowd.change(self._under_way, self._clock())
                self._under_way -= 1
            if self.interval is None:
                self._asked = False
            raise
        call = self._clock() - began
        pending.when_done(lambda durable: self._done(began, before, call, durable))
        return pending

    def saved(self, write: float, call: float = 0.0, crowd: float = 1.0) -> None:
        """Take note of a save that `save` did not begin.

        Args:
            write: seconds from its beginning until it was durable.
            call: seconds of that for which the loop stood still.
            crowd: how many saves were under way meanwhile, on average, itself included.

        Raises:
            UsageError: `write` is not above 0, `call` below, or `crowd` below 1.
        """
        if not write > 0 or not call >= 0 or not crowd >= 1:
            raise UsageError(
                f"a save of {write:g} s, {call:g} of them in its call, one of {crowd:g}: more than 0, 0 or more, and "
                "at least 1 are needed"
            )
        self._seen.writes.append((write, crowd))
        self._seen.calls.append(call)
        self._adapt()

    def _done(self, began: float, before: float, call: float, durable: bool) -> None:
        """On a thread of the writer's. `before`: the crowd's sum when it began."""
        now = self._clock()
        write = max(now - began, call)
        with self._changed:
            after = self._crowd.change(self._under_way, now)
            self._under_way -= 1
            crowd = max(1.0, (after - before) / write) if write > 0 else 1.0
            # What a failed save took says nothing.
            self._finished.append((write, call, crowd) if durable and write > 0 else None)
            self._changed.notify_all()

    def _take_finished(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for one in finished:
            if one is not None:
                self.saved(*one)
            elif self.interval is None:
                self._asked = False  # the first save may be tried again

    def _pace(self) -> float:
        """t: an iteration with no save beside it, by the newest of those. A save beside them makes none shorter."""
        return min(median(some) for some in (self._seen.quiet, self._seen.beside) if some)

    def _timing(self) -> Timing:
        full = 1 + self._steepness * (self._in_flight - 1)
        write = _risen([one * full / (1 + self._steepness * (crowd - 1)) for one, crowd in self._seen.writes])
        pace = self._pace()
        # Each iteration beside a save is longer by so much, and a save alone is beside T_w / t of them.
        beside = _excess(self._seen.beside, self._seen.quiet) * (write / pace)
        return Timing(Setting(self._in_flight, 1, 0), write, _risen(self._seen.calls) + beside)

    def _adapt(self) -> None:
        if not self._seen.quiet and not self._seen.beside:
            return  # no iteration was told: nothing to go by
        alone = [write for write, crowd in self._seen.writes if crowd < _ALONE]
        among = [(write, crowd) for write, crowd in self._seen.writes if crowd >= _AMONG]
        if alone and among:
            longer = median(write for write, _ in among) / median(alone) - 1
            self._steepness = min(max(longer / (median(crowd for _, crowd in among) - 1), 0.0), 1.0)
        shortest, longest = self._bounds
        wanted = min(max(least_interval(self._timing(), self._pace(), self._tolerated), shortest), longest)
        now = self.interval
        if now is None:
            self.interval = wanted
        elif wanted > now:
            self.interval = min(math.ceil(wanted * (1 + self._hysteresis / 2)), longest)
        elif wanted <= now * (1 - self._hysteresis):
            self.interval = max(wanted, -(-now // _SHRINK))


def _excess(beside: Sequence[float], quiet: Sequence[float]) -> float:
    """By how much more one median is above the other than chance would put it (two standard errors); at least 0."""
    if len(beside) < _FEW or len(quiet) < _FEW:
        return 0.0
    errors = math.hypot(*(_MEDIAN_ERROR * _deviation(some) / math.sqrt(len(some)) for some in (beside, quiet)))
    return max(0.0, median(beside) - median(quiet) - 2 * errors)


def _deviation(values: Sequence[float]) -> float:
    """The median of the distances to the median: an outlier does not count."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _risen(values: Sequence[float]) -> float:
    """The median, or more as soon as the newest two are above it: a rise must not take half a window to be seen."""
    return max(median(values), min(list(values)[-2:]))
