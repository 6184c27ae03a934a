"""The cheapest path to a checkpoint: checkpoints are nodes, encodings are edges.

A full is an edge from nothing; a delta or gradient diff is an edge from its base. The cost of an edge is what it takes
to read and decode it (design: "Restore is a cheapest path").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import CorruptionError
from ckptstore.formats.records import CheckpointId, Encoding, Node

__all__ = ["Plan", "plan", "stored_bytes"]

Cost = Callable[[Encoding], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to restore one checkpoint: `encodings` in the order of application, the full first."""

    target: CheckpointId
    encodings: tuple[Encoding, ...]
    cost: float

    @property
    def segments(self) -> tuple[str, ...]:
        """Ids of every segment the plan reads, once each, in order."""
        return tuple(dict.fromkeys(segment for encoding in self.encodings for segment in encoding.segments))


def stored_bytes(encoding: Encoding) -> float:
    """The plainest cost: bytes to read."""
    return float(encoding.bytes)


def plan(
    catalog: Catalog, target: CheckpointId, cost: Cost = stored_bytes, avoid: frozenset[str] = frozenset()
) -> Plan:
    """The cheapest way to restore `target`.

    Args:
        catalog: the folded log.
        target: a checkpoint of the catalog.
        cost: price of one encoding; must not be negative.
        avoid: segments not to use, for instance because they turned out damaged.

    Raises:
        CorruptionError: no chain of intact encodings leads to it; the message names what is missing.
    """
    goal: Node = (target.term, target.step)
    # Settled nodes: the cheapest cost and the last edge of its path; None where there is no path. Bases form a DAG (one
    # was restorable when its delta was committed). An explicit stack, because chains outgrow Python's recursion limit.
    best: dict[Node, tuple[float, Encoding] | None] = {}
    stack: list[Node] = [goal]
    ancestors: set[Node] = set()
    while stack:
        node = stack[-1]
        if node in best:  # reached twice by different paths, settled the first time
            stack.pop()
            continue
        ancestors.add(node)
        usable = [encoding for encoding in catalog.encodings.get(node, ()) if _usable(catalog, encoding, avoid)]
        bases = {base for base in map(_base_node, usable) if base is not None}
        if waiting := bases - best.keys() - ancestors:
            stack.extend(waiting)
            continue
        options = [(_before(best, encoding) + cost(encoding), encoding) for encoding in usable]
        best[node] = min((o for o in options if o[0] < math.inf), key=lambda option: option[0], default=None)
        ancestors.discard(node)
        stack.pop()
    chain: list[Encoding] = []
    step: Node | None = goal
    while step is not None:
        found = best[step]
        if found is None:
            raise CorruptionError(
                f"checkpoint {target.step}@{target.term} cannot be restored: {_reason(catalog, goal, avoid)}"
            )
        chain.append(found[1])
        step = _base_node(found[1])
    total = best[goal]
    assert total is not None
    return Plan(target, tuple(reversed(chain)), total[0])


def _before(best: dict[Node, tuple[float, Encoding] | None], encoding: Encoding) -> float:
    base = _base_node(encoding)
    if base is None:
        return 0.0
    settled = best.get(base)
    return math.inf if settled is None else settled[0]


def _usable(catalog: Catalog, encoding: Encoding, avoid: frozenset[str]) -> bool:
    return (
        not avoid.intersection(encoding.segments)
        and all(segment in catalog.segments for segment in encoding.segments)
        and _base_matches(catalog, encoding)
    )


def _base_node(encoding: Encoding) -> Node | None:
    return None if encoding.base is None else encoding.base.node


def _base_matches(catalog: Catalog, encoding: Encoding) -> bool:
    """A base is named by identity: the state hash must be the one the encoding was made against."""
    base = encoding.base
    if base is None:
        return True
    entry = catalog.find(base.node)
    return entry is not None and entry.state == base.state


def _reason(catalog: Catalog, node: Node, avoid: frozenset[str]) -> str:
    """Follow the chain down to the first thing that is missing."""
    seen: set[Node] = set()
    while node not in seen:
        seen.add(node)
        encodings = catalog.encodings.get(node, ())
        if not encodings:
            return f"nothing stored restores {node[1]}@{node[0]}"
        for encoding in encodings:
            for segment in encoding.segments:
                if segment not in catalog.segments:
                    return f"segment {segment} is not in the catalog"
                if segment in avoid:
                    return f"{catalog.segments[segment].key} is damaged"
        base = encodings[0].base
        if base is None:
            break
        node = base.node
    return "its chain of bases does not end in a full checkpoint"
