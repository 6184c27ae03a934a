"""What each retention rule keeps at present, updated with every new checkpoint."""

from __future__ import annotations

import heapq
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Literal

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.columns import TIME
from ckptstore.formats.history.members import MAX_INT
from ckptstore.formats.history.records import CheckpointEntry, Node
from ckptstore.formats.history.rule_rankings import line, metric_in
from ckptstore.formats.history.space_limits import space_limit

__all__ = [
    "MAX_RULE",
    "RULES",
    "CheckpointColumns",
    "Ends",
    "RuleKind",
    "RuleWindow",
    "ends",
    "kind_of",
    "parts_of_best",
    "window_of",
]

MAX_RULE: Final = 200
"""Maximum length of a rule in letters."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class CheckpointColumns:
    """All checkpoints of a catalog, as columns: a rule that checks all of them creates no object for each.

    Attributes:
        newest: the newest checkpoint; None: there is none.
        nodes: (term, step) of all checkpoints, ascending.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.newest = catalog.latest()
        self.nodes = list(catalog.checkpoints)
        self._table = catalog.checkpoints
        self._on_line = line(catalog)

    @cached_property
    def on_line(self) -> list[Node]:
        """The checkpoints on the line of the newest term."""
        return list(filter(self._on_line, self.nodes))

    @cached_property
    def extras(self) -> Mapping[Node, Mapping[str, Any]]:
        """Extra members (metadata, for example) of the checkpoints that have any."""
        return self._table.extras()

    @cached_property
    def times(self) -> list[float]:
        """The times of the checkpoints, in the order of `nodes`."""
        return list(self._table.column(TIME, lambda entry: entry.time))


class RuleWindow(ABC):
    """The checkpoints that one rule keeps at present.

    Followed save by save, it keeps what `begin` keeps of the same checkpoints. What it has released never comes back.
    """

    @abstractmethod
    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        """Start with all checkpoints of a catalog and return those that the rule keeps; None: every one."""

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:  # noqa: ARG002  # some rules need neither
        """Add a checkpoint. Return those that the rule no longer keeps because of it."""
        return ()

    def expire(self, newest: CheckpointEntry) -> Iterable[Node]:  # noqa: ARG002
        """Return the checkpoints that the rule no longer keeps because `newest` is now the newest one."""
        return ()

    def restart(self, entries: Iterable[CheckpointEntry]) -> None:  # noqa: B027  # only rules of age need it
        """Start again because the newest checkpoint is older than the previous one: released ones may be kept again."""

    def for_good(self, step: int) -> bool:  # noqa: ARG002  # most windows move on
        """Whether the rule keeps every checkpoint of this step for good, whatever is saved after it."""
        return False

    @abstractmethod
    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:
        """Whether the rule keeps a checkpoint that was added before."""


class _Highest(RuleWindow):
    """``last:N`` and the ranking of ``best:NAME:N``: the N highest of the line. If two are equal, the newer is kept."""

    def __init__(self, count: int, value: Callable[[int, Mapping[str, Any]], float | None]) -> None:
        """
        Args:
            value: (step, extra members) -> the number that ranks the checkpoint; None: it has no such number.
        """
        self._count = count
        self._value = value
        self._ranks: list[tuple[float, int, int]] = []
        self._kept: set[Node] = set()

    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        nothing: Mapping[str, Any] = {}
        ranked = (
            (value, step, term)
            for term, step in found.on_line
            if (value := self._value(step, found.extras.get((term, step), nothing))) is not None
        )
        self._ranks = sorted(heapq.nlargest(self._count, ranked))
        self._kept = {(term, step) for _, step, term in self._ranks}
        return self._kept

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:
        value = self._value(entry.step, entry.extra) if on_line else None
        if value is None:
            return ()
        insort(self._ranks, (value, entry.step, entry.term))
        self._kept.add(entry.node)
        if len(self._ranks) <= self._count:
            return ()
        _, step, term = self._ranks.pop(0)
        self._kept.remove((term, step))
        return ((term, step),)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002  # only those of the line are in it
        return entry.node in self._kept


class _BestOf(_Highest):
    """``best:NAME:N``. It keeps everything while no checkpoint of the line has a number of this name.

    So a metric that is reported late, or is named differently, does not cost the earlier checkpoints.
    """

    def __init__(self, count: int, value: Callable[[int, Mapping[str, Any]], float | None]) -> None:
        super().__init__(count, value)
        self._before: list[Node] = []

    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        kept = super().begin(found)
        if kept:
            return kept
        self._before = list(found.nodes)
        return None

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:
        unknown = not self._ranks
        found = super().add(entry, on_line)
        if not unknown:
            return found
        if not self._ranks:
            self._before.append(entry.node)
            return ()
        found, self._before = self._before, []
        return found

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:
        return not self._ranks or super().keeps(entry, on_line)


