"""Which checkpoints of a store are kept: the rules of retention, as users write them and as COMMITs carry them.

The rules are a union: what one of them keeps stays. The newest checkpoint and what a tag names stay in any case. Rules
that rank (``last``, ``best``) rank what a run that goes on has behind it: the line of the newest checkpoint; the others
judge every checkpoint by itself. No clock is asked: ages count back from the newest checkpoint's time, so that the same
log keeps the same checkpoints whoever looks, and a store at rest stays as it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointEntry, Node
from ckptstore.formats.rule_rankings import line, names
from ckptstore.formats.rule_windows import RULES, Found, Window, ends, parts_of_best, window_of

__all__ = ["MAX_RULES", "Keeping", "checked", "known", "reasons_of", "unmatched"]

MAX_RULES: Final = 64
"""Rules that a store may have."""


def checked(rules: Iterable[str]) -> tuple[str, ...]:
    """Rules as a COMMIT carries them: each once, without spaces around.

    Raises:
        UsageError: one is no rule, or they are too many.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise UsageError(f"rules: {rules!r:.80}; several texts are needed, as in ['last:100', 'every:1000']")
    found = tuple(dict.fromkeys(rule.strip() if isinstance(rule, str) else rule for rule in rules))
    for rule in found:
        if not isinstance(rule, str) or window_of(rule) is None:
            error = UsageError(f"{rule!r:.80} is no rule of retention; there are {_forms()}")
            if isinstance(rule, str) and window_of(meant := rule.replace("=", ":").replace(" ", "")) is not None:
                error.add_note(f"did you mean {meant}?")
            raise error
    if len(found) > MAX_RULES:
        raise UsageError(f"{len(found)} rules of retention, at most {MAX_RULES} are allowed")
    return found


def _forms() -> str:
    return ", ".join(kind.form for kind in RULES.values())


def known(rules: Iterable[str]) -> bool:
    """Whether this version understands all of these rules: who does not must not retire anything by the others."""
    return all(window_of(rule) is not None for rule in rules)


def unmatched(catalog: Catalog, rules: Iterable[str]) -> dict[str, str]:
    """Rules ``best:METRIC:N`` -> METRIC, where no checkpoint has that number, so that they keep everything."""
    wanted = {rule: parts_of_best(rule.removeprefix("best:"))[0] for rule in rules if rule.startswith("best:")}
    if not wanted or not len(catalog.checkpoints):
        return {}
    there = names(catalog)
    return {rule: name for rule, name in wanted.items() if name not in there}


def _windows(rules: Sequence[str]) -> dict[str, Window]:
    found = {rule: window for rule in rules if (window := window_of(rule)) is not None}
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
        found = Found(catalog)
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

    def kept_for_long(self, catalog: Catalog) -> list[Node]:
        """Those of the checkpoints that are kept not only because they are among the newest, ascending."""
        return [
            node
            for node, entry in catalog.checkpoints.items()
            if not all(ends(reason) == "newer" for reason in self.reasons(entry))
        ]

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
    found = Found(catalog)
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
