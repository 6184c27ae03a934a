"""Choose the pairs of checkpoints to compare: each measured step with the previous one, and pairs for every gap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ckptstore.errors import UsageError

__all__ = ["ComparisonPlan", "Target", "plan_targets", "spacing"]

POINTS: Final = 12
"""Default number of steps to measure."""
GAPS: Final = 7
"""Default number of gaps to measure."""
PAIRS: Final = 4
"""Pairs of checkpoints that are measured for each gap."""
_ROUND: Final = (1, 10, 100, 1000, 2, 4, 8, 16, 32, 64, 128, 256, 512, 5, 20, 50, 200, 500)
"""Round numbers, preferred as gaps where the choice is free."""
_ALIKE: Final = 16
"""Gaps that differ by at most 1/16 count as one, because few gaps of an uneven series are equal."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint to measure.

    Attributes:
        index: its position in the series.
        bases: (position of an earlier checkpoint, gap in units of `spacing`), each position at most once.
    """

    index: int
    bases: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """The comparisons: `targets` ascending; `gaps` are those to study, each at several targets where possible."""

    targets: tuple[Target, ...]
    gaps: tuple[int, ...]

    @property
    def needed(self) -> list[int]:
        """Positions of all checkpoints to read, ascending."""
        return sorted({one for target in self.targets for one in (target.index, *(base for base, _ in target.bases))})


def spacing(steps: Sequence[int]) -> int:
    """Steps from one checkpoint to the next: the minimum difference."""
    return max(1, min((b - a for a, b in pairwise(steps)), default=1))


def plan_targets(steps: Sequence[int], gaps: Sequence[int] = (), points: int | None = POINTS) -> ComparisonPlan:
    """Choose what to compare.

    Args:
        steps: steps of the series, ascending.
        gaps: gaps to measure, in checkpoints (multiples of `spacing`); empty: up to seven of the existing gaps.
        points: number of steps to measure, evenly spread; None: all. If it is below `POINTS`, the gaps use only these
            steps: each gap is measured at those that have a base for it, or else at one more step.

    Raises:
        UsageError: no two checkpoints have a requested gap.
    """
    unit, count = spacing(steps), len(steps)
    pairs: dict[int, list[tuple[int, int]]] = {}  # gap -> (target, base)
    for target in range(1, count):
        for base in range(target):
            pairs.setdefault(max(1, round((steps[target] - steps[base]) / unit)), []).append((target, base))
    if missing := [gap for gap in gaps if gap not in pairs]:
        known = ", ".join(map(str, sorted(pairs)[:12]))
        raise UsageError(f"no two checkpoints are {missing[0]} apart (in units of {unit} steps); there are {known}")
    even = len({b - a for a, b in pairwise(steps)}) == 1
    chosen = sorted(set(gaps)) or _choose_gaps(pairs, even)
    wanted: dict[int, dict[int, int]] = {index: {} for index in _spread(list(range(count)), points)}
    for index in wanted:
        if index:
            gap = max(1, round((steps[index] - steps[index - 1]) / unit))
            wanted[index][index - 1] = gap if even else next((one for one in chosen if _alike(gap, one)), gap)
    if not even:
        pairs = {gap: _pairs(pairs, gap) for gap in chosen}
    complete = _complete(pairs, chosen)
    for gap in chosen:
        of_gap = dict(pairs[gap])  # for each target the pair nearest to the gap
        candidates = [target for target in sorted(of_gap) if target in complete] or sorted(of_gap)
        count = PAIRS
        if points is not None and points < POINTS:
            asked = [target for target in candidates if target in wanted] or [one for one in of_gap if one in wanted]
            candidates, count = sorted(asked) or candidates, PAIRS if asked else 1
        for target in _spread(candidates, count):
            wanted.setdefault(target, {})[of_gap[target]] = gap
    targets = [Target(index, tuple(sorted(wanted[index].items(), reverse=True))) for index in sorted(wanted)]
    return ComparisonPlan(tuple(targets), tuple(chosen))


def _alike(gap: int, other: int) -> bool:
    return _ALIKE * abs(gap - other) <= other


def _pairs(pairs: dict[int, list[tuple[int, int]]], gap: int) -> list[tuple[int, int]]:
    """The pairs of a gap, preceded by those of similar gaps, the least similar first."""
    alike = sorted((one for one in pairs if _alike(one, gap)), key=lambda one: (-abs(one - gap), one))
    return [pair for one in alike for pair in pairs[one]]


def _complete(pairs: dict[int, list[tuple[int, int]]], gaps: Sequence[int]) -> set[int]:
    """Targets with a base at every gap. Comparing gaps at the same targets excludes the effect of training progress."""
    found = [{target for target, _ in pairs[gap]} for gap in gaps]
    return set.intersection(*found) if found else set()


def _choose_gaps(pairs: dict[int, list[tuple[int, int]]], even: bool) -> list[int]:
    """Choose one gap per octave: the one with most pairs, then the roundest."""
    every = sorted(gap for gap, members in pairs.items() for _ in members)
    octaves: dict[int, list[int]] = {}
    for gap in pairs:
        octaves.setdefault(gap.bit_length(), []).append(gap)

    def preference(gap: int) -> tuple[int, int, int]:
        reach = 0 if even else gap // _ALIKE
        count = bisect_right(every, gap + reach) - bisect_left(every, gap - reach)
        return (-count, _ROUND.index(gap) if gap in _ROUND else len(_ROUND), gap)

    best = sorted(min(members, key=preference) for members in octaves.values())
    return _spread(best, GAPS)


def _spread(members: Sequence[int], count: int | None) -> list[int]:
    """`count` of the members, evenly spread, including the first and the last."""
    if count is None or len(members) <= count:
        return list(members)
    if count == 1:
        return [members[-1]]
    return [members[round(position * (len(members) - 1) / (count - 1))] for position in range(count)]
