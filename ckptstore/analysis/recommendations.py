"""Derive recommendations from measurements: a codec for each group, an interval, and when compressing saves time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.analysis.measurement import MethodMeasurement
from ckptstore.analysis.methods import COMPARED, DELTAS
from ckptstore.analysis.sampling import Estimate, SampleGroup
from ckptstore.errors import UsageError
from ckptstore.formats import codecs
from ckptstore.write.policy.delta_interval import DeltaSizes, RestoreBound, best_interval, candidates

__all__ = [
    "Advice",
    "GroupAdvice",
    "IntervalCost",
    "Shipping",
    "Summary",
    "advise",
    "interval_costs",
    "parse_link",
    "ship",
    "summarize",
]

STORED: Final = tuple(sorted(codecs.METHODS, key=lambda name: codecs.METHODS[name].rank))
"""Codecs that a store can hold, in order of preference at equal sizes: simpler and faster first."""
ENOUGH: Final = 0.01
"""Minimum share of the bytes that a codec must save compared with those before it in that list."""
SHIPPED: Final = ("raw", *COMPARED)


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one group at one gap: the mean over the measured steps.

    Attributes:
        group: position among the groups.
        gap: checkpoints to the base; None for a method without one.
        method: its name.
        estimate: mean stored fraction; the margin is the mean of the margins (every step uses the same blocks, so the
            errors are correlated).
        encode: logical bytes per second of one core; None for a bound.
        decode: as `encode`.
        pairs: number of measured steps.
        lowest, highest: the extremes of the stored fraction.
    """

    group: int
    gap: int | None
    method: str
    estimate: Estimate
    encode: float | None
    decode: float | None
    pairs: int
    lowest: float
    highest: float


