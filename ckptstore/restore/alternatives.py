"""Finds the ways to a checkpoint that are left when one has failed (SPEC 7.4: a reader must try the others).

A *way* is a sequence of encodings, each of which builds on the checkpoint that the one before restores. A failure
excludes the *top* of a way: its encodings from the wanted checkpoint down to the faulty encoding. Every way with that
top fails too. Another way through the same damaged segment may succeed: it may not need the damaged part. So tops
are excluded, not segments.

Two facts about an encoding are not in the log. They are learned when its segments are opened: whether they can be
opened, and whether the encoding needs anything of its base. If it needs nothing, what is below it is never opened.
Until that is known, a way through segments that cannot be opened counts as a way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointId, Encoding, Node
from ckptstore.restore.restore_plan import (
    Cost,
    Edge,
    Plan,
    base_node,
    edge_of,
    no_way_error,
    restore_seconds,
    usable,
)

__all__ = ["MOST_WAYS", "NO_FAILED_WAYS", "FailedWays", "next_way"]

MOST_WAYS: Final = 100
"""Maximum number of ways that are tried. Each may read all of a state before it fails, and the number of ways doubles
with each checkpoint of a chain that has two encodings. Our own writers make at most two or three for a checkpoint.
"""

_SUSPECT_COST: Final = 1e12
"""Seconds added for a segment that had an error: it is used only if there is no other way."""

_Top = tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class FailedWays:
    """What is known of the failed ways to one checkpoint.

    Attributes:
        count: number of failed ways.
        suspects: segments that had an error: other ways are tried first.
        unreadable: segments that cannot be opened.
        based: encodings that need something of their base.
        tops: beginnings of ways, from the wanted checkpoint downwards; every way with one of them fails.
        without_memory: a way that began with a state in memory has failed: no such state is used any more.
    """

    count: int = 0
    suspects: frozenset[str] = frozenset()
    unreadable: frozenset[str] = frozenset()
    based: frozenset[Edge] = frozenset()
    tops: frozenset[_Top] = frozenset()
    without_memory: bool = False

    def with_based(self, based: Collection[Edge]) -> FailedWays:
        """The same, plus encodings that are known to need something of their base."""
        return replace(self, based=self.based.union(based))

    def failed(
        self,
        top: Iterable[Encoding],
        suspects: Iterable[str],
        *,
        unreadable: Iterable[str] = (),
        without_memory: bool = False,
    ) -> FailedWays:
        """These, and one more failed way.

        Args:
            top: its encodings from the wanted one down to the faulty one; empty if the other arguments suffice.
            suspects: more segments that had an error.
            unreadable: more segments that cannot be opened.
            without_memory: the way began with a state in memory, which may be at fault.
        """
        named = tuple(map(edge_of, top))
        return replace(
            self,
            count=self.count + 1,
            suspects=self.suspects.union(suspects, unreadable),
            unreadable=self.unreadable.union(unreadable),
            tops=self.tops | {named} if named else self.tops,
            without_memory=self.without_memory or without_memory,
        )


NO_FAILED_WAYS: Final = FailedWays()


@dataclass(frozen=True, slots=True)
class _SearchState:
    """A state of the search from the wanted checkpoint downwards.

    Attributes:
        node: the checkpoint to reach next.
        top: the encodings so far, if a failed way begins with them; else None.
        read: whether segments are opened here, as far as is known.
    """

    node: Node
    top: _Top | None
    read: bool


def next_way(
    catalog: Catalog,
    target: CheckpointId,
    tried: FailedWays,
    cost: Cost | None = None,
    held: Collection[CheckpointId] = (),
) -> Plan:
    """The cheapest way to `target` that has not failed; ways without a suspect segment come before all others.

    Args:
        catalog, target, cost, held: see `restore_plan`.

    Raises:
        CorruptLogError, CorruptSegmentError: there is none, or `MOST_WAYS` have failed.
    """
    if tried.count >= MOST_WAYS:
        raise no_way_error(catalog, target, tried.suspects)
    search = _WaySearch(catalog, tried, cost or restore_seconds(catalog), () if tried.without_memory else held)
    found = search.run(target.node)
    if found is None:
        raise no_way_error(catalog, target, tried.suspects)
    return Plan(target, *found)


class _WaySearch:
    """Dijkstra's algorithm over places, from the wanted checkpoint downwards."""

    def __init__(self, catalog: Catalog, tried: FailedWays, cost: Cost, held: Collection[CheckpointId]) -> None:
        self._catalog = catalog
        self._tried = tried
        self._cost = cost
        self._held = {one.node: one for one in held}
        self._beginnings = {top[:length] for top in tried.tops for length in range(len(top))}

    def run(self, goal: Node) -> tuple[tuple[Encoding, ...], float] | None:
        """The encodings of the cheapest way, in the order of application, and its cost."""
        order = itertools.count()  # breaks ties: the first one wins
        came: dict[_SearchState, tuple[Encoding, _SearchState]] = {}
        start = _SearchState(goal, (), True)
        waiting: list[tuple[float, int, _SearchState | None, tuple[Encoding, _SearchState] | None]] = [
            (0.0, next(order), start, None)
        ]
        settled: set[_SearchState] = set()
        while waiting:
            total, _, place, last = heapq.heappop(waiting)
            if place is None:
                assert last is not None
                return self._way(last, came), total
            if place in settled:
                continue
            settled.add(place)
            if last is not None:
                came[place] = last
            for encoding, below in self._edges(place):
                step = total + self._price(encoding)
                heapq.heappush(waiting, (step, next(order), below, (encoding, place)))
        return None

    def _edges(self, place: _SearchState) -> Iterator[tuple[Encoding, _SearchState | None]]:
        """The encodings that lead to a place, each with the place below it; None: nothing or a held state is below."""
        for encoding in self._catalog.encodings.get(place.node, ()):
            if not usable(self._catalog, encoding, frozenset(), list(self._held.values())):
                continue
            if place.read and not self._tried.unreadable.isdisjoint(encoding.segments):
                continue
            edge = edge_of(encoding)
            top = None if place.top is None else (*place.top, edge)
            # Prevents: the same failure again while no other way is tried; an endless loop in a cycle of encodings.
            if top in self._tried.tops or edge in (place.top or ()):
                continue
            below = base_node(encoding)
            if below is None or (below in self._held and self._held[below] == encoding.base):
                yield encoding, None
                continue
            rest = top if top in self._beginnings else None
            yield encoding, _SearchState(below, rest, place.read and edge in self._tried.based)

    def _price(self, encoding: Encoding) -> float:
        return self._cost(encoding) + _SUSPECT_COST * len(self._tried.suspects.intersection(encoding.segments))

    def _way(
        self, last: tuple[Encoding, _SearchState], came: dict[_SearchState, tuple[Encoding, _SearchState]]
    ) -> tuple[Encoding, ...]:
        encodings = [last[0]]
        place = last[1]
        while place in came:
            encoding, place = came[place]
            encodings.append(encoding)
        return tuple(encodings)
