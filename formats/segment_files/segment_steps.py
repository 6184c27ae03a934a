"""Describe each step of a segment: its checkpoint, how it is encoded, and its base.

The description is stored as columns beside the document's ``steps``. With them the log can be rebuilt from segments: a
COMMIT from its encodings, their bases and the segments that each reads, and the OPEN of a term from ``parents``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ckptstore.formats.history.members import Members, hexadecimal, is_term, is_time, natural
from ckptstore.formats.history.records import CheckpointId

__all__ = ["Ranks", "SegmentPart", "StepEncoding", "read_parents", "read_ranks", "read_steps", "step_columns"]

_NO_BASE: Final = object()


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The position of one segment among several that an encoding reads.

    Attributes:
        first: uuid of the encoding's first segment. It distinguishes encodings of the same checkpoint.
        number: index of this segment, from 0.
        count: number of segments, at least 2.
    """

    first: str
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class StepEncoding:
    """An encoding of one checkpoint, as described by the segment that holds it.

    Attributes:
        term: the checkpoint's term. The term of a merged segment may be later.
        kind: ``full``, ``delta``, ``gradient``, or a kind that a later version adds.
        base: the checkpoint that it builds on; None: it has no base.
        time: when the checkpoint was made, in seconds since 1970 UTC.
        lossy: some tensor is not bit for bit what training had (the user asked for this).
        part: which part of the encoding this segment holds; None: all of it.
    """

    term: int
    kind: str
    base: CheckpointId | None = None
    time: float = 0.0
    lossy: bool = False
    part: SegmentPart | None = None


class Ranks(NamedTuple):
    """The members ``rank`` and ``ranks`` of a segment that many ranks saved.

    Attributes:
        rank: step -> the rank that wrote the segment.
        ranks: step -> number of segments of each rank. Only the segment that holds the tree has it.
    """

    rank: Mapping[int, int]
    ranks: Mapping[int, tuple[int, ...]]


def step_columns(encodings: Mapping[int, StepEncoding]) -> dict[str, Any]:
    """Return the members ``steps`` to ``parts`` of a document."""
    rows = encodings.values()
    return {
        "steps": list(encodings),
        "terms": [row.term for row in rows],
        "kinds": [row.kind for row in rows],
        "times": [row.time for row in rows],
        "bases": [None if row.base is None else list(row.base) for row in rows],
        "lossy": [step for step, row in encodings.items() if row.lossy],
        "parts": [
            [step, row.part.first, row.part.number, row.part.count]
            for step, row in encodings.items()
            if row.part is not None
        ],
    }


def read_steps(members: Members) -> dict[int, StepEncoding]:
    """Remove from `members` what `step_columns` wrote, and return it by step.

    Raises:
        FormatError: a member is invalid, or the steps do not ascend.
    """
    steps = members.items("steps", lambda step: step if natural(step) else None, "steps")
    if not steps or any(left >= right for left, right in pairwise(steps)):
        members.refuse("steps", "a list of ascending steps")
    terms = members.items("terms", lambda term: term if is_term(term) else None, "terms")
    kinds = members.names("kinds")
    times = members.items("times", lambda time: float(time) if is_time(time) else None, "numbers of seconds")
    bases = members.items("bases", _base, "[term, step, state] or null")
    for name, column in (("terms", terms), ("kinds", kinds), ("times", times), ("bases", bases)):
        if len(column) != len(steps):
            members.refuse(name, f"a list of {len(steps)}, one for each step")
    lossy = members.items("lossy", lambda step: step if natural(step) else None, "steps")
    _check_steps(members, "lossy", lossy, steps)
    rows = members.items("parts", _part, "[step, segment, number, count]")
    _check_steps(members, "parts", [step for step, _ in rows], steps)
    parts, marked = dict(rows), frozenset(lossy)
    found = {}
    for step, term, kind, time, base in zip(steps, terms, kinds, times, bases, strict=True):
        below = base if isinstance(base, CheckpointId) else None
        found[step] = StepEncoding(term, kind, below, time, step in marked, parts.get(step))
    return found


def read_parents(members: Members) -> dict[int, CheckpointId | None]:
    """Remove ``parents`` and return it: term -> the checkpoint the term continues from. Raises `FormatError`."""
    rows = members.items("parents", _parent, "[term, null or [term, step, state]]")
    if any(left[0] >= right[0] for left, right in pairwise(rows)):
        members.refuse("parents", "a list of ascending terms")
    return dict(rows)


def read_ranks(extra: Mapping[str, Any], steps: Sequence[int], where: str) -> Ranks:
    """Return ``rank`` and ``ranks`` of a segment that many ranks saved. They stay in `extra`.

    Raises:
        FormatError: a member is invalid.
    """
    members = Members(dict(extra), where)
    rank = members.items("rank", lambda row: _step_row(row, natural), "[step, rank]")
    ranks = members.items("ranks", lambda row: _step_row(row, _counts), "[step, [number, ...]]")
    for name, rows in (("rank", rank), ("ranks", ranks)):
        _check_steps(members, name, [step for step, _ in rows], steps)
    return Ranks(dict(rank), {step: tuple(counts) for step, counts in ranks})


def _step_row(row: Any, check: Callable[[Any], bool]) -> tuple[int, Any] | None:
    return (row[0], row[1]) if type(row) is list and len(row) == 2 and natural(row[0]) and check(row[1]) else None


def _counts(value: Any) -> bool:
    return type(value) is list and all(map(natural, value))


def _check_steps(members: Members, name: str, found: Sequence[int], steps: Sequence[int]) -> None:
    if any(left >= right for left, right in pairwise(found)) or not set(found) <= set(steps):
        members.refuse(name, "a list of the segment's steps, ascending")


def _base(value: Any) -> CheckpointId | object | None:
    """Parse a base: `_NO_BASE` for null, None if `value` is invalid."""
    if value is None:
        return _NO_BASE
    if type(value) is not list or len(value) != 3 or not hexadecimal(value[2]):
        return None
    return CheckpointId(*value) if is_term(value[0]) and natural(value[1]) else None


def _parent(value: Any) -> tuple[int, CheckpointId | None] | None:
    if type(value) is not list or len(value) != 2 or not is_term(value[0]):
        return None
    parent = _base(value[1])
    if parent is None:
        return None
    below = parent if isinstance(parent, CheckpointId) else None
    return None if below is not None and below.term >= value[0] else (value[0], below)


def _part(value: Any) -> tuple[int, SegmentPart] | None:
    if type(value) is not list or len(value) != 4 or not natural(value[0]) or not hexadecimal(value[1]):
        return None
    number, count = value[2:]
    if not natural(number) or not natural(count) or count < 2 or number >= count:
        return None
    return value[0], SegmentPart(value[1], number, count)
