"""Plans a restore as the cheapest path to a checkpoint: checkpoints are nodes, encodings are edges.

A full is an edge from nothing; a delta or step diff is an edge from its base. The cost of an edge is the cost of
reading and decoding it. All ways give the same state (formats/SPEC.md 7.4).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CorruptionError, CorruptLogError, CorruptSegmentError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointId, Encoding, Node, ref_of

__all__ = [
    "TYPICAL",
    "Cost",
    "Edge",
    "Plan",
    "Rates",
    "base_node",
    "edge_of",
    "no_way_error",
    "plan",
    "plan_all",
    "restore_seconds",
    "stored_bytes",
    "usable",
]

Cost = Callable[[Encoding], float]
Edge = tuple[Node, tuple[str, ...], CheckpointId | None]
"""The identity of an encoding in a catalog: checkpoint, segments and base."""
_Settled = tuple[float, Encoding]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to restore one checkpoint: `encodings` in the order of application, the full first."""

    target: CheckpointId
    encodings: tuple[Encoding, ...]
    cost: float

    @property
    def segments(self) -> tuple[str, ...]:
        """Ids of all segments that the plan reads, once each, in order."""
        return tuple(dict.fromkeys(segment for encoding in self.encodings for segment in encoding.segments))


def edge_of(encoding: Encoding) -> Edge:
    """The identity of an encoding."""
    return encoding.checkpoint, encoding.segments, encoding.base


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine and a medium, in bytes a second, all threads together.

    Attributes:
        read: stored bytes, checksums included.
        decode: logical bytes of a delta, or of a compressed full.
        replay: logical bytes of the state for one optimizer step.
        startup: seconds to load the kernels, once in a process.
        spread: ratio of the median time to the shortest time of the measurements; the rates are from the shortest.
    """

    read: float
    decode: float
    replay: float
    startup: float = 0.0
    spread: float = 1.0


TYPICAL: Final = Rates(read=1.5e9, decode=1.5e9, replay=1.0e9)
"""Measured on two cores and a local disk (docs/benchmarks.md). Only their ratios decide between plans."""


def restore_seconds(catalog: Catalog, rates: Rates = TYPICAL) -> Cost:
    """The default cost: the time to read an encoding and to decode or replay it."""

    def cost(encoding: Encoding) -> float:
        entry = catalog.find(encoding.checkpoint)
        logical = 0 if entry is None else entry.nbytes
        seconds = encoding.bytes / rates.read
        if encoding.kind == "gradient":
            return seconds + logical / rates.replay
        if encoding.kind == "full" and encoding.bytes >= logical:
            return seconds  # uncompressed: read into place
        return seconds + logical / rates.decode

    return cost


def stored_bytes(encoding: Encoding) -> float:
    """The simplest cost: bytes to read. Compaction uses it."""
    return float(encoding.bytes)


def plan(
    catalog: Catalog,
    target: CheckpointId,
    cost: Cost | None = None,
    avoid: frozenset[str] = frozenset(),
    held: Collection[CheckpointId] = (),
) -> Plan:
    """The cheapest way to restore `target`.

    Args:
        catalog: the folded log.
        target: a checkpoint of the catalog.
        cost: cost of one encoding, not negative; None: `restore_seconds`.
        avoid: segments not to use, for instance because they are damaged.
        held: checkpoints that are in memory at no cost: a plan may begin with an encoding that builds on one of them.

    Raises:
        CorruptLogError, CorruptSegmentError: no chain of intact encodings leads to it; names what is missing.
    """
    held = [one for one in held if one.node != target.node]
    settled = _cheapest(catalog, _reachable(catalog, target.node), cost or restore_seconds(catalog), avoid, held)
    return _follow(catalog, target, settled, avoid, held)


def plan_all(
    catalog: Catalog, cost: Cost | None = None, avoid: frozenset[str] = frozenset()
) -> dict[Node, Plan | CorruptionError]:
    """The plan of every promised checkpoint, or the error that `plan` would raise; one pass for chains of any
    length."""
    settled = _cheapest(catalog, catalog.encodings, cost or restore_seconds(catalog), avoid)
    found: dict[Node, Plan | CorruptionError] = {}
    for node, entry in catalog.checkpoints.items():
        try:
            found[node] = _follow(catalog, entry.id, settled, avoid)
        except CorruptionError as error:
            found[node] = error
    return found


def _reachable(catalog: Catalog, goal: Node) -> set[Node]:
    """`goal` and every checkpoint below it."""
    found = {goal}
    stack = [goal]
    while stack:
        for encoding in catalog.encodings.get(stack.pop(), ()):
            base = base_node(encoding)
            if base is not None and base not in found:
                found.add(base)
                stack.append(base)
    return found


def _cheapest(
    catalog: Catalog, nodes: Iterable[Node], cost: Cost, avoid: frozenset[str], held: Collection[CheckpointId] = ()
) -> dict[Node, _Settled]:
    """The last edge of the cheapest path to each of `nodes` that has one (Dijkstra; chains may form cycles)."""
    onwards: dict[Node | None, list[Encoding]] = {}
    for node in nodes:
        for encoding in catalog.encodings.get(node, ()):
            if usable(catalog, encoding, avoid, held):
                onwards.setdefault(base_node(encoding), []).append(encoding)
    settled: dict[Node, _Settled] = {}
    order = itertools.count()  # breaks ties: the first one wins
    at_hand = {one.node for one in held}
    free = [edge for node in (None, *at_hand) for edge in onwards.get(node, ())]
    waiting = [(cost(encoding), next(order), encoding) for encoding in free]
    heapq.heapify(waiting)
    while waiting:
        total, _, encoding = heapq.heappop(waiting)
        node = encoding.checkpoint
        if node in settled or total == math.inf or node in at_hand:
            continue
        settled[node] = (total, encoding)
        for following in onwards.get(node, ()):
            heapq.heappush(waiting, (total + cost(following), next(order), following))
    return settled


def _follow(
    catalog: Catalog,
    target: CheckpointId,
    settled: dict[Node, _Settled],
    avoid: frozenset[str],
    held: Collection[CheckpointId] = (),
) -> Plan:
    chain: list[Encoding] = []
    node: Node | None = target.node
    at_hand = {one.node for one in held}
    while node is not None and node not in at_hand:
        if node not in settled:
            raise no_way_error(catalog, target, avoid)
        chain.append(settled[node][1])
        node = base_node(chain[-1])
    return Plan(target, tuple(reversed(chain)), settled[target.node][0])


def usable(catalog: Catalog, encoding: Encoding, avoid: frozenset[str], held: Collection[CheckpointId]) -> bool:
    """Whether a plan may use an encoding: base and segments are in the catalog, and no segment is to be avoided."""
    return (
        not avoid.intersection(encoding.segments)
        and all(segment in catalog.segments for segment in encoding.segments)
        and _repeated_segment(encoding) is None
        and _base_matches(catalog, encoding, held)
    )


def _repeated_segment(encoding: Encoding) -> str | None:
    """A segment that the encoding names twice, so that its tensors and tree would occur twice; None: there is none."""
    if len(encoding.segments) == len(set(encoding.segments)):
        return None
    return next(one for one in encoding.segments if encoding.segments.count(one) > 1)


def base_node(encoding: Encoding) -> Node | None:
    """The node that an encoding builds on; None: nothing."""
    return None if encoding.base is None else encoding.base.node


def _base_matches(catalog: Catalog, encoding: Encoding, held: Collection[CheckpointId]) -> bool:
    """Whether the base is there with the right identity: the state hash must be the one that the encoding names."""
    base = encoding.base
    if base is None:
        return True
    if base.node in {one.node for one in held}:
        return base in held
    entry = catalog.find(base.node)
    return entry is not None and entry.state == base.state


def no_way_error(catalog: Catalog, target: CheckpointId, avoid: frozenset[str]) -> CorruptionError:
    """The error for a checkpoint to which no way leads; `avoid`: see `plan`."""
    kind, reason = _reason(catalog, target.node, avoid)
    return kind(f"checkpoint {target.ref} cannot be restored: {reason}")


def _reason(catalog: Catalog, node: Node, avoid: frozenset[str]) -> tuple[type[CorruptionError], str]:
    """Follow the chain down to the first missing thing -> the class of the error, and a text."""
    slots = ", ".join(str(seq) for seq in sorted(catalog.damage)[:3])
    hidden = f" (log slot {slots} is damaged)" if slots else ""
    seen: set[Node] = set()
    while node not in seen:
        seen.add(node)
        encodings = catalog.encodings.get(node, ())
        if not encodings:
            return CorruptLogError, f"nothing stored restores {ref_of(node)}{hidden}"
        for encoding in encodings:
            for segment in encoding.segments:
                if segment not in catalog.segments:
                    return CorruptLogError, f"segment {segment} is not in the catalog{hidden}"
                if segment in avoid:
                    return CorruptSegmentError, f"{catalog.segments[segment].key} is damaged"
            if (twice := _repeated_segment(encoding)) is not None:
                return CorruptLogError, f"an encoding of {ref_of(node)} names segment {twice} twice"
        base = encodings[0].base
        if base is None:
            break
        node = base.node
    return CorruptLogError, f"its chain of bases does not end in a full checkpoint{hidden}"
