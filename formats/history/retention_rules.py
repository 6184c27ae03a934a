"""The retention rules, which users write and COMMITs store: they decide which checkpoints of a store are kept.

The rules are a union: a checkpoint stays if any rule keeps it. The newest checkpoint and every tagged one always stay.
Rules that rank (``last``, ``best``) rank only the line of the newest checkpoint, which is the history of a run that
continues from it. The other rules judge each checkpoint separately. No clock is read: ages count back from the time of
the newest checkpoint. So the same log keeps the same checkpoints for every reader, and an idle store does not change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, Node
from ckptstore.formats.history.rule_rankings import line, names
from ckptstore.formats.history.rule_windows import RULES, CheckpointColumns, RuleWindow, ends, parts_of_best, window_of
from ckptstore.formats.history.space_limits import is_space

__all__ = ["MAX_RULES", "RetentionTracker", "checked", "known", "reasons_of", "unmatched"]

MAX_RULES: Final = 64
"""Maximum number of rules of a store."""


def checked(rules: Iterable[str]) -> tuple[str, ...]:
    """Check rules and return them as a COMMIT stores them: stripped of spaces, without duplicates.

    Raises:
        UsageError: a rule is invalid, or there are more than `MAX_RULES`.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise UsageError(f"rules: {rules!r:.80}; pass a list of strings, as in ['last:100', 'every:1000']")
    found = tuple(dict.fromkeys(rule.strip() if isinstance(rule, str) else rule for rule in rules))
    for rule in found:
        if not isinstance(rule, str) or window_of(rule) is None:
            error = UsageError(f"{rule!r:.80} is not a retention rule; the rules are {_forms()}")
            if isinstance(rule, str) and window_of(meant := rule.replace("=", ":").replace(" ", "")) is not None:
                error.add_note(f"did you mean {meant}?")
            raise error
    if len(found) > MAX_RULES:
        raise UsageError(f"{len(found)} retention rules, at most {MAX_RULES} are allowed")
    _check_space(found)
    return found


def _check_space(rules: Sequence[str]) -> None:
    limits = [rule for rule in rules if is_space(rule)]
    if len(limits) > 1:
        raise UsageError(f"{' and '.join(limits)}: give one limit")
    # Prevents: a limit, set on a store of many checkpoints, that retires all but the newest.
    if limits and len(rules) == 1:
        raise UsageError(
            f"{limits[0]} limits the space, and no rule says which checkpoints stay: add one, as in "
            f"['last:2', {limits[0]!r}]"
        )


def _forms() -> str:
    return ", ".join(kind.form for kind in RULES.values())


def known(rules: Iterable[str]) -> bool:
    """Whether this version knows all of these rules. If not, it must not retire anything because of the others."""
    return all(window_of(rule) is not None for rule in rules)


def unmatched(catalog: Catalog, rules: Iterable[str]) -> dict[str, str]:
    """Return rule -> METRIC for each ``best:METRIC:N`` whose metric no checkpoint has: it keeps every checkpoint."""
    wanted = {rule: parts_of_best(rule.removeprefix("best:"))[0] for rule in rules if rule.startswith("best:")}
    if not wanted or not len(catalog.checkpoints):
        return {}
    there = names(catalog)
    return {rule: name for rule, name in wanted.items() if name not in there}


def _windows(rules: Sequence[str]) -> dict[str, RuleWindow]:
    found = {rule: window for rule in rules if (window := window_of(rule)) is not None}
    assert len(found) == len(rules), "with an unknown rule every checkpoint is kept"
    return found


