"""Chooses the base of each delta, and when to write a full: the dynamic interval of the XOR-delta paper.

Between two fulls, checkpoints are numbered k = 1, 2, ... With interval T the base of checkpoint k is

- ``anchor``: checkpoint T*floor((k-1)/T): one earlier state in memory, gaps from 1 to T;
- ``paper``: checkpoint k-T (as in the paper): T states in memory, every gap is T.

Either way, restoring k reads ceil(k/T) deltas. A larger T makes deltas larger (their gap grows) and chains shorter. The
user sets a bound on the cost of a chain, so a larger T also makes fulls rarer. `Schedule` measures the sizes of deltas
by gap during training, and chooses the T with the fewest bytes per checkpoint within the bound.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ckptstore.errors import UsageError
from ckptstore.host.option_checks import real, whole

__all__ = [
    "DEPTH_LIMIT",
    "FULL",
    "Candidate",
    "Decision",
    "DeltaSizes",
    "RestoreBound",
    "Schedule",
    "best_interval",
    "candidates",
]

DEPTH_LIMIT: Final = 50
"""The most deltas in a chain, the same limit as in git."""
CANDIDATES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_ENOUGH: Final = 0.001
"""A longer interval must save at least this share of the bytes of a shorter one."""
_PRIOR_SLOPE: Final = 0.03
"""Growth of a delta per doubling of its gap, as a share of the state, before it is measured (0.94 of 32 bits)."""
_WEIGHT: Final = 0.3
_TRY_AGAIN: Final = 16
"""After so many fulls in a row, because deltas did not pay, a delta is tried again: training may have settled."""

Form = Literal["anchor", "paper"]


@dataclass(frozen=True, slots=True)
class RestoreBound:
    """The limit on the cost of restoring any checkpoint.

    Attributes:
        times: bytes read, as a multiple of the stored bytes of a full; None: no such bound.
        nbytes: bytes read; None: no such bound.
        seconds: time to read and decode; None: no such bound.
        depth: deltas in the chain.
    """

    times: float | None = 4.0
    nbytes: int | None = None
    seconds: float | None = None
    depth: int = DEPTH_LIMIT

    def __post_init__(self) -> None:
        for name in ("times", "nbytes", "seconds"):
            if (value := getattr(self, name)) is not None:
                real(f"RestoreBound: {name}", value, above=True)
        whole("RestoreBound: depth", self.depth, 0)

    @classmethod
    def parse(cls, text: str) -> RestoreBound:
        """Parse ``3x`` (of a full), ``2GB`` (also KB, MB, KiB ...), ``30s`` or ``none``, or several joined by commas.

        Raises:
            UsageError: the text is none of these.
        """
        times: float | None = None
        nbytes: int | None = None
        seconds: float | None = None
        units = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
        units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
        for part in text.lower().replace(" ", "").split(","):
            number = part.rstrip("abcdefghijklmnopqrstuvwxyz")
            unit = part[len(number) :]
            try:
                value = math.inf if part == "none" else float(number)
            except ValueError:
                value = math.nan
            if part != "none" and not 0 < value < math.inf:
                raise UsageError(f"restore cost {text!r}: give 3x (times a full), 2GB, 30s, or none")
            if part == "none":
                continue
            if unit == "x":
                times = value
            elif unit == "s":
                seconds = value
            elif unit in units:
                nbytes = int(value * units[unit])
            else:
                raise UsageError(f"restore cost {text!r}: give 3x (times a full), 2GB, 30s, or none")
        return cls(times, nbytes, seconds)

    def limit(self, full: float, rate: float | None) -> float:
        """The bound in bytes read, for fulls of `full` bytes and a restore at `rate` bytes per second."""
        bounds = [math.inf]
        if self.times is not None:
            bounds.append(self.times * full)
        if self.nbytes is not None:
            bounds.append(float(self.nbytes))
        if self.seconds is not None and rate:
            bounds.append(self.seconds * rate)
        return min(bounds)


@dataclass(slots=True)
class DeltaSizes:
    """The expected bytes of a delta by its gap, learned from the deltas written.

    Between measured gaps, sizes are interpolated over log2(gap). Beyond them, the slope of the last octave continues.
    """

    full: float
    sizes: dict[int, float] = field(default_factory=dict)

    def observe(self, gap: int, nbytes: float) -> None:
        """Learn that a delta over `gap` checkpoints took `nbytes`. Other gaps follow a little: training drifts."""
        if gap > CANDIDATES[-1]:
            gap = 1 << (gap.bit_length() - 1)  # Prevents: as many known gaps as the run has checkpoints.
        before = self.sizes.get(gap)
        if before is None:
            self.sizes[gap] = nbytes
            return
        drift = (nbytes / before) ** _WEIGHT
        for other in self.sizes:
            self.sizes[other] *= drift

    def expect(self, gap: int) -> float:
        """The expected bytes of a delta over `gap` checkpoints."""
        return self.expect_all([gap])[0]

    def expect_all(self, gaps: Sequence[int]) -> list[float]:
        """The expected bytes of a delta over each of `gaps`."""
        known = sorted(self.sizes)
        if not known:
            return [0.7 * self.full] * len(gaps)
        last, at_last = known[-1], self.sizes[known[-1]]
        slope = _PRIOR_SLOPE * self.full
        if older := bisect_right(known, last / 2):
            gap_older = known[older - 1]
            slope = max(0.0, (at_last - self.sizes[gap_older]) / math.log2(last / gap_older))
        found = []
        for gap in gaps:
            at = self.sizes.get(gap)
            if at is None and gap > last:
                at = min(self.full, at_last + slope * math.log2(gap / last))
            elif at is None:
                place = bisect_right(known, gap)
                low, high = known[max(place - 1, 0)], known[place]
                # Smaller than every measured gap: no larger than the delta of the nearest gap.
                share = math.log2(gap / low) / math.log2(high / low) if place else 0.0
                at = self.sizes[low] + share * (self.sizes[high] - self.sizes[low])
            found.append(at)
        return found


@dataclass(frozen=True, slots=True)
class Candidate:
    """An interval that may be chosen, with its cost.

    Attributes:
        interval: T: checkpoints that share a base; 0 for fulls only.
        deltas: the longest chain between two fulls within the limit.
        mean: expected bytes per checkpoint, over fulls and deltas.
        restore: bytes that the most expensive restore reads.
    """

    interval: int
    deltas: int
    mean: float
    restore: float


def candidates(
    sizes: DeltaSizes, limit: float, depth: int = DEPTH_LIMIT, form: Form = "anchor"
) -> tuple[Candidate, ...]:
    """Fulls only, and every interval whose chains stay within `limit` bytes, ascending.

    With D deltas in a chain, D*T checkpoints follow a full, so a checkpoint costs
    (full + D * sum over a cycle of its deltas) / (D*T + 1). The largest delta of a cycle is not always its last.
    """
    found = [Candidate(0, 0, sizes.full, sizes.full)]
    expected = sizes.expect_all(range(1, CANDIDATES[-1] + 1))
    for interval in CANDIDATES:
        cycle = expected[:interval] if form == "anchor" else [expected[interval - 1]] * interval
        longest = max(cycle)
        fits = depth if limit == math.inf else min(depth, int((limit - sizes.full) / max(longest, 1.0)))
        if fits >= 1:
            mean = (sizes.full + fits * sum(cycle)) / (fits * interval + 1)
            found.append(Candidate(interval, fits, mean, sizes.full + (fits - 1) * cycle[-1] + longest))
    return tuple(found)


def best_interval(sizes: DeltaSizes, limit: float, depth: int = DEPTH_LIMIT, form: Form = "anchor") -> int:
    """The T of the `candidates` with the fewest expected bytes per checkpoint; the smallest of nearly equal ones."""
    found = candidates(sizes, limit, depth, form)
    least = min(one.mean for one in found)
    return next(one.interval for one in found if one.mean * (1 - _ENOUGH) <= least)


@dataclass(frozen=True, slots=True)
class Decision:
    """How to store the next checkpoint.

    Attributes:
        base: number of the checkpoint to compress a delta against; None: write a full.
        gap: checkpoints between the two.
        keep: whether its state may be the base of later ones, and must stay in memory.
        forget: numbers of checkpoints that are no longer bases once this one is written.
    """

    base: int | None
    gap: int
    keep: bool
    forget: tuple[int, ...]


FULL: Final = Decision(None, 0, False, ())
"""A full that is not a base."""


@dataclass(slots=True)
class Schedule:
    """Decides for one term, one checkpoint at a time: `decide`, write, `written`. A failed write changes nothing.

    Attributes:
        interval: T, or ``auto``.
        form: ``anchor`` or ``paper``.
        bound: the limit on the cost of a restore.
        rate: bytes per second of a restore, for a bound in seconds; measured by the writer.
    """

    interval: int | Literal["auto"] = "auto"
    form: Form = "anchor"
    bound: RestoreBound = field(default_factory=RestoreBound)
    rate: float | None = None
    current: int = 0
    _sizes: DeltaSizes | None = None
    _number: int = 0
    _anchor: int = 0
    _fulls: int = 0  # in a row
    _costs: dict[int, tuple[float, int]] = field(default_factory=dict)  # number -> bytes and deltas of its chain

    def __post_init__(self) -> None:
        if self.interval != "auto" and (type(self.interval) is not int or self.interval < 1):
            raise UsageError(f"interval {self.interval!r}: a whole number of at least 1, or 'auto'")
        if self.form not in ("anchor", "paper"):
            raise UsageError(f"form {self.form!r}: 'anchor' or 'paper'")
        self.current = 4 if self.interval == "auto" else self.interval

    @property
    def sizes(self) -> DeltaSizes | None:
        """The learned sizes of deltas; None before the first full."""
        return self._sizes

    def decide(self) -> Decision:
        """How to store the next checkpoint."""
        full = Decision(None, 0, True, tuple(self._costs))
        sizes = self._sizes
        if sizes is None or not self._costs:
            return full
        limit = self.bound.limit(sizes.full, self.rate)
        since = self._number - self._anchor  # checkpoints written after the anchor
        if self.form == "anchor" and since == self.current:
            self._begin_cycle(sizes, limit)
            since = 0
        base = self._anchor if self.form == "anchor" else max(0, self._number + 1 - self.current)
        if base not in self._costs:
            base = self._anchor
        gap = self._number + 1 - base
        cost, depth = self._costs[base]
        expected = sizes.expect(gap)
        if depth >= self.bound.depth or cost + expected > limit:
            return full
        if not self.current or expected >= 0.98 * sizes.full:
            # A trial is not a base, and its own base is dropped, so a full follows and the interval is chosen again.
            return Decision(base, gap, False, tuple(self._costs)) if self._trial else full
        if self.form == "anchor":
            keep = since + 1 == self.current  # the last of a cycle is the anchor of the next, and replaces this anchor
            return Decision(base, gap, keep, tuple(self._costs) if keep else ())
        oldest = self._number + 2 - self.current  # the base of the next checkpoint
        return Decision(base, gap, True, tuple(number for number in self._costs if number < oldest))

    def expected(self, gap: int) -> float:
        """The expected size of a delta over `gap` checkpoints, as a fraction of a full."""
        sizes = self._sizes
        return 1.0 if sizes is None or not sizes.full else sizes.expect(gap) / sizes.full

    @property
    def _trial(self) -> bool:
        return self._fulls >= _TRY_AGAIN

    def restart(self) -> None:
        """Drop all bases: the next checkpoint is a full. The learned sizes stay."""
        self._costs = {}
        self._number = self._anchor = 0

    def _begin_cycle(self, sizes: DeltaSizes, limit: float) -> None:
        """Make the last checkpoint of a cycle the anchor of the next one, and choose the next length."""
        self._anchor = self._number
        if self.interval == "auto":
            self.current = best_interval(sizes, limit, self.bound.depth, self.form)

    def written(self, decision: Decision, nbytes: int) -> int:
        """Learn from a checkpoint that was committed with `nbytes` stored -> its number."""
        if decision.base is None:
            self._number = self._anchor = 0
            self._fulls += 1
            self._costs = {0: (float(nbytes), 0)}
            if self._sizes is None:
                self._sizes = DeltaSizes(float(nbytes))
            else:
                self._sizes.full = float(nbytes)
            if self.interval == "auto" and self._sizes.sizes:
                limit = self.bound.limit(float(nbytes), self.rate)
                self.current = best_interval(self._sizes, limit, self.bound.depth, self.form)
            return 0
        assert self._sizes is not None
        self._sizes.observe(decision.gap, float(nbytes))
        self._number += 1
        cost, depth = self._costs[decision.base]
        self._costs[self._number] = (cost + nbytes, depth + 1)
        for number in decision.forget:
            self._costs.pop(number, None)
        if not decision.keep:
            del self._costs[self._number]
        self._fulls = 0
        return self._number
