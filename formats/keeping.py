"""Which checkpoints of a store are kept: the rules of retention, as users write them and as COMMITs carry them.

The rules are a union: what one of them keeps stays. The newest checkpoint and what a tag names stay in any case. Rules
that rank (``last``, ``best``) rank what a run that goes on has behind it: the line of the newest checkpoint; the others
judge every checkpoint by itself. No clock is asked: ages count back from the newest checkpoint's time, so that the same
log keeps the same checkpoints whoever looks, and a store at rest stays as it is.
"""

from __future__ import annotations

import heapq
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats import metadata
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.columns import TIME
from ckptstore.formats.members import MAX_INT
from ckptstore.formats.records import CheckpointEntry, Node

__all__ = [
    "MAX_RULE",
    "MAX_RULES",
    "Keeping",
    "checked",
    "known",
    "line",
    "metric",
    "names",
    "number",
    "reasons_of",
    "unmatched",
]

MAX_RULES: Final = 64
"""Rules that a store may have."""
MAX_RULE: Final = 200
"""Letters of a rule."""
_METRICS: Final = "metrics"
"""Member of the metadata in which a `Checkpointer` puts what it is told."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_GRAMMAR: Final = (
    "last:N, every:N, best:METRIC:N (or best:METRIC:N:max), newer-than:7d (s, m, h, d, w), tagged, branches"
)


def checked(rules: Iterable[str]) -> tuple[str, ...]:
    """Rules as a COMMIT carries them: each once, without spaces around.

    Raises:
        UsageError: one is no rule, or they are too many.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise UsageError(f"rules: {rules!r:.80}; several texts are needed, as in ['last:100', 'every:1000']")
    found = tuple(dict.fromkeys(rule.strip() if isinstance(rule, str) else rule for rule in rules))
    for rule in found:
        if not isinstance(rule, str) or _window(rule) is None:
            error = UsageError(f"{rule!r:.80} is no rule of retention; there are {_GRAMMAR}")
            if isinstance(rule, str) and _window(meant := rule.replace("=", ":").replace(" ", "")) is not None:
                error.add_note(f"did you mean {meant}?")
            raise error
    if len(found) > MAX_RULES:
        raise UsageError(f"{len(found)} rules of retention, at most {MAX_RULES} are allowed")
    return found


def known(rules: Iterable[str]) -> bool:
    """Whether this version understands all of these rules: who does not must not retire anything by the others."""
    return all(_window(rule) is not None for rule in rules)


def metric(entry: CheckpointEntry, name: str) -> float | None:
    """`number` in a checkpoint's metadata."""
    return _metric(entry.extra, name)


def _metric(extra: Mapping[str, Any], name: str) -> float | None:
    said = extra.get(metadata.MEMBER)
    return number(said, name) if isinstance(said, Mapping) else None


