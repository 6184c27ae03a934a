"""Fulls that are kept become deltas against an earlier kept full, as far apart as the data lets them be smaller.

The first full of a line of them stays. Each later one becomes a delta against it, as long as a delta saves a fifth;
where none does any more, because the state has moved on too far, that one stays, and is what the next are coded
against. So no restore applies more than one delta. What the store's rules will let go before long is left alone: it
would only become a base that nobody keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from ckptstore.formats.commit_checks import users
from ckptstore.formats.records import Encoding, Node
from ckptstore.maintenance.compact.moves import Limits, Move, Rewrite
from ckptstore.maintenance.compact.simulated_store import Imagined
from ckptstore.maintenance.compact.size_estimates import Sizes

__all__ = ["Reencoding"]

_SHARE: Final = 0.8
"""What is stored anew takes at most this share of what it took."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    rewrite: Rewrite
    drops: tuple[str, ...]
    saved: int
    slower: float  # seconds that its restore takes longer

    @property
    def order(self) -> tuple[float, Node]:
        """Most bytes for a second first."""
        return (-self.saved / max(self.slower, 1e-9), self.rewrite.node)


class Reencoding:
    """Finds what fulls to store otherwise."""

    def __init__(self, store: Imagined, limits: Limits, sizes: Sizes) -> None:
        self._store = store
        self._limits = limits
        self._sizes = sizes

    def moves(self, leave: Collection[Node]) -> Iterator[Move]:
        """Move by move, each made in the imagined store.

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
        """A kept checkpoint's full, if that is all that there is of it, in segments of its own."""
        edges = self._store.catalog.encodings.get(node, ())
        if len(edges) != 1 or edges[0].base is not None:
            return None
        catalog = self._store.catalog
        lone = all(
            segment in catalog.segments and set(users(catalog, segment)) == {node} for segment in edges[0].segments
        )
        return edges[0] if lone else None

    def _would_exceed(self, node: Node) -> bool:
        """Whether others build on it, so that one link more would be theirs, too."""
        return bool(self._store.dependents(node))