class RetentionTracker:
    """Track which checkpoints a store's rules keep, save by save. Only those that a rule may release are rechecked."""

    def __init__(self, rules: Sequence[str], catalog: Catalog) -> None:
        """Check every checkpoint once.

        Args:
            rules: the result of `checked`; at least one rule.
            catalog: an undamaged catalog, so that its newest checkpoint is known.
        """
        self.rules = tuple(rules)
        self._windows = _windows(rules)
        self._on_line = line(catalog)
        found = CheckpointColumns(catalog)
        self._newest = found.newest
        self._time = -math.inf  # of the newest, at the last call of `superfluous`
        self._tags: dict[str, Node] = {}
        self._named: set[Node] = set()
        self._new: dict[Node, CheckpointEntry] = {}
        kept: set[Node] | None = set()
        for window in self._windows.values():
            some = window.begin(found)
            kept = None if some is None or kept is None else kept.union(some)
        # A heap, because it is already sorted: a caller that asks for a thousand of them pays for a thousand.
        self._queue = [] if kept is None else [node for node in found.nodes if node not in kept]
        self._candidates = set(self._queue)

    def add(self, entry: CheckpointEntry) -> None:
        """Add a checkpoint of the newest term that is promised, or about to be."""
        before = self._newest
        if before is None or before.term != entry.term or before.step < entry.step:
            self._newest = entry
            if before is not None:
                self._reconsider([before.node])
        self._new[entry.node] = entry
        on_line = self._on_line(entry.node)
        for window in self._windows.values():
            self._reconsider(window.add(entry, on_line))
        self._reconsider([entry.node])

    def _reconsider(self, nodes: Iterable[Node]) -> None:
        """Mark checkpoints that perhaps no rule keeps any more."""
        for node in nodes:
            if node not in self._candidates:
                self._candidates.add(node)
                heapq.heappush(self._queue, node)

    def superfluous(
        self, catalog: Catalog, tags: Mapping[str, Node | None] | None = None, *, most: int | None = None
    ) -> list[Node]:
        """Return the checkpoints that nothing keeps, oldest first. Each is returned again until it is retired.

        Args:
            catalog: contains the initial checkpoints and those added since, or is about to contain them.
            tags: tags that are about to change.
            most: maximum number to return, the oldest first; None: all.
        """
        if self._newest is None:
            return []
        for window in self._windows.values():
            if self._newest.time < self._time:  # the clock was set back
                window.restart([*catalog.checkpoints.values(), *self._new.values()])
            self._reconsider(window.expire(self._newest))
        self._time = self._newest.time
        self._retag({**catalog.tags, **(tags or {})})
        found: list[Node] = []
        while self._queue and (most is None or len(found) < most):
            node = heapq.heappop(self._queue)
            entry = catalog.checkpoints.get(node) or self._new.get(node)
            if entry is None or self.reasons(entry):  # gone, or kept: it is marked again when a rule releases it
                self._candidates.discard(node)
            else:
                found.append(node)
        for node in found:
            heapq.heappush(self._queue, node)
        self._new.clear()
        return found

    def reasons(self, entry: CheckpointEntry) -> list[str]:
        """Return what keeps a checkpoint: ``newest``, ``tagged``, and rules as they are written."""
        on_line = self._on_line(entry.node)
        found = ["newest"] if self._newest is not None and entry.node == self._newest.node else []
        found += ["tagged"] if entry.node in self._named else []
        return found + [rule for rule, window in self._windows.items() if window.keeps(entry, on_line)]

    def kept_for_long(self, catalog: Catalog) -> list[Node]:
        """Return the checkpoints that are kept for another reason than being among the newest, ascending."""
        return [
            node
            for node, entry in catalog.checkpoints.items()
            if not all(ends(reason) == "newer" for reason in self.reasons(entry))
        ]

    def _retag(self, tags: Mapping[str, Node | None]) -> None:
        now = {name: node for name, node in tags.items() if node is not None}
        if now != self._tags:
            named = set(now.values())
            self._reconsider(self._named - named)
            self._tags, self._named = now, named


def reasons_of(catalog: Catalog, rules: Sequence[str]) -> tuple[dict[str, list[Node]], list[Node]]:
    """Return (reason -> the checkpoints it keeps, ascending; the checkpoints that nothing keeps, ascending).

    Args:
        rules: the result of `checked`. The reasons are these rules without ``space``, ``newest`` and ``tagged``.

    Raises:
        CorruptLogError: damage hides which checkpoint is the newest.
    """
    found = CheckpointColumns(catalog)
    named = set(catalog.tags.values())
    reasons = {
        "newest": [] if found.newest is None else [found.newest.node],
        "tagged": [node for node in found.nodes if node in named] if named else [],
    }
    for rule, window in _windows([rule for rule in rules if not is_space(rule)]).items():
        some = window.begin(found)
        mine = list(found.nodes) if some is None else sorted(some)
        reasons[rule] = sorted({*reasons.get(rule, ()), *mine})  # rule `tagged` is also a reason and adds nothing
    kept = {node for nodes in reasons.values() for node in nodes}
    gone = [] if found.newest is None else [node for node in found.nodes if node not in kept]
    return reasons, gone