def number(said: Mapping[str, Any], name: str) -> float | None:
    """The number of this name in metadata, or in its ``metrics``; None: there is none, or it is NaN."""
    inner = said.get(_METRICS)
    found = said.get(name, inner.get(name) if isinstance(inner, Mapping) else None)
    value = metadata.read({name: found})[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf if value > 0 else -math.inf
    return None if math.isnan(as_float) else as_float


def names(catalog: Catalog) -> list[str]:
    """Of all numbers that the metadata of checkpoints have, sorted."""
    found: set[str] = set()
    for extra in catalog.checkpoints.extras().values():
        said = extra.get(metadata.MEMBER)
        if isinstance(said, Mapping):
            inner = said.get(_METRICS)
            said_names = {*said, *(inner if isinstance(inner, Mapping) else ())} - found
            found.update(name for name in said_names if number(said, name) is not None)
    return sorted(found)


def unmatched(catalog: Catalog, rules: Iterable[str]) -> dict[str, str]:
    """Rules ``best:METRIC:N`` -> METRIC, where no checkpoint has that number, so that they keep everything."""
    wanted = {rule: _parts(rule.removeprefix("best:"))[0] for rule in rules if rule.startswith("best:")}
    if not wanted or not len(catalog.checkpoints):
        return {}
    there = names(catalog)
    return {rule: name for rule, name in wanted.items() if name not in there}


def line(catalog: Catalog) -> Callable[[Node], bool]:
    """Tells whether a checkpoint is one that the newest term continues: on no branch that was gone back from."""
    until: dict[int, int] = {}
    term, step = catalog.term, MAX_INT
    while (opened := catalog.terms.get(term)) is not None:
        until[term] = step
        if opened.parent is None:
            break
        term, step = opened.parent.term, opened.parent.step
    return lambda node: node[1] <= until.get(node[0], -1)


# ------------------------------------------------------------------------------------------------ one rule each


class _Found:
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


class _Window(ABC):
    """What one rule keeps at present."""

    @abstractmethod
    def begin(self, found: _Found) -> Iterable[Node] | None:
        """Take all of them in -> those that the rule keeps; None: every one."""

    def add(self, entry: CheckpointEntry, on_line: bool) -> Iterable[Node]:  # noqa: ARG002  # some rules need neither
        """Another checkpoint is there -> those that the rule keeps no longer because of it."""
        return ()

    def lapse(self, newest: CheckpointEntry) -> Iterable[Node]:  # noqa: ARG002
        """Those that the rule keeps no longer now that this is the newest one."""
        return ()

    def refill(self, entries: Iterable[CheckpointEntry]) -> None:  # noqa: B027  # only ages change so
        """The newest one is older than the one before: what was let go may be kept again."""

    @abstractmethod
    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:
        """Whether the rule keeps a checkpoint that was added."""


class _Highest(_Window):
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

    def begin(self, found: _Found) -> Iterable[Node] | None:
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

    def begin(self, found: _Found) -> Iterable[Node] | None:
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


class _NewerThan(_Window):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = -math.inf
        self._oldest: list[tuple[float, Node]] = []

    def begin(self, found: _Found) -> Iterable[Node] | None:
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


class _Every(_Window):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def begin(self, found: _Found) -> Iterable[Node] | None:
        return [node for node in found.nodes if node[1] % self._steps == 0]

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return entry.step % self._steps == 0


class _Branches(_Window):
    def begin(self, found: _Found) -> Iterable[Node] | None:
        return set(found.nodes).difference(found.on_line)

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return not on_line


class _Tagged(_Window):
    """Tags keep in any case: the rule only says so."""

    def begin(self, found: _Found) -> Iterable[Node] | None:  # noqa: ARG002
        return ()

    def keeps(self, entry: CheckpointEntry, on_line: bool) -> bool:  # noqa: ARG002
        return False


def _window(rule: str) -> _Window | None:
    """What keeps a rule; None: this version does not know it."""
    if len(rule) > MAX_RULE:
        return None
    if rule == "tagged":
        return _Tagged()
    if rule == "branches":
        return _Branches()
    name, _, rest = rule.partition(":")
    if name in ("last", "every"):
        count = _count(rest)
        if count is None:
            return None
        return _Every(count) if name == "every" else _Highest(count, lambda step, _: float(step))
    if name == "newer-than":
        seconds = _seconds(rest)
        return None if seconds is None else _NewerThan(seconds)
    return _best(rest) if name == "best" else None


def _best(rest: str) -> _Window | None:
    name, digits, direction = _parts(rest)
    count, sign = _count(digits), 1.0 if direction == "max" else -1.0
    if count is None or not name:
        return None

    def value(_step: int, extra: Mapping[str, Any]) -> float | None:
        found = _metric(extra, name)
        return None if found is None else sign * found

    return _Best(count, value)


def _parts(rest: str) -> tuple[str, str, str]:
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


# ------------------------------------------------------------------------------------------------ all together


def _windows(rules: Sequence[str]) -> dict[str, _Window]:
    found = {rule: window for rule in rules if (window := _window(rule)) is not None}
    assert len(found) == len(rules), "rules that this version does not know keep everything"
    return found


class Keeping:
    """What a store's rules keep, brought up to date save by save: only what a rule lets go is looked at again."""

    def __init__(self, rules: Sequence[str], catalog: Catalog) -> None:
        """Look at every checkpoint once.

        Args:
            rules: as `checked` gives them; at least one.
            catalog: undamaged, so that its newest checkpoint is known.
        """
        self.rules = tuple(rules)
        self._windows = _windows(rules)
        self._on_line = line(catalog)
        found = _Found(catalog)
        self._newest = found.newest
        self._time = -math.inf  # of the newest, when it was last asked
        self._tags: dict[str, Node] = {}
        self._named: set[Node] = set()
        self._new: dict[Node, CheckpointEntry] = {}
        kept: set[Node] | None = set()
        for window in self._windows.values():
            some = window.begin(found)
            kept = None if some is None or kept is None else kept.union(some)
        # A heap, because it is sorted: who asks for a thousand of them pays for a thousand.
        self._queue = [] if kept is None else [node for node in found.nodes if node not in kept]
        self._suspects = set(self._queue)

    def add(self, entry: CheckpointEntry) -> None:
        """Another checkpoint of the newest term is promised, or is about to be."""
        before = self._newest
        if before is None or before.term != entry.term or before.step < entry.step:
            self._newest = entry
            if before is not None:
                self._suspect([before.node])
        self._new[entry.node] = entry
        on_line = self._on_line(entry.node)
        for window in self._windows.values():
            self._suspect(window.add(entry, on_line))
        self._suspect([entry.node])

    def _suspect(self, nodes: Iterable[Node]) -> None:
        """Perhaps nothing keeps these any more."""
        for node in nodes:
            if node not in self._suspects:
                self._suspects.add(node)
                heapq.heappush(self._queue, node)

    def superfluous(
        self, catalog: Catalog, tags: Mapping[str, Node | None] | None = None, *, most: int | None = None
    ) -> list[Node]:
        """What nothing keeps any more, oldest first; asked again it is named again, until it is retired.

        Args:
            catalog: with what was there from the beginning and every checkpoint that was added, or about to get them.
            tags: those that are about to be changed.
            most: how many are named at once, the oldest; None: all.
        """
        if self._newest is None:
            return []
        for window in self._windows.values():
            if self._newest.time < self._time:  # a clock was put back
                window.refill([*catalog.checkpoints.values(), *self._new.values()])
            self._suspect(window.lapse(self._newest))
        self._time = self._newest.time
        self._retag({**catalog.tags, **(tags or {})})
        found: list[Node] = []
        while self._queue and (most is None or len(found) < most):
            node = heapq.heappop(self._queue)
            entry = catalog.checkpoints.get(node) or self._new.get(node)
            if entry is None or self.reasons(entry):  # gone; or it is named again when what keeps it lets it go
                self._suspects.discard(node)
            else:
                found.append(node)
        for node in found:
            heapq.heappush(self._queue, node)
        self._new.clear()
        return found

    def reasons(self, entry: CheckpointEntry) -> list[str]:
        """What keeps a checkpoint: ``newest``, ``tagged``, and rules as they are written."""
        on_line = self._on_line(entry.node)
        found = ["newest"] if self._newest is not None and entry.node == self._newest.node else []
        found += ["tagged"] if entry.node in self._named else []
        return found + [rule for rule, window in self._windows.items() if window.keeps(entry, on_line)]

    def _retag(self, tags: Mapping[str, Node | None]) -> None:
        now = {name: node for name, node in tags.items() if node is not None}
        if now != self._tags:
            named = set(now.values())
            self._suspect(self._named - named)
            self._tags, self._named = now, named


def reasons_of(catalog: Catalog, rules: Sequence[str]) -> tuple[dict[str, list[Node]], list[Node]]:
    """What keeps what, and what nothing keeps: (reason -> checkpoints, ascending; superfluous ones, ascending).

    Args:
        rules: as `checked` gives them. Every one of them is among the reasons, and ``newest`` and ``tagged`` are.

    Raises:
        CorruptLogError: the newest checkpoint is not known.
    """
    found = _Found(catalog)
    named = set(catalog.tags.values())
    reasons = {
        "newest": [] if found.newest is None else [found.newest.node],
        "tagged": [node for node in found.nodes if node in named] if named else [],
    }
    for rule, window in _windows(rules).items():
        some = window.begin(found)
        mine = list(found.nodes) if some is None else sorted(some)
        reasons[rule] = sorted({*reasons.get(rule, ()), *mine})  # `tagged` is a rule, too, and adds nothing
    kept = {node for nodes in reasons.values() for node in nodes}
    gone = [] if found.newest is None else [node for node in found.nodes if node not in kept]
    return reasons, gone
