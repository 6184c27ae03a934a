"""Adapt the interval between saves during training: f* for the current times of iterations and saves (PCcheck §3.4).

PCcheck only plans such a controller. This one raises the interval at once when a save, or the iterations during it,
cost more than `slowdown` allows, and a little further than needed. It lowers the interval only when it could be clearly
shorter, and by half at most. So noise does not move it, and the bound has priority.

T_w is defined for N saves at once. At the interval that Eq. (3) finds for it fewer saves run, and they are faster. If
their time were taken for T_w, the interval would become shorter, T_w longer again, and so on forever. So each save is
measured together with the number of concurrent saves. T_w is assumed to be linear in that number, and the slope
(0: saves do not disturb each other, 1: N of them take N times as long) is remembered.
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
"""Maximum factor by which one change shortens the interval."""
_ALONE: Final = 1.25
"""A save counts as alone if fewer saves than this ran on average, itself included."""
_AMONG: Final = 1.5
"""A save shows how saves disturb each other if at least this many ran on average."""
_FEW: Final = 4
"""With fewer values than this the spread is not estimated."""
_MEDIAN_ERROR: Final = 1.4826 * 1.2533
"""Standard error of the median of n normal values, times sqrt(n), over the median distance to the median."""


class _Pending(Protocol):
    """The part of `Writer.save_async`'s result that is used."""

    def when_done(self, call: Callable[[bool], None], /) -> None:
        """Call `call` with whether the checkpoint is durable, once that is known."""


_P = TypeVar("_P", bound=_Pending)


@dataclass(slots=True)
class _Averages:
    """The newest values of each kind, in seconds."""

    quiet: deque[float]
    """Iterations during which no save was running."""
    beside: deque[float]
    """Iterations during which a save was running."""
    writes: deque[tuple[float, float]]
    """T_w of each save, and the mean number of saves that ran meanwhile, itself included."""
    calls: deque[float]


class _Crowd:
    """The number of running saves, integrated over time."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def change(self, under_way: int, now: float) -> float:
        """Record that `under_way` saves ran until now -> the integral, in seconds."""
        self._sum += under_way * (now - self._at)
        self._at = now
        return self._sum


class IntervalController:
    """Decides after which steps to save, so that saving slows training by at most `slowdown`. Called by one thread.

    Args:
        slowdown: q, above 1: time of the loop with saves over the time without.
        in_flight: N, the writer's ``max_in_flight``.
        first: iterations before the first save, which measure the pace without saves; at least 1.
        shortest, longest: bounds of the interval in iterations.
        hysteresis: minimum relative decrease of the interval (0.15: 15 %) before it is lowered. When it is raised, half
            of this is added to what is needed.
        memory: number of iterations that are remembered; of saves, a fourth as many.
        clock: returns seconds, for `save`.

    Attributes:
        interval: iterations from one save to the next; None until the first save is durable.

    Raises:
        UsageError: an argument is out of range.

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
        """Step of the newest save, or the step before the first call of `due`."""
        self._asked = False
        # Written by threads of the writer, under the condition's lock.
        self._changed = threading.Condition()
        self._under_way = 0
        self._crowd = _Crowd()
        self._finished: list[tuple[float, float, float] | None] = []
        self._was_busy = False

    @property
    def estimated_slowdown(self) -> float | None:
        """The estimated slowdown at the current interval (1: none); None before the first save."""
        if self.interval is None:
            return None
        return slowdown(self._timing(), self.interval, self._pace())

    def iterated(self, seconds: float) -> None:
        """Record an iteration's duration, without that of its save. Raises `UsageError` unless it is above 0."""
        if not seconds > 0:
            raise UsageError(f"an iteration of {seconds:g} s: more than 0 is needed")
        with self._changed:
            busy, self._was_busy = self._was_busy or self._under_way > 0, self._under_way > 0
        (self._seen.beside if busy else self._seen.quiet).append(seconds)

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Call it once after every step; steps may go back, as after a rollback."""
        self._take_finished()
        if self._last is None or step < self._last:
            self._last = step - 1
        if self.interval is None:
            due = not self._asked and step - self._last >= self._first and bool(self._seen.quiet or self._seen.beside)
            # One save at a time until the first one is measured.
            self._asked = self._asked or due
        else:
            due = step - self._last >= self.interval
        if due:
            self._last = step
        return due

    def save(self, begin: Callable[[], _P]) -> _P:
        """Begin a save (``lambda: writer.save_async(state, step)``), and measure it.

        Waits until fewer than `in_flight` of these saves are running, as the writer itself would. So the duration of
        the call is that of the copy, without the wait.

        Raises:
            any error of `begin`.
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
        """Record a save that `save` did not begin.

        Args:
            write: seconds from its beginning until it was durable.
            call: seconds of these for which the loop stood still.
            crowd: mean number of saves that ran meanwhile, itself included.

        Raises:
            UsageError: `write` is not above 0, `call` is below 0, or `crowd` is below 1.
        """
        if not write > 0 or not call >= 0 or not crowd >= 1:
            raise UsageError(
                f"a save of {write:g} s with {call:g} s in its call and a crowd of {crowd:g}: write must be above 0, "
                "call at least 0, crowd at least 1"
            )
        self._seen.writes.append((write, crowd))
        self._seen.calls.append(call)
        self._adapt()

    def _done(self, began: float, before: float, call: float, durable: bool) -> None:
        """Record the end of a save, on a thread of the writer. `before`: the crowd's integral at its beginning."""
        now = self._clock()
        write = max(now - began, call)
        with self._changed:
            after = self._crowd.change(self._under_way, now)
            self._under_way -= 1
            crowd = max(1.0, (after - before) / write) if write > 0 else 1.0
            # The duration of a failed save is not used.
            self._finished.append((write, call, crowd) if durable and write > 0 else None)
            self._changed.notify_all()

    def _take_finished(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for one in finished:
            if one is not None:
                self.saved(*one)
            elif self.interval is None:
                self._asked = False  # the first save may be repeated

    def _pace(self) -> float:
        """t: an iteration without a save: the lower median of both kinds, because a save never makes one shorter."""
        return min(median(some) for some in (self._seen.quiet, self._seen.beside) if some)

    def _timing(self) -> Timing:
        full = 1 + self._steepness * (self._in_flight - 1)
        write = _risen([one * full / (1 + self._steepness * (crowd - 1)) for one, crowd in self._seen.writes])
        pace = self._pace()
        # Each iteration during a save is longer by this much, and a save alone takes T_w / t iterations.
        beside = _excess(self._seen.beside, self._seen.quiet) * (write / pace)
        return Timing(Setting(self._in_flight, 1, 0), write, _risen(self._seen.calls) + beside)

    def _adapt(self) -> None:
        if not self._seen.quiet and not self._seen.beside:
            return  # no iteration was recorded: there is nothing to estimate from
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
    """How far the median of `beside` is above that of `quiet`, beyond two standard errors; at least 0."""
    if len(beside) < _FEW or len(quiet) < _FEW:
        return 0.0
    errors = math.hypot(*(_MEDIAN_ERROR * _deviation(some) / math.sqrt(len(some)) for some in (beside, quiet)))
    return max(0.0, median(beside) - median(quiet) - 2 * errors)


def _deviation(values: Sequence[float]) -> float:
    """Median absolute deviation: an outlier has no weight."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _risen(values: Sequence[float]) -> float:
    """The median, or more as soon as the newest two are above it, so that a rise shows before half a window."""
    return max(median(values), min(list(values)[-2:]))
