"""Chooses how to rewrite a kept checkpoint: as a full, or as a delta against another one, whichever is smaller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from ckptstore.formats.history.records import Encoding, Node
from ckptstore.maintenance.compact.moves import CompactLimits, Rewrite
from ckptstore.maintenance.compact.simulated_store import SimulatedStore
from ckptstore.maintenance.compact.size_estimates import Sizes
from ckptstore.restore.restore_plan import Plan

__all__ = ["EncodingChooser"]

_MOST: Final = 4096
"""Maximum number of checkpoints that one move rewrites: it is one record, and starts again after a crash."""


class EncodingChooser:
    """Chooses encodings within limits."""

    def __init__(self, store: SimulatedStore, limits: CompactLimits, sizes: Sizes) -> None:
        self._store = store
        self._limits = limits
        self._sizes = sizes

    # -- to save bytes

    def rewrites(self, nodes: Sequence[Node], without: Collection[Node], most: int) -> list[Rewrite] | None:
        """Return rewrites of `nodes` so that nothing needs `without`; None: they take `most` bytes or more."""
        done: dict[Node, tuple[int, float]] = {}  # links above its full, and seconds, once rewritten
        found: list[Rewrite] = []
        if len(nodes) > _MOST:
            return None
        avoid = {*nodes, *without}
        for node in nodes:
            chain = self._store.chain(node)
            if chain is None:
                return None
            choices = [self._full(node), *self._deltas(node, chain, avoid, done)]
            rewrite = min(choices, key=lambda one: (one.nbytes, one.base is not None))
            found.append(rewrite)
            done[node] = self._after(rewrite, done)
            most -= rewrite.nbytes
            if most <= 0:
                return None
        return found

    def _deltas(
        self, node: Node, chain: Plan, avoid: Collection[Node], done: dict[Node, tuple[int, float]]
    ) -> Iterator[Rewrite]:
        before = len(chain.encodings) - 1, self._store.seconds(chain.encodings)
        for base in dict.fromkeys(self._bases(node, chain, avoid, done)):
            nbytes = self._delta(node, chain, base)
            if nbytes is None:
                continue
            rewrite = Rewrite(node, base, nbytes)
            depth, seconds = self._after(rewrite, done)
            # Never slower to restore than before, and within the limits if there are any.
            if depth <= max(1, before[0]) and seconds <= before[1] and not self._limits.exceeded(depth, seconds):
                yield rewrite

    def _bases(
        self, node: Node, chain: Plan, avoid: Collection[Node], done: dict[Node, tuple[int, float]]
    ) -> Iterator[Node]:
        own = [other for other in done if other[0] == node[0]]
        if own:
            yield own[-1]
        catalog = self._store.catalog
        for edge in reversed(chain.encodings[:-1]):
            if edge.checkpoint in catalog.checkpoints and self._apart(edge.checkpoint, avoid):
                yield edge.checkpoint
                break
        before = catalog.checkpoints.highest(node[0], node[1] - 1)
        if before is not None and before not in done and self._apart(before, avoid):
            yield before

    def _apart(self, base: Node, avoid: Collection[Node]) -> bool:
        """Tell whether a checkpoint can be restored without any of these."""
        chain = self._store.chain(base)
        return chain is not None and not any(edge.checkpoint in avoid for edge in chain.encodings)

    # -- to meet a limit

    def shorter(self, node: Node, chain: Plan) -> Rewrite | None:
        """Return a rewrite of a checkpoint within the limits; None: there is none.

        A delta gets at most half of the allowed links, so that checkpoints that build on it have some left.
        """
        choices = []
        # A restore takes the cheapest encoding. An existing one was not cheap enough, so do not choose it again.
        there = {None if one.base is None else one.base.node for one in self._store.catalog.encodings[node]}
        full = self._full(node)
        if None not in there and not self._limits.exceeded(*self._after(full, {})):
            choices.append(full)
        most = 1 if self._limits.max_depth is None else max(1, self._limits.max_depth // 2)
        for place, edge in enumerate(chain.encodings[:most]):
            if edge.checkpoint in there or edge.checkpoint not in self._store.catalog.checkpoints:
                continue
            nbytes = self._delta(node, chain, edge.checkpoint)
            if nbytes is None:
                continue
            rewrite = Rewrite(node, edge.checkpoint, nbytes)
            depth, seconds = self._after(rewrite, {})
            if depth <= place + 1 and not self._limits.exceeded(depth, seconds):
                choices.append(rewrite)
        return min(choices, key=lambda one: (one.nbytes, one.base is not None), default=None)

    def reason(self, node: Node, seconds: float, refused: bool) -> str:
        """Explain in words why no rewrite helps."""
        if refused:
            return "; it cannot be rewritten"
        full = self._after(self._full(node), {})
        exceeded = self._limits.exceeded(*full)
        if exceeded and full[1] < seconds:
            return f"; as a full: {exceeded}"
        return "; as a full it takes no less" if exceeded else "; an encoding that it has is restored sooner"

    # -- sizes and times

    def _full(self, node: Node) -> Rewrite:
        return Rewrite(node, None, self._sizes.full(self._store.entry(node)))

    def _delta(self, node: Node, chain: Plan, base: Node) -> int | None:
        """Return the bytes of a delta: at most those of the links between the two, if one is below the other."""
        guess = self._sizes.delta(self._store.entry(node), self._store.entry(base))
        places = [place for place, edge in enumerate(chain.encodings) if edge.checkpoint == base]
        if not places:
            return guess
        links = chain.encodings[places[0] + 1 :]
        if not links or any(edge.kind == "gradient" for edge in links):
            return guess  # a step is smaller than the change it makes
        between = sum(edge.bytes for edge in links)
        return between if guess is None else min(between, guess)

    def _after(self, rewrite: Rewrite, done: dict[Node, tuple[int, float]]) -> tuple[int, float]:
        seconds = self._store.seconds([self._store.edge(rewrite)])
        if rewrite.base is None:
            return 0, seconds
        if rewrite.base in done:
            depth, below = done[rewrite.base]
            return depth + 1, below + seconds
        chain = self._store.chain(rewrite.base)
        assert chain is not None
        links: Sequence[Encoding] = chain.encodings
        return len(links), self._store.seconds(links) + seconds
