"""Compute how often to save, and how many saves to run at once: PCcheck §3.4, Eq. (1)-(4), with an added loss term.

Symbols: t is the seconds of an iteration without saves. N is the maximum of saves in flight. T_w is the seconds from
the moment a save begins to copy until it is durable, with N saves running. q is the tolerated slowdown (1.05: 5 %). f
is the iterations from one save to the next. l is the seconds to load a checkpoint. We add `loss`: the seconds that
every save costs the loop even if a place is free (the copy, and the slower iterations during it). With a loss of 0 all
formulas here are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import UsageError

__all__ = [
    "TOLERANCE",
    "Choice",
    "Limits",
    "Recovery",
    "Setting",
    "Timing",
    "best_setting",
    "equation_3",
    "fits",
    "host_bytes",
    "least_interval",
    "least_seconds",
    "most_in_flight",
    "recovery_bound",
    "slowdown",
    "writer_memory",
]

TOLERANCE: Final = 0.05
"""Relative differences below this are within the noise: then fewer saves in flight and fewer threads win."""
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Setting:
    """How a writer saves: arguments of `Store.writer`.

    Attributes:
        in_flight: N, ``max_in_flight``.
        threads: p, ``threads``.
        staging_bytes: b, ``staging_bytes``: host memory between state and medium.
    """

    in_flight: int
    threads: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured or estimated times of a setting. Seconds.

    Attributes:
        setting: the setting.
        write: T_w.
        loss: time that the loop loses with every save although a place is free.
    """

    setting: Setting
    write: float
    loss: float = 0.0

    @property
    def per_save(self) -> float:
        """T_w / N: from one finished save to the next while N are always running."""
        return self.write / self.setting.in_flight


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the user sets.

    Attributes:
        slowdown: q, above 1.
        memory: M, host memory for saves in bytes; None: unlimited.
        space: S, bytes on the medium; None: unlimited.

    Raises:
        UsageError: an impossible limit.
    """

    slowdown: float = 1.05
    memory: int | None = None
    space: int | None = None

    def __post_init__(self) -> None:
        if not 1 < self.slowdown < math.inf:
            raise UsageError(f"slowdown: {self.slowdown:g}, more than 1 is needed (1.05 allows saving to cost 5 %)")
        for name, value in (("memory", self.memory), ("space", self.space)):
            if value is not None and value < 1:
                raise UsageError(f"{name}: {value}, at least 1 byte is needed")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Upper bound of the cost of a failure, in seconds: Eq. (4), term by term.

    Attributes:
        load: l, reading the newest checkpoint.
        since_save: f t, training time since the newest save began.
        under_way: min(N f t, T_w), training time while earlier saves were still running.
    """

    load: float
    since_save: float
    under_way: float

    @property
    def total(self) -> float:
        """Seconds from the failure until training has reached the same point again."""
        return self.load + self.since_save + self.under_way


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `best_setting`.

    Attributes:
        timing: N*, p, b and their T_w.
        interval: f*, with the loss of every save.
        equation_3: f* by Eq. (3), without the other limits.
    """

    timing: Timing
    interval: int
    equation_3: int


def slowdown(timing: Timing, interval: int, iteration: float) -> float:
    """Time of a long run with a save every `interval` iterations, over the time without saves (1: no slower).

    A save begins when training has reached it and a place is free: runtime_2 of §3.4 for a long run. In its term
    max(T_w, N f t) each of the N intervals f t also includes the loss.
    """
    return max(timing.per_save, timing.loss + interval * iteration) / (interval * iteration)


def equation_3(timing: Timing, iteration: float, tolerated: float) -> int:
    """f* = ceil(T_w / (N q t)): the minimum interval at which waiting for a place slows training by at most q."""
    _positive(iteration=iteration)
    return max(1, _ceiling(timing.per_save / (tolerated * iteration)))


def least_interval(timing: Timing, iteration: float, tolerated: float) -> int:
    """The minimum interval whose `slowdown` is at most `tolerated`: Eq. (3), or more if the loss requires it.

    Raises:
        UsageError: `iteration` is not above 0, or `tolerated` not above 1.
    """
    if not tolerated > 1:
        raise UsageError(f"slowdown: {tolerated:g}, more than 1 is needed")
    _positive(iteration=iteration)
    return max(1, _ceiling(least_seconds(timing, tolerated) / iteration))


def least_seconds(timing: Timing, tolerated: float) -> float:
    """The lower bound of the interval, in seconds of training; `least_interval` rounds it up to whole iterations."""
    return max(timing.per_save / tolerated, timing.loss / (tolerated - 1))


def recovery_bound(timing: Timing, interval: int, iteration: float, load: float) -> Recovery:
    """Eq. (4): a failure costs at most l + f t + min(N f t, T_w)."""
    between = interval * iteration
    return Recovery(load, between, min(timing.setting.in_flight * between, timing.write))


def host_bytes(state_bytes: int, setting: Setting, memory: int | None = None) -> int:
    """Maximum host memory of a writer of plain fulls.

    Args:
        memory: the writer's ``memory``; None: a copy of the state for each save in flight. Staging blocks are added.
    """
    copies = setting.in_flight * state_bytes
    return (copies if memory is None else min(copies, memory)) + setting.staging_bytes


def writer_memory(state_bytes: int, setting: Setting, limits: Limits) -> int | None:
    """The ``memory`` to pass to the writer for M; None: no limit is needed, N copies and the staging fit within M.

    Raises:
        UsageError: M is less than a writer needs.
    """
    if limits.memory is None or setting.in_flight * state_bytes + setting.staging_bytes <= limits.memory:
        return None
    room = limits.memory - setting.staging_bytes
    from ckptstore.host.arenas import LEAST  # imports numpy, which the model itself does not need

    if room < LEAST:
        needed = min(state_bytes, LEAST) + setting.staging_bytes
        raise UsageError(f"memory: {limits.memory} bytes; one save of this state needs {needed}")
    return room


def most_in_flight(state_bytes: int, staging_bytes: int, limits: Limits) -> int:
    """Maximum number of saves in flight under M and S (N <= S/m - 1: those being written, and one complete).

    If M is below one copy it is one, and the loop waits while that save is written (`writer_memory`).

    Raises:
        UsageError: not even one fits.
    """
    most = 1 << 20
    if limits.memory is not None:
        most = max(1, (limits.memory - staging_bytes) // state_bytes)
        writer_memory(state_bytes, Setting(most, 1, staging_bytes), limits)
    if limits.space is not None:
        most = min(most, limits.space // state_bytes - 1)
        if most < 1:
            needed = 2 * state_bytes
            raise UsageError(f"space: {limits.space} bytes; two checkpoints of this state need {needed}")
    return most


def best_setting(timings: Sequence[Timing], iteration: float, limits: Limits, state_bytes: int) -> Choice:
    """Choose N*, p and b within the limits so that saves can be most frequent.

    Without a loss this minimizes T_w / N, as in the paper. Among settings that are equally good (within `TOLERANCE`, or
    with an interval as short), the one with the fewest saves in flight wins: each save in flight is a copy of the state
    in memory, and T_w, which increases `recovery_bound`, grows with N. Then the lowest T_w wins, then the fewest
    threads.

    Raises:
        UsageError: no setting is within the limits.
    """
    allowed = [one for one in timings if fits(one.setting, limits, state_bytes)]
    if not allowed:
        raise UsageError("memory and space allow none of the settings that were measured")
    intervals = {one: least_interval(one, iteration, limits.slowdown) for one in allowed}
    seconds = {one: least_seconds(one, limits.slowdown) for one in allowed}
    enough = min(seconds.values()) * (1 + TOLERANCE)
    good = [one for one in allowed if seconds[one] <= enough or intervals[one] == min(intervals.values())]
    fewest = min(one.setting.in_flight for one in good)
    among = [one for one in good if one.setting.in_flight == fewest]
    quickest = min(one.write for one in among)
    chosen = min(
        (one for one in among if one.write <= quickest * (1 + TOLERANCE)),
        key=lambda one: (one.setting.threads, one.setting.staging_bytes, one.write),
    )
    return Choice(chosen, intervals[chosen], equation_3(chosen, iteration, limits.slowdown))


def fits(setting: Setting, limits: Limits, state_bytes: int) -> bool:
    """Whether M and S allow the setting."""
    try:
        return setting.in_flight <= most_in_flight(state_bytes, setting.staging_bytes, limits)
    except UsageError:  # too much staging; a smaller one may fit
        return False


def _ceiling(value: float) -> int:
    """Round up, but ignore an excess that comes from floating-point rounding."""
    return math.ceil(value * (1 - _ROUNDING))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name}: {value:g}, more than 0 is needed")
