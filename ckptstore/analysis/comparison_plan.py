"""Which pairs of checkpoints are compared: each measured step with the one before, and some over every gap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ckptstore.errors import UsageError

__all__ = ["Plan", "Target", "plan_targets", "spacing"]

POINTS: Final = 12
"""Steps measured by default."""
GAPS: Final = 7
"""Gaps measured by default."""
PAIRS: Final = 4
"""Pairs of checkpoints measured for each gap."""
_ROUND: Final = (1, 10, 100, 1000, 2, 4, 8, 16, 32, 64, 128, 256, 512, 5, 20, 50, 200, 500)
"""Gaps that people prefer to read, where a choice is free."""
_ALIKE: Final = 16
"""Gaps that differ by no more than this part of themselves count as one: in an uneven series few are the same."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint to measure.

    Attributes:
        index: its position in the series.
        bases: (position of an earlier checkpoint, gap in units of `spacing`), each at most once.
    """

    index: int
    bases: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared: `targets` ascending; `gaps` are those under study, each at several targets if there are."""

    targets: tuple[Target, ...]
    gaps: tuple[int, ...]

    @property
    def needed(self) -> list[int]:
        """Positions of all checkpoints that are read, ascending."""
        return sorted({one for target in self.targets for one in (target.index, *(base for base, _ in target.bases))})


def spacing(steps: Sequence[int]) -> int:
    """Steps from one checkpoint to the next: the smallest difference there is."""
    return max(1, min((b - a for a, b in pairwise(steps)), default=1))


def plan_targets(steps: Sequence[int], gaps: Sequence[int] = (), points: int | None = POINTS) -> Plan:
    """Choose what to compare.

    Args:
        steps: of the series, ascending.
        gaps: to measure, in checkpoints (multiples of `spacing`); none: up to seven, chosen among those there are.
        points: how many steps to measure, spread evenly; None for all. Of fewer than `POINTS` no others are measured
            for the gaps: each gap at those of them that have a base there, and else at one more.

    Raises:
        UsageError: a gap that no two checkpoints have.
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
        of_gap = dict(pairs[gap])  # the nearest to the gap, where several are alike
        candidates = [target for target in sorted(of_gap) if target in complete] or sorted(of_gap)
        count = PAIRS
        if points is not None and points < POINTS:
            asked = [target for target in candidates if target in wanted] or [one for one in of_gap if one in wanted]
            candidates, count = sorted(asked) or candidates, PAIRS if asked else 1
        for target in _spread(candidates, count):
            wanted.setdefault(target, {})[of_gap[target]] = gap
    targets = [Target(index, tuple(sorted(wanted[index].items(), reverse=True))) for index in sorted(wanted)]
    return Plan(tuple(targets), tuple(chosen))


def _alike(gap: int, other: int) -> bool:
    return _ALIKE * abs(gap - other) <= other


def _pairs(pairs: dict[int, list[tuple[int, int]]], gap: int) -> list[tuple[int, int]]:
    """The pairs of a gap, and before them those of gaps like it, the least like it first."""
    alike = sorted((one for one in pairs if _alike(one, gap)), key=lambda one: (-abs(one - gap), one))
    return [pair for one in alike for pair in pairs[one]]


def _complete(pairs: dict[int, list[tuple[int, int]]], gaps: Sequence[int]) -> set[int]:
    """Targets with a base at every gap: comparing gaps at the same targets keeps the phase of training out of it."""
    found = [{target for target, _ in pairs[gap]} for gap in gaps]
    return set.intersection(*found) if found else set()


def _choose_gaps(pairs: dict[int, list[tuple[int, int]]], even: bool) -> list[int]:
    """One gap of each octave: the one with most pairs, then the roundest."""
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
    """`count` of the members, evenly spread, the first and the last among them."""
    if count is None or len(members) <= count:
        return list(members)
    if count == 1:
        return [members[-1]]
    return [members[round(position * (len(members) - 1) / (count - 1))] for position in range(count)]
