"""The log of the store model: records, the catalog they fold into, and the ways to restore a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

__all__ = [
    "Catalog",
    "Checkpoint",
    "Edge",
    "Rec",
    "Request",
    "Segment",
    "catalog",
    "forget",
    "needed",
    "ordered",
    "paths",
]

Segment = tuple[int, str, int]
"""(term, who wrote it, number)"""
Checkpoint = tuple[int, int]
"""(term, step)"""


class Edge(NamedTuple):
    """An encoding in one segment: restores `checkpoint` from `base` (None: from nothing)."""

    segment: Segment
    checkpoint: Checkpoint
    base: Checkpoint | None


class Rec(NamedTuple):
    """OPEN (`who` not empty, `opens`) or COMMIT."""

    term: int
    opens: bool
    parent: Checkpoint | None = None
    adds: tuple[Edge, ...] = ()
    drops: tuple[Segment, ...] = ()
    retires: tuple[Checkpoint, ...] = ()
    swept: tuple[Segment, ...] = ()

    def __str__(self) -> str:
        if self.opens:
            return f"OPEN {self.term} from {self.parent}"
        parts = {"adds": self.adds, "drops": self.drops, "retires": self.retires, "swept": self.swept}
        return "COMMIT " + ", ".join(f"{name} {list(value)}" for name, value in parts.items() if value)


class Catalog(NamedTuple):
    """The folded log. `ever`: every segment that a record named."""

    edges: tuple[Edge, ...]
    dropped: frozenset[Segment]
    ever: frozenset[Segment]
    promised: frozenset[Checkpoint]
    term: int


class Request(NamedTuple):
    """A request of the compactor to the writer of `term`."""

    term: int
    adds: tuple[Edge, ...] = ()
    drops: tuple[Segment, ...] = ()
    retires: tuple[Checkpoint, ...] = ()


@cache
def catalog(log: tuple[Rec, ...]) -> Catalog:
    """Fold the log."""
    live: dict[Segment, Edge] = {}
    dropped: set[Segment] = set()
    ever: set[Segment] = set()
    promised: set[Checkpoint] = set()
    term = 0
    for record in log:
        term = max(term, record.term)
        for edge in record.adds:
            live[edge.segment] = edge
            promised.add(edge.checkpoint)
        for segment in record.drops:
            live.pop(segment, None)
            dropped.add(segment)
        ever.update(live, dropped)
        dropped.difference_update(record.swept)
        promised.difference_update(record.retires)
    return Catalog(ordered(live.values()), frozenset(dropped), frozenset(ever), frozenset(promised), term)


@cache
def paths(edges: tuple[Edge, ...], checkpoint: Checkpoint) -> tuple[tuple[Segment, ...], ...]:
    """The segments of every way to restore a checkpoint."""
    found: list[tuple[Segment, ...]] = []
    for edge in edges:
        if edge.checkpoint == checkpoint:
            below: tuple[tuple[Segment, ...], ...] = ((),) if edge.base is None else paths(edges, edge.base)
            found += [(edge.segment, *path) for path in below]
    return tuple(found)


def forget() -> None:
    """Empty the caches between searches."""
    catalog.cache_clear()
    paths.cache_clear()


def needed(edges: tuple[Edge, ...], promised: frozenset[Checkpoint]) -> set[Checkpoint]:
    """The segments that promised checkpoints reach through bases."""
    found: set[Checkpoint] = set()
    todo = list(promised)
    while todo:
        checkpoint = todo.pop()
        if checkpoint not in found:
            found.add(checkpoint)
            todo += [edge.base for edge in edges if edge.checkpoint == checkpoint and edge.base is not None]
    return found


def ordered(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """One tuple for one set of edges."""
    return tuple(sorted(edges, key=str))
