"""Plans to re-encode kept fulls as deltas against earlier kept fulls, over gaps where a delta is still small.

The first full of a line stays. Each later one becomes a delta against it, as long as a delta saves a fifth. Once the
state has changed so much that it does not, that full stays, and becomes the base of the next ones. So no restore
applies more than one delta. A checkpoint that the store's rules will retire before long is left alone: it would only
become a held base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from ckptstore.formats.history.commit_checks import users
from ckptstore.formats.history.records import Encoding, Node
from ckptstore.maintenance.compact.moves import CompactLimits, Move, Rewrite
from ckptstore.maintenance.compact.simulated_store import SimulatedStore
from ckptstore.maintenance.compact.size_estimates import Sizes

__all__ = ["DeltaMoves"]

_SHARE: Final = 0.8
"""Maximum size of a rewritten checkpoint, as a share of its old size."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    rewrite: Rewrite
    drops: tuple[str, ...]
    saved: int
    slower: float  # additional seconds of its restore

    @property
    def order(self) -> tuple[float, Node]:
        """Sort key: most bytes saved per second first."""
        return (-self.saved / max(self.slower, 1e-9), self.rewrite.node)


class DeltaMoves:
    """Finds the fulls to re-encode."""

    def __init__(self, store: SimulatedStore, limits: CompactLimits, sizes: Sizes) -> None:
        self._store = store
        self._limits = limits
        self._sizes = sizes

    def moves(self, leave: Collection[Node]) -> Iterator[Move]:
        """Yield one move after the other, each made in the simulated store.

        Args:
            leave: checkpoints that stay as they are.
        """
        candidates = list(self._candidates(leave))
        target = self._limits.target_bytes
        if target is not None:
            candidates.sort(key=lambda one: one.order)
        for one in candidates:
            if target is not None and self._store.nbytes <= target:
                return
            what = "a full, compressed" if one.rewrite.base is None else "a full that resembles an earlier one"
            yield self._store.move("re-encode", what, [one.rewrite], one.drops)

    def _candidates(self, leave: Collection[Node]) -> Iterator[_Candidate]:
        anchor: Node | None = None
        for node in list(self._store.catalog.checkpoints):
            full = None if node in leave else self._lone_full(node)
            if full is None:
                continue
            if anchor is not None and anchor[0] != node[0]:
                anchor = None  # another term: it may be another branch
            found = self._candidate(node, full, anchor)
            if found is not None:
                yield found
            if found is None or found.rewrite.base is None:
                anchor = node

    def _candidate(self, node: Node, full: Encoding, anchor: Node | None) -> _Candidate | None:
        store = self._store
        entry, freed = store.entry(node), store.size(full.segments)
        choices = [Rewrite(node, None, self._sizes.full(entry))]
        if anchor is not None and not self._would_exceed(node):
            nbytes = self._sizes.delta(entry, store.entry(anchor))
            if nbytes is not None:
                choices.append(Rewrite(node, anchor, nbytes))
        before = store.seconds([full])
        found = []
        for rewrite in choices:
            below = [] if rewrite.base is None else [*store.catalog.encodings[rewrite.base]]
            seconds = store.seconds([store.edge(rewrite), *below])
            depth = 0 if rewrite.base is None else 1
            if rewrite.nbytes <= _SHARE * freed and not self._limits.exceeded(depth, seconds):
                found.append(_Candidate(rewrite, full.segments, freed - rewrite.nbytes, seconds - before))
        return max(found, key=lambda one: (one.saved, one.rewrite.base is None), default=None)

    def _lone_full(self, node: Node) -> Encoding | None:
        """Return a kept checkpoint's full, if that is its only encoding, in segments of its own."""
        edges = self._store.catalog.encodings.get(node, ())
        if len(edges) != 1 or edges[0].base is not None:
            return None
        catalog = self._store.catalog
        lone = all(
            segment in catalog.segments and set(users(catalog, segment)) == {node} for segment in edges[0].segments
        )
        return edges[0] if lone else None

    def _would_exceed(self, node: Node) -> bool:
        """Tell whether others build on it: they would get one more link, too."""
        return bool(self._store.dependents(node))