class _NewerThan(RuleWindow):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = -math.inf
        self._oldest: list[tuple[float, Node]] = []

    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        if found.newest is not None:
            self._since = found.newest.time - self._seconds
        self._oldest = sorted((time, node) for time, node in zip(found.times, found.nodes, strict=True))
        del self._oldest[: bisect_left(self._oldest, self._since, key=itemgetter(0))]
        return [node for _, node in self._oldest]

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:  # noqa: ARG002
        heapq.heappush(self._oldest, (entry.time, entry.node))
        return ()

    def expire(self, newest: CheckpointEntry) -> Iterable[Node]:
        self._since = newest.time - self._seconds
        found = []
        while self._oldest and self._oldest[0][0] < self._since:
            found.append(heapq.heappop(self._oldest)[1])
        return found

    def restart(self, entries: Iterable[CheckpointEntry]) -> None:
        self._oldest = [(entry.time, entry.node) for entry in entries]
        heapq.heapify(self._oldest)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return entry.time >= self._since


class _Every(RuleWindow):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        return [node for node in found.nodes if node[1] % self._steps == 0]

    def for_good(self, step: int) -> bool:
        return step % self._steps == 0

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return self.for_good(entry.step)


class _Branches(RuleWindow):
    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:
        return set(found.nodes).difference(found.on_line)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return not on_line


class _Nothing(RuleWindow):
    """``tagged`` only states what is always true, and ``space`` bounds what is stored: they keep nothing."""

    def begin(self, found: CheckpointColumns) -> Iterable[Node] | None:  # noqa: ARG002
        return ()

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return False


def _last(rest: str) -> RuleWindow | None:
    count = _count(rest)
    return None if count is None else _Highest(count, lambda step, _: float(step))


def _every(rest: str) -> RuleWindow | None:
    count = _count(rest)
    return None if count is None else _Every(count)


def _newer_than(rest: str) -> RuleWindow | None:
    seconds = _seconds(rest)
    return None if seconds is None else _NewerThan(seconds)


def _space(rest: str) -> RuleWindow | None:
    return None if space_limit(rest) is None else _Nothing()


def _best(rest: str) -> RuleWindow | None:
    name, digits, direction = parts_of_best(rest)
    count, sign = _count(digits), 1.0 if direction == "max" else -1.0
    if count is None or not name:
        return None

    def value(_step: int, extra: Mapping[str, Any]) -> float | None:
        found = metric_in(extra, name)
        return None if found is None else sign * found

    return _BestOf(count, value)


def parts_of_best(rest: str) -> tuple[str, str, str]:
    """Split ``METRIC:N:max`` into METRIC, N and ``max``; without a direction it is ``min``."""
    name, _, direction = rest.rpartition(":")
    if direction not in ("min", "max"):
        name, direction = rest, "min"
    name, _, digits = name.rpartition(":")
    return name, digits, direction


def _count(text: str) -> int | None:
    if not re.fullmatch(r"[0-9]{1,16}", text, re.ASCII):
        return None
    return int(text) if 1 <= int(text) <= MAX_INT else None


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhdw])", text, re.ASCII)
    return float(found[1]) * _UNITS[found[2]] if found else None


Ends = Literal["newer", "better", "never"]
"""What makes a rule release a checkpoint: newer ones, better ones, or nothing."""


@dataclass(frozen=True, slots=True)
class RuleKind:
    """One kind of rule.

    Attributes:
        form: how the rule is written, for messages: ``last:N``. A form without a colon has no argument.
        make: text behind the colon -> the window of the rule; None: the text is invalid.
        ends: what makes the rule release a checkpoint. Compaction moves nothing that will be released soon.
    """

    form: str
    make: Callable[[str], RuleWindow | None]
    ends: Ends


RULES: Final[Mapping[str, RuleKind]] = MappingProxyType(
    {
        "last": RuleKind("last:N", _last, "newer"),
        "every": RuleKind("every:N", _every, "never"),
        "best": RuleKind("best:METRIC:N (or best:METRIC:N:max)", _best, "better"),
        "newer-than": RuleKind("newer-than:7d (s, m, h, d, w)", _newer_than, "newer"),
        "tagged": RuleKind("tagged", lambda _: _Nothing(), "never"),
        "branches": RuleKind("branches", lambda _: _Branches(), "never"),
        "space": RuleKind("space:4GB (or space:3states)", _space, "never"),
    }
)
"""Every kind of rule, by the name before its colon. A row here is all that a new kind needs in engine and command."""


def window_of(rule: str) -> RuleWindow | None:
    """Return the window of a rule; None: this version does not know the rule."""
    kind = None if len(rule) > MAX_RULE else kind_of(rule)
    return None if kind is None else kind.make(rule.partition(":")[2])


def kind_of(rule: str) -> RuleKind | None:
    """Return the kind of a rule by its form: ``last:`` with any text is ``last:N``. None: no kind has this form."""
    name, colon, _ = rule.partition(":")
    kind = RULES.get(name)
    return kind if kind is not None and bool(colon) == (":" in kind.form) else None


def ends(reason: str) -> Ends:
    """Return what ends a reason to keep a checkpoint. `reason` is a rule as it is written, or ``newest``."""
    kind = kind_of(reason)
    return "newer" if reason == "newest" else "never" if kind is None else kind.ends
