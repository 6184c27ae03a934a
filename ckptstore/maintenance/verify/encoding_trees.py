"""Arranges the encodings of a catalog as trees: each builds on the one above it, so that every chain is walked once.

A checkpoint may have several encodings. What others build on is restored by the planned one; the others are leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, Node
from ckptstore.maintenance.verify.verify_findings import edge_of
from ckptstore.restore.restore_plan import Plan

__all__ = ["Branch", "chosen_encodings", "trees"]


@dataclass(slots=True, eq=False)
class Branch:
    """An encoding, and what builds on it.

    Attributes:
        encoding: how the checkpoint is stored.
        children: encodings that build on its state; the one with the largest subtree comes first.
        weight: number of encodings in its subtree, itself included.
    """

    encoding: Encoding
    children: list[Branch] = field(default_factory=list)
    weight: int = 1

    def walk(self) -> Iterator[Branch]:
        """Yield all encodings of the tree, bases before what builds on them."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += branch.children


def chosen_encodings(plans: Mapping[Node, Plan]) -> dict[Node, Encoding]:
    """Map each checkpoint, also one that is only a base, to the encoding that restores it."""
    return {encoding.checkpoint: encoding for plan in plans.values() for encoding in plan.encodings}


def trees(catalog: Catalog, chosen: Mapping[Node, Encoding]) -> list[Branch]:
    """Return the trees of all encodings that build on a restorable base, or on none; by checkpoint."""
    main = {node: Branch(encoding) for node, encoding in chosen.items()}
    roots: list[Branch] = []
    for node, edges in sorted(catalog.encodings.items()):
        for edge in {edge_of(edge): edge for edge in edges}.values():  # a log may repeat an encoding
            if not catalog.segments.keys() >= set(edge.segments):
                continue  # its segments were dropped, and another encoding replaces it
            planned = node in chosen and edge_of(edge) == edge_of(chosen[node])
            branch = main[node] if planned else Branch(edge)
            if edge.base is None:
                roots.append(branch)
            elif (below := main.get(edge.base.node)) is not None and below is not branch:
                below.children.append(branch)
    for root in roots:
        for branch in reversed(list(root.walk())):
            branch.weight = 1 + sum(child.weight for child in branch.children)
            branch.children.sort(key=lambda child: -child.weight)
    return roots