def summarize(measurements: Iterable[MethodMeasurement]) -> list[Summary]:
    """Return the means by group, gap and method, in the order in which they were first measured."""
    cells: dict[tuple[int, int | None, str], list[MethodMeasurement]] = {}
    for one in measurements:
        cells.setdefault((one.group, one.gap, one.method), []).append(one)
    found = []
    for (group, gap, method), members in cells.items():
        fractions = [one.estimate.fraction for one in members]
        margins = [one.estimate.margin for one in members]
        known = [margin for margin in margins if margin is not None]
        found.append(
            Summary(
                group,
                gap,
                method,
                Estimate(_mean(fractions), _mean(known) if len(known) == len(margins) else None),
                _rate([(one.logical, one.encode) for one in members]),
                _rate([(one.logical, one.decode) for one in members]),
                len(members),
                min(fractions),
                max(fractions),
            )
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rate(parts: Sequence[tuple[int, float | None]]) -> float | None:
    seconds = math.fsum(nbytes / rate for nbytes, rate in parts if rate)
    return sum(nbytes for nbytes, rate in parts if rate) / seconds if seconds else None


@dataclass(frozen=True, slots=True)
class IntervalCost:
    """The cost of storing with one interval (form ``anchor`` of `ckptstore.write.policy.delta_interval`).

    Attributes:
        interval: T: checkpoints that share a base; 0 for fulls only.
        deltas: length of the longest chain between two fulls that keeps the restore bound.
        mean: expected bytes per checkpoint, over fulls and deltas.
        restore: bytes read by the most expensive restore.
        times: `restore` as a multiple of a full.
    """

    interval: int
    deltas: int
    mean: float
    restore: float
    times: float


@dataclass(frozen=True, slots=True)
class GroupAdvice:
    """The codec to use for one group at the recommended interval.

    Attributes:
        group: position among the groups.
        method: the codec.
        gap: the measured gap that is nearest to the interval's mean gap; None for a codec without a base.
        estimate: what it stores.
        cost: the best interval for this group alone, and its cost; 0 for a codec without a base.
    """

    group: int
    method: str
    gap: int | None
    estimate: Estimate
    cost: IntervalCost


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation.

    Attributes:
        best: the interval with the fewest bytes per checkpoint within the bound, and its cost.
        alternatives: every considered interval, ascending, fulls only (0) first.
        groups: the codec of each group.
        nbytes: logical bytes of a checkpoint.
        full: stored bytes of a full.
        margin: half the width of the 95 % confidence interval of `best.mean` in bytes; None if unknown.
        measured: the largest measured gap; larger gaps are extrapolated.
        encode, decode: logical bytes per second of one core with these codecs.
        limit: maximum bytes that a restore reads; infinite without a bound.
    """

    best: IntervalCost
    alternatives: tuple[IntervalCost, ...]
    groups: tuple[GroupAdvice, ...]
    nbytes: int
    full: float
    margin: float | None
    measured: int
    encode: float
    decode: float
    limit: float


def interval_costs(sizes: DeltaSizes, limit: float, depth: int) -> list[IntervalCost]:
    """The cost of fulls only, and of every interval among which `best_interval` chooses (`candidates`)."""
    return [
        IntervalCost(one.interval, one.deltas, one.mean, one.restore, one.restore / sizes.full if sizes.full else 1.0)
        for one in candidates(sizes, limit, depth)
    ]


def advise(
    groups: Sequence[SampleGroup],
    summaries: Sequence[Summary],
    gaps: Sequence[int],
    bound: RestoreBound,
    *,
    compress_fulls: bool = False,
) -> Advice:
    """Choose codecs and the interval.

    At every gap each group is stored by its smallest codec, as by a writer that chooses from samples. The sizes of
    whole deltas by gap determine the interval.

    Args:
        groups: the measured groups.
        summaries: result of `summarize`.
        gaps: the gaps from which the sizes of deltas are learned, ascending.
        bound: the maximum cost of a restore; a bound in seconds counts decoding by one core at the measured rates.
        compress_fulls: fulls are encoded, too; otherwise they are raw.
    """
    cells = {(one.group, one.gap, one.method): one for one in summaries}
    fulls = [_smallest(cells, number, None) if compress_fulls else None for number in range(len(groups))]
    full = [group.nbytes * (one.estimate.fraction if one else 1.0) for group, one in zip(groups, fulls, strict=True)]
    choices = {gap: [_smallest(cells, number, gap) for number in range(len(groups))] for gap in gaps}
    sizes = [
        DeltaSizes(full[number], {gap: group.nbytes * _fraction(choices[gap][number]) for gap in gaps})
        for number, group in enumerate(groups)
    ]
    whole = DeltaSizes(sum(full), {gap: sum(one.sizes[gap] for one in sizes) for gap in gaps})
    nbytes = sum(group.nbytes for group in groups)
    decode = _combined(groups, choices[gaps[0]], lambda one: one.decode)
    stored = whole.sizes[gaps[0]]
    limit = bound.limit(whole.full, decode * stored / nbytes)  # the bound is in stored bytes, rates are in logical ones
    costs = interval_costs(whole, limit, bound.depth)
    chosen = best_interval(whole, limit, bound.depth)
    best = next(one for one in costs if one.interval == chosen)
    middle = max(1.0, (best.interval + 1) / 2)
    near = min(gaps, key=lambda gap: abs(math.log2(gap / middle)))
    picked = choices[near]
    return Advice(
        best=best,
        alternatives=tuple(costs),
        groups=tuple(
            _group_advice(number, one, group.nbytes, size, limit * size.full / whole.full, bound.depth)
            for number, (group, one, size) in enumerate(zip(groups, picked, sizes, strict=True))
        ),
        nbytes=nbytes,
        full=whole.full,
        margin=_margin(groups, picked, best),
        measured=gaps[-1],
        encode=_combined(groups, picked, lambda one: one.encode),
        decode=_combined(groups, picked, lambda one: one.decode),
        limit=limit,
    )


def _margin(groups: Sequence[SampleGroup], picked: Sequence[Summary | None], best: IntervalCost) -> float | None:
    """See `Advice.margin`. Groups were sampled independently."""
    margins = [
        None if one is None or one.estimate.margin is None else group.nbytes * one.estimate.margin
        for group, one in zip(groups, picked, strict=True)
    ]
    known = [margin for margin in margins if margin is not None]
    share = best.deltas * best.interval / (best.deltas * best.interval + 1)  # share of deltas among the checkpoints
    return share * math.sqrt(math.fsum(margin**2 for margin in known)) if len(known) == len(margins) else None


def _group_advice(
    number: int, one: Summary | None, nbytes: int, sizes: DeltaSizes, limit: float, depth: int
) -> GroupAdvice:
    method, estimate = ("raw", Estimate(1.0, 0.0)) if one is None else (one.method, one.estimate)
    if one is None or method not in DELTAS:  # stored without a base every time: the interval has no effect
        stored = nbytes * estimate.fraction
        return GroupAdvice(number, method, None, estimate, IntervalCost(0, 0, stored, stored, 1.0))
    costs = interval_costs(sizes, limit, depth)
    chosen = best_interval(sizes, limit, depth)
    return GroupAdvice(number, method, one.gap, estimate, next(found for found in costs if found.interval == chosen))


def _fraction(one: Summary | None) -> float:
    return 1.0 if one is None else one.estimate.fraction


def _smallest(cells: Mapping[tuple[int, int | None, str], Summary], group: int, gap: int | None) -> Summary | None:
    """Choose the codec that stores a group at a gap: the first that is nearly the smallest; None for raw."""
    found = [cells.get((group, gap if method in DELTAS else None, method)) for method in STORED]
    usable = [one for one in found if one is not None]
    if not usable:
        return None
    least = min(one.estimate.fraction for one in usable)
    return next(one for one in usable if one.estimate.fraction <= least + ENOUGH * max(least, ENOUGH))


def _combined(
    groups: Sequence[SampleGroup], picked: Sequence[Summary | None], rate: Callable[[Summary], float | None]
) -> float:
    """Logical bytes per second of one core over all groups."""
    seconds = 0.0
    for group, one in zip(groups, picked, strict=True):
        speed = None if one is None else rate(one)
        seconds += group.nbytes / speed if speed else 0.0
    return sum(group.nbytes for group in groups) / seconds if seconds else math.inf


# shipping


@dataclass(frozen=True, slots=True)
class Shipping:
    """Sending one checkpoint over one link (the XOR paper's figures 4 and 5). Seconds.

    Attributes:
        link: bits per second.
        method: a method for all groups (groups to which it does not apply are sent raw), or ``recommended``.
        nbytes: bytes sent.
        encode: time to encode.
        send: time on the link.
        decode: time to decode at the other end.
    """

    link: float
    method: str
    nbytes: float
    encode: float
    send: float
    decode: float

    @property
    def serial(self) -> float:
        """Time to encode and then send."""
        return self.encode + self.send

    @property
    def overlapped(self) -> float:
        """Time when each chunk is sent while the next one is encoded: the slower of the two."""
        return max(self.encode, self.send)


def ship(
    groups: Sequence[SampleGroup], summaries: Sequence[Summary], advice: Advice, links: Sequence[float], cores: int = 1
) -> list[Shipping]:
    """Times of every method over every link, with deltas at the smallest measured gap.

    Args:
        links: bits per second.
        cores: number of cores that encode and decode, each at the rate of one core.
    """
    cells = {(one.group, one.gap, one.method): one for one in summaries}
    nearest = min(one.gap for one in summaries if one.gap is not None)
    found = []
    present = {one.method for one in summaries}
    for link in links:
        for method in [*(name for name in SHIPPED if name in present or name == "raw"), "recommended"]:
            nbytes = encode = decode = 0.0
            for number, group in enumerate(groups):
                name = advice.groups[number].method if method == "recommended" else method
                one = cells.get((number, nearest if name in DELTAS else None, name)) if name != "raw" else None
                nbytes += group.nbytes * _fraction(one)
                encode += group.nbytes / one.encode if one and one.encode else 0.0
                decode += group.nbytes / one.decode if one and one.decode else 0.0
            found.append(Shipping(link, method, nbytes, encode / cores, 8 * nbytes / link, decode / cores))
    return found


def parse_link(text: str) -> float:
    """``10Gbit``, ``10Gb/s``, ``100Mbps``, or ``1.2GB`` (bytes per second) -> bits per second. Raises `UsageError`."""
    match = re.fullmatch(r"([0-9.]+) *([kKmMgGtT]?)(bit|bits|bps|b|B)(/s)?", text.strip())
    try:
        speed = float(match[1]) if match else 0.0
    except ValueError:
        speed = 0.0
    if match is None or not 0 < speed < math.inf:
        raise UsageError(f"link speed {text!r}: write 10Gbit, 100Mbps, or 1.2GB for bytes per second")
    return speed * 1000.0 ** " kmgt".index(match[2].lower() or " ") * (8 if match[3] == "B" else 1)
