"""A writer keeps to the store's rules of retention: what a save makes superfluous is retired by the save's own COMMIT.

So it costs no record of its own, and of the checkpoints only those are looked at that a rule has just let go. Only when
the rules change, or something else than saves has changed the log, are all of them looked through again. Where many are
superfluous at once, as when rules are given late, each save retires some, and so does one record after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from ckptstore.formats.byte_text import size
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.commit_checks import droppable, pinned
from ckptstore.formats.records import CheckpointId, Node
from ckptstore.formats.retention_rules import RetentionTracker, known
from ckptstore.log.change import Change

__all__ = ["Retainer", "short_of_space"]

_AT_ONCE: Final = 256
"""Checkpoints that one record retires: it shall fit into a slot of the log, and take no long time."""
_PINNED: Final = 16
"""Held checkpoints, at least, of which it is worth a look why they are."""
_LITTLE: Final = 4
"""Of what is stored, one part in so many may be pinned without a word."""
_FULLS: Final = 3
"""Space for fewer is short: for a full, for what is written beside it, and until the chain before it is deleted."""
_MANY: Final = 10_000
"""Checkpoints that no save waits for to be looked through."""


class Retainer:
    """What one committer retires. Its thread alone calls it.

    Attributes:
        bases: gives the checkpoints that the next ones may be coded against: what restores them stays stored.
        settled: whether a checkpoint may be retired at all: of a store with a second tier only what that has.
    """

    def __init__(self, catalog: Callable[[], Catalog]) -> None:
        """
        Args:
            catalog: gives the catalog as the term knows it now.
        """
        self.bases: Callable[[], Iterable[CheckpointId]] = tuple
        self.settled: Callable[[Node], bool] = lambda _node: True
        self._catalog = catalog
        self._keeping: RetentionTracker | None = None
        self._based: set[Node] = set()
        self._released: set[Node] = set()
        self._pinned_at = _PINNED

    def look_again(self) -> None:
        """Something else than a save has changed the log, or a commit failed: look through all of it next time."""
        self._keeping = None

    def joined(self, change: Change) -> Change:
        """A change that adds checkpoints, with what it makes superfluous as its retirements.

        Raises:
            CorruptLogError: the newest checkpoint is not known.
        """
        if self._keeping is None and len(self._catalog().checkpoints) > _MANY:
            return change  # `rest` looks through them, when this is durable
        keeping = self._current()
        if keeping is None:
            return change
        for entry in change.checkpoints:
            keeping.add(entry)
        return self._retiring(change, keeping.superfluous(self._catalog(), change.tags, most=_AT_ONCE))

    def rest(self) -> Change | None:
        """What is superfluous still, as far as one record goes: a save may be waiting for who commits it.

        Raises:
            CorruptLogError: the newest checkpoint is not known.
        """
        keeping = self._current()
        if keeping is None:
            return None
        change = self._retiring(Change(), keeping.superfluous(self._catalog(), most=_AT_ONCE))
        return change if change.retires else None

    def committed(self) -> None:
        """What `joined` or `rest` gave last is history."""
        self._released.clear()

    def pinned(self) -> str | None:
        """What the rules cannot free, with its size and the remedy, once; None: it is little, or was said.

        Looked at only when twice as much is held as the last time: it takes a look at every checkpoint.
        """
        catalog = self._catalog()
        if len(catalog.held) < self._pinned_at:
            return None
        self._pinned_at = 2 * len(catalog.held)
        keeping, newest = self._current(), catalog.latest()
        if keeping is None or newest is None:
            return None
        current = [newest.node, *(base.node for base in self.bases())]
        held, nbytes = pinned(catalog, keeping.kept_for_long(catalog), current)
        live = sum(one.size for one in catalog.segments.values())
        if nbytes < max(newest.nbytes, live // _LITTLE):
            return None
        self._pinned_at = sys.maxsize
        return (
            f"{len(held)} retired checkpoints ({size(nbytes)}) stay stored, because checkpoints that the rules or tags "
            "keep build on them"
        )

    def unknown(self) -> str | None:
        """Why nothing is retired although there are rules; None: there are none, or it is."""
        catalog = self._catalog()
        if not catalog.keep:
            return None
        if not known(catalog.keep):
            return f"nothing is retired: of the rules {', '.join(catalog.keep)} this version does not know all"
        return "nothing is retired while a slot of the log is damaged" if _damaged(catalog) else None

    def _current(self) -> RetentionTracker | None:
        """The rules, applied so far; None: there are none, or nobody can tell what they keep."""
        catalog = self._catalog()
        if not catalog.keep or self.unknown() is not None:
            self._keeping = None
        elif self._keeping is None or self._keeping.rules != catalog.keep:
            self._keeping = RetentionTracker(catalog.keep, catalog)
        return self._keeping

    def _retiring(self, change: Change, superfluous: Sequence[Node]) -> Change:
        catalog = self._catalog()
        # What this very change adds is promised first; it goes with the next one.
        gone = [node for node in superfluous if node in catalog.checkpoints and self.settled(node)]
        based = {base.node for base in self.bases()}
        self._released |= self._based - based
        self._based = based
        earlier = [node for node in self._released if node in catalog.held]
        if not gone and not earlier:
            return change
        needed = based.union(edge.base.node for edge in change.encodings if edge.base is not None)
        drops = [one for one in droppable(catalog, [*gone, *earlier], needed) if one in catalog.segments]
        return replace(change, retires=(*change.retires, *gone), drops=(*change.drops, *drops))


def short_of_space(catalog: Catalog, free: Callable[[], int | None]) -> bool:
    """Whether space is short, a full still fits, and most stored checkpoints are retired ones that others build on.

    Args:
        catalog: the log as the term knows it now.
        free: gives the bytes that the medium has left; None: it does not say.
    """
    # Prevents: a full that frees nothing, because nothing is retired by rules that this version does not know.
    if not catalog.keep or not known(catalog.keep) or _damaged(catalog):
        return False
    if len(catalog.held) <= len(catalog.checkpoints):
        return False
    newest, left = catalog.latest(), free()
    # Prevents: a save that fails as a full, where a step diff or a delta would fit. The chain goes only after the full.
    return newest is not None and left is not None and newest.nbytes <= left < _FULLS * newest.nbytes


def _damaged(catalog: Catalog) -> bool:
    return bool(catalog.damage) or catalog.lost > catalog.term
