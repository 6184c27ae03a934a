"""Applies the store's retention rules: the COMMIT of a save also retires the checkpoints that it makes superfluous.

So retirement needs no extra record, and only the checkpoints that a rule has just released are examined. All of them
are examined again only if the rules change, or if something other than a save has changed the log. If many are
superfluous at once, as when rules are set late, each save retires some of them, and so does one record after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from ckptstore.formats.byte_text import size
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import droppable, pinned
from ckptstore.formats.history.records import CheckpointId, Node
from ckptstore.formats.history.retention_rules import RetentionTracker, known
from ckptstore.host.pages import BLOCK
from ckptstore.log.change import CatalogChange

__all__ = ["Retainer", "short_of_space", "tight"]

_AT_ONCE: Final = 256
"""The most checkpoints that one record retires: it must fit into a slot of the log, and be quick to make."""
_PINNED: Final = 16
"""With fewer held checkpoints, it is not examined why they are held."""
_LITTLE: Final = 4
"""If less than one part in `_LITTLE` of the stored bytes is pinned, there is no warning."""
_FULLS: Final = 3
"""Space for fewer fulls is short: for the full, for concurrent writes, and until the chain before it is deleted."""
_MANY: Final = 10_000
"""With more checkpoints than this, a save does not wait until all are examined."""


class Retainer:
    """Chooses the checkpoints that one committer retires. Only the committer's thread calls it.

    Attributes:
        bases: returns the checkpoints that the next ones may be compressed against: what restores them stays stored.
        settled: whether a checkpoint may be retired at all: with a second tier, only if that tier has it.
    """

    def __init__(self, catalog: Callable[[], Catalog]) -> None:
        """
        Args:
            catalog: returns the present catalog of the term.
        """
        self.bases: Callable[[], Iterable[CheckpointId]] = tuple
        self.settled: Callable[[Node], bool] = lambda _node: True
        self._catalog = catalog
        self._keeping: RetentionTracker | None = None
        self._based: set[Node] = set()
        self._released: set[Node] = set()
        self._pinned_at = _PINNED

    def look_again(self) -> None:
        """Examine all checkpoints next time: something other than a save has changed the log, or a commit failed."""
        self._keeping = None

    def with_retirements(self, change: CatalogChange) -> CatalogChange:
        """A change that adds checkpoints, extended by the retirement of those that it makes superfluous.

        Raises:
            CorruptLogError: the newest checkpoint is not known.
        """
        if self._keeping is None and len(self._catalog().checkpoints) > _MANY:
            return change  # `rest` examines them, when this is durable
        keeping = self._current()
        if keeping is None:
            return change
        for entry in change.checkpoints:
            keeping.add(entry)
        return self._add_retirements(change, keeping.superfluous(self._catalog(), change.tags, most=_AT_ONCE))

    def rest(self) -> CatalogChange | None:
        """A change that retires more superfluous checkpoints: at most one record, as a save may wait for this thread.

        Raises:
            CorruptLogError: the newest checkpoint is not known.
        """
        keeping = self._current()
        if keeping is None:
            return None
        change = self._add_retirements(CatalogChange(), keeping.superfluous(self._catalog(), most=_AT_ONCE))
        return change if change.retires else None

    def committed(self) -> None:
        """Note that the last change of `with_retirements` or `rest` is committed."""
        self._released.clear()

    def pinned(self) -> str | None:
        """A text on the retired checkpoints that must stay, with their size, once; None: few, or reported already.

        Examined only when twice as many are held as the last time, because it examines every checkpoint.
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
        """Why nothing is retired although there are rules; None: there are no rules, or they are applied."""
        catalog = self._catalog()
        if not catalog.keep:
            return None
        if not self._follows(catalog) and not known(catalog.keep):
            return f"nothing is retired: of the rules {', '.join(catalog.keep)} this version does not know all"
        return "nothing is retired while a slot of the log is damaged" if _damaged(catalog) else None

    def _current(self) -> RetentionTracker | None:
        """The tracker of the rules; None: there are no rules, or it is unknown what they keep."""
        catalog = self._catalog()
        if not catalog.keep or self.unknown() is not None:
            self._keeping = None
        elif not self._follows(catalog):
            self._keeping = RetentionTracker(catalog.keep, catalog)
            # Prevents: segments that no later commit drops, because a term that crashed retired their checkpoints.
            self._released.update(catalog.held)
        return self._keeping

    def _follows(self, catalog: Catalog) -> bool:
        """Whether there is a tracker of the catalog's rules, which are known then."""
        return self._keeping is not None and self._keeping.rules == catalog.keep

    def _add_retirements(self, change: CatalogChange, superfluous: Sequence[Node]) -> CatalogChange:
        """`change`, extended by the retirement of `superfluous` checkpoints and of bases that are not needed now."""
        catalog = self._catalog()
        # A checkpoint that this change adds is committed first; the next change may retire it.
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
        catalog: the present catalog of the term.
        free: returns the free bytes of the medium; None: they are unknown.
    """
    # Prevents: a full that frees nothing, because rules that this version does not know retire nothing.
    if not catalog.keep or not known(catalog.keep) or _damaged(catalog):
        return False
    if len(catalog.held) <= len(catalog.checkpoints):
        return False
    newest, left = catalog.latest(), free()
    # Prevents: a save that fails as a full, though a step diff or delta would fit. The chain is deleted only after it.
    return newest is not None and left is not None and newest.nbytes <= left < _FULLS * newest.nbytes


def tight(catalog: Catalog, limit: int, full: int, waiting: int) -> bool:
    """Whether a limit on space leaves no room for a longer chain: if one more checkpoint took as much as a full, the
    fulls that release the chain would not fit any more.

    Args:
        catalog: the present catalog of the term. What it does not name can be deleted.
        limit: the limit in bytes.
        full: bytes of a full.
        waiting: bytes of step diffs that are not written yet.
    """
    taken = waiting + sum(-(-one.size // BLOCK) * BLOCK for one in catalog.segments.values())
    # `last:N` keeps the end of a chain until N checkpoints have followed.
    following = max((int(rule[5:]) for rule in catalog.keep if rule.startswith("last:")), default=1)
    return limit - taken < (1 + following) * full


def _damaged(catalog: Catalog) -> bool:
    return bool(catalog.damage) or catalog.lost > catalog.term
