"""How often to save, and how many saves at once: PCcheck §3.4, Eq. (1)-(4), and what they leave out.

Symbols: t seconds of an iteration without saves; N saves in flight at most; T_w seconds from the moment a save begins
to copy until it is durable, with N under way; q the slowdown that is tolerated (1.05: 5 %); f iterations from one save
to the next; l seconds to load a checkpoint. `loss` is ours: the seconds of the loop that every save takes even if a
place is free (the copy, and what the iterations beside it lose). With it at 0 everything here is the paper's.
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
"""What differs less than this was not measured apart: then fewer saves in flight and fewer threads win."""
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
    """What a setting was measured, or estimated, to take. Seconds.

    Attributes:
        setting: the setting.
        write: T_w.
        loss: what the loop loses with every save although a place is free.
    """

    setting: Setting
    write: float
    loss: float = 0.0

    @property
    def per_save(self) -> float:
        """T_w / N: from one finished save to the next when N are always under way."""
        return self.write / self.setting.in_flight


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows.

    Attributes:
        slowdown: q, above 1.
        memory: M, host memory for saves in bytes; None: any.
        space: S, bytes on the medium; None: any.

    Raises:
        UsageError: a limit that nothing could keep.
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
    """The most that a failure costs, in seconds: Eq. (4), term by term.

    Attributes:
        load: l, reading the newest checkpoint.
        since_save: f t, trained since the newest save began.
        under_way: min(N f t, T_w), trained while saves before that were on their way.
    """

    load: float
    since_save: float
    under_way: float

    @property
    def total(self) -> float:
        """Seconds from the failure until training is where it was."""
        return self.load + self.since_save + self.under_way


@dataclass(frozen=True, slots=True)
class Choice:
    """What `best_setting` chooses.

    Attributes:
        timing: N*, p, b and their T_w.
        interval: f*, with the loss of every save.
        equation_3: f* by Eq. (3) alone.
    """

    timing: Timing
    interval: int
    equation_3: int


def slowdown(timing: Timing, interval: int, iteration: float) -> float:
    """Seconds of a long run with a save every `interval` iterations, over those without any (1: no slower).

    A save begins when training has come to it and a place is free: runtime_2 of §3.4 for a long run, where
    max(T_w, N f t) takes the loss, too.
    """
    return max(timing.per_save, timing.loss + interval * iteration) / (interval * iteration)


def equation_3(timing: Timing, iteration: float, tolerated: float) -> int:
    """f* = ceil(T_w / (N q t)): the least interval at which waiting for a place slows training by at most q."""
    _positive(iteration=iteration)
    return max(1, _ceiling(timing.per_save / (tolerated * iteration)))


def least_interval(timing: Timing, iteration: float, tolerated: float) -> int:
    """The least interval whose `slowdown` is at most `tolerated`: Eq. (3), or more where the loss needs it.

    Raises:
        UsageError: `iteration` is not above 0, or `tolerated` not above 1.
    """
    if not tolerated > 1:
        raise UsageError(f"slowdown: {tolerated:g}, more than 1 is needed")
    _positive(iteration=iteration)
    return max(1, _ceiling(least_seconds(timing, tolerated) / iteration))


def least_seconds(timing: Timing, tolerated: float) -> float:
    """What `least_interval` is the next whole number of iterations of, in seconds of training."""
    return max(timing.per_save / tolerated, timing.loss / (tolerated - 1))


def recovery_bound(timing: Timing, interval: int, iteration: float, load: float) -> Recovery:
    """Eq. (4): at most l + f t + min(N f t, T_w) are lost."""
    between = interval * iteration
    return Recovery(load, between, min(timing.setting.in_flight * between, timing.write))


def host_bytes(state_bytes: int, setting: Setting, memory: int | None = None) -> int:
    """Host memory that a writer of plain fulls may hold.

    Args:
        memory: its ``memory``; None: a copy of the state for each save in flight. Staging blocks come on top.
    """
    copies = setting.in_flight * state_bytes
    return (copies if memory is None else min(copies, memory)) + setting.staging_bytes


def writer_memory(state_bytes: int, setting: Setting, limits: Limits) -> int | None:
    """What the writer has to be given as ``memory`` for M; None: nothing, N copies and the staging are within M.

    Raises:
        UsageError: M is less than any writer can do with.
    """
    if limits.memory is None or setting.in_flight * state_bytes + setting.staging_bytes <= limits.memory:
        return None
    room = limits.memory - setting.staging_bytes
    from ckptstore.host.arenas import LEAST  # imports numpy, which a model alone needs not

    if room < LEAST:
        needed = min(state_bytes, LEAST) + setting.staging_bytes
        raise UsageError(f"memory: {limits.memory} bytes; one save of this state needs {needed}")
    return room


def most_in_flight(state_bytes: int, staging_bytes: int, limits: Limits) -> int:
    """The most saves in flight under M and S (N <= S/m - 1: what is being written, and one that is complete).

    With an M below one copy it is one, which the loop waits for as it is written (`writer_memory`).

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
    """N*, p and b: those that the limits allow with which saves can come most often.

    Without a loss that is the least T_w / N, as in the paper. Among what is as good (within `TOLERANCE`, or with an
    interval as short), the setting with the fewest saves in flight wins: every one of them is a copy of the state in
    memory, and T_w grows with N, which `recovery_bound` is charged with; then the least T_w, then the fewest threads.

    Raises:
        UsageError: the limits allow none of them.
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
    """Whether M and S allow a setting."""
    try:
        return setting.in_flight <= most_in_flight(state_bytes, setting.staging_bytes, limits)
    except UsageError:  # with so much staging; less may do
        return False


def _ceiling(value: float) -> int:
    """The next whole number, where what only rounding has put above one counts as that one."""
    return math.ceil(value * (1 - _ROUNDING))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name}: {value:g}, more than 0 is needed")
