"""What each rule of retention keeps at present, brought up to date with every checkpoint that comes."""

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

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.columns import TIME
from ckptstore.formats.members import MAX_INT
from ckptstore.formats.records import CheckpointEntry, Node
from ckptstore.formats.rule_rankings import line, metric_in

__all__ = ["MAX_RULE", "RULES", "Ends", "Found", "Kind", "Window", "ends", "kind_of", "parts_of_best", "window_of"]

MAX_RULE: Final = 200
"""Letters of a rule."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Found:
    """Every checkpoint that a catalog has, as columns: a rule that looks at all of them makes no object for each.

    Attributes:
        newest: None: there is none.
        nodes: all of them, ascending.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.newest = catalog.latest()
        self.nodes = list(catalog.checkpoints)
        self._table = catalog.checkpoints
        self._on_line = line(catalog)

    @cached_property
    def on_line(self) -> list[Node]:
        """Those on the line of the newest term."""
        return list(filter(self._on_line, self.nodes))

    @cached_property
    def extras(self) -> Mapping[Node, Mapping[str, Any]]:
        """What those say that say more than every checkpoint does."""
        return self._table.extras()

    @cached_property
    def times(self) -> list[float]:
        """As `nodes`."""
        return list(self._table.column(TIME, lambda entry: entry.time))


class Window(ABC):
    """What one rule keeps at present."""

    @abstractmethod
    def begin(self, found: Found) -> Iterable[Node] | None:
        """Take all of them in -> those that the rule keeps; None: every one."""

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:  # noqa: ARG002  # some rules need neither
        """Another checkpoint is there -> those that the rule keeps no longer because of it."""
        return ()

    def lapse(self, newest: CheckpointEntry) -> Iterable[Node]:  # noqa: ARG002
        """Those that the rule keeps no longer now that this is the newest one."""
        return ()

    def refill(self, entries: Iterable[CheckpointEntry]) -> None:  # noqa: B027  # only ages change so
        """The newest one is older than the one before: what was let go may be kept again."""

    def for_good(self, step: int) -> bool:  # noqa: ARG002  # most windows move on
        """Whether the rule keeps every checkpoint of this step, whatever comes after it."""
        return False

    @abstractmethod
    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:
        """Whether the rule keeps a checkpoint that was added."""


class _Highest(Window):
    """``last:N``, and most of ``best:NAME:N``: the N highest of the line; of equals the newer."""

    def __init__(self, count: int, value: Callable[[int, Mapping[str, Any]], float | None]) -> None:
        """
        Args:
            value: of a step, and of what is said of it, the number that ranks it; None: it has none.
        """
        self._count = count
        self._value = value
        self._ranks: list[tuple[float, int, int]] = []
        self._kept: set[Node] = set()

    def begin(self, found: Found) -> Iterable[Node] | None:
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

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002  # only such were added
        return entry.node in self._kept


class _Best(_Highest):
    """``best:NAME:N``. While no checkpoint of the line has a number of this name it keeps all.

    A metric that comes late, or has another name, shall not cost what came before.
    """

    def __init__(self, count: int, value: Callable[[int, Mapping[str, Any]], float | None]) -> None:
        super().__init__(count, value)
        self._before: list[Node] = []

    def begin(self, found: Found) -> Iterable[Node] | None:
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


class _NewerThan(Window):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = -math.inf
        self._oldest: list[tuple[float, Node]] = []

    def begin(self, found: Found) -> Iterable[Node] | None:
        if found.newest is not None:
            self._since = found.newest.time - self._seconds
        self._oldest = sorted((time, node) for time, node in zip(found.times, found.nodes, strict=True))
        del self._oldest[: bisect_left(self._oldest, self._since, key=itemgetter(0))]
        return [node for _, node in self._oldest]

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:  # noqa: ARG002
        heapq.heappush(self._oldest, (entry.time, entry.node))
        return ()

    def lapse(self, newest: CheckpointEntry) -> Iterable[Node]:
        self._since = newest.time - self._seconds
        found = []
        while self._oldest and self._oldest[0][0] < self._since:
            found.append(heapq.heappop(self._oldest)[1])
        return found

    def refill(self, entries: Iterable[CheckpointEntry]) -> None:
        self._oldest = [(entry.time, entry.node) for entry in entries]
        heapq.heapify(self._oldest)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return entry.time >= self._since


class _Every(Window):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def begin(self, found: Found) -> Iterable[Node] | None:
        return [node for node in found.nodes if node[1] % self._steps == 0]

    def for_good(self, step: int) -> bool:
        return step % self._steps == 0

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return self.for_good(entry.step)


class _Branches(Window):
    def begin(self, found: Found) -> Iterable[Node] | None:
        return set(found.nodes).difference(found.on_line)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return not on_line


class _Tagged(Window):
    """Tags keep in any case: the rule only says so."""

    def begin(self, found: Found) -> Iterable[Node] | None:  # noqa: ARG002
        return ()

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return False


def _last(rest: str) -> Window | None:
    count = _count(rest)
    return None if count is None else _Highest(count, lambda step, _: float(step))


def _every(rest: str) -> Window | None:
    count = _count(rest)
    return None if count is None else _Every(count)


def _newer_than(rest: str) -> Window | None:
    seconds = _seconds(rest)
    return None if seconds is None else _NewerThan(seconds)


def _best(rest: str) -> Window | None:
    name, digits, direction = parts_of_best(rest)
    count, sign = _count(digits), 1.0 if direction == "max" else -1.0
    if count is None or not name:
        return None

    def value(_step: int, extra: Mapping[str, Any]) -> float | None:
        found = metric_in(extra, name)
        return None if found is None else sign * found

    return _Best(count, value)


def parts_of_best(rest: str) -> tuple[str, str, str]:
    """``METRIC:N:max`` -> METRIC, N and max; or min."""
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
"""What makes a rule let go of a checkpoint: newer ones, better ones, or nothing by itself."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of rule.

    Attributes:
        form: how it is written, for messages: ``last:N``. Without a colon it takes nothing.
        make: what follows the colon -> what keeps a rule of this kind; None: that is no rule.
        ends: what makes it let go of a checkpoint. Compaction moves nothing that is about to go.
    """

    form: str
    make: Callable[[str], Window | None]
    ends: Ends


RULES: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "last": Kind("last:N", _last, "newer"),
        "every": Kind("every:N", _every, "never"),
        "best": Kind("best:METRIC:N (or best:METRIC:N:max)", _best, "better"),
        "newer-than": Kind("newer-than:7d (s, m, h, d, w)", _newer_than, "newer"),
        "tagged": Kind("tagged", lambda _: _Tagged(), "never"),
        "branches": Kind("branches", lambda _: _Branches(), "never"),
    }
)
"""Every kind of rule by the name before its colon. A row is all that another kind needs in the engine and command."""


def window_of(rule: str) -> Window | None:
    """What keeps a rule; None: this version does not know it."""
    kind = None if len(rule) > MAX_RULE else kind_of(rule)
    return None if kind is None else kind.make(rule.partition(":")[2])


def kind_of(rule: str) -> Kind | None:
    """The kind that a rule is written like: ``last:`` and any text for ``last:N``. None: it is written like none."""
    name, colon, _ = rule.partition(":")
    kind = RULES.get(name)
    return kind if kind is not None and bool(colon) == (":" in kind.form) else None


def ends(reason: str) -> Ends:
    """What ends a reason to keep a checkpoint: a rule as it is written, or ``newest``."""
    kind = kind_of(reason)
    return "newer" if reason == "newest" else "never" if kind is None else kind.ends
