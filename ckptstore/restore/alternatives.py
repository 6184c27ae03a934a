"""The ways to a checkpoint that are left when one has failed (SPEC 7.4: a reader must try the others).

A *way* is a sequence of encodings, each of which builds on what the one before it leads to. A failure excludes the
*top* of a way: its encodings from the wanted checkpoint down to the encoding that is at fault. Every way with that top
fails likewise. Another way through the same damaged segment need not: it may not need what is damaged there. So tops
are excluded, and not segments.

Two facts about an encoding are not in the log. They are learned when its segments are opened: whether they can be
opened, and whether the encoding needs anything of its base. If it needs nothing, nobody opens what is below it. Until
that is known, a way through segments that cannot be opened counts as a way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointId, Encoding, Node
from ckptstore.restore.restore_plan import Cost, Edge, Plan, base_node, edge_of, no_way, restore_seconds, usable

__all__ = ["MOST_WAYS", "UNTRIED", "Tried", "next_way"]

MOST_WAYS: Final = 100
"""Ways that are tried. Each may read all of a state before it fails, and the number of ways doubles with each
checkpoint of a chain that has two encodings. No store that our writers make has more than two or three to a checkpoint.
"""

_SUSPECTED: Final = 1e12
"""Seconds that a segment costs which something was wrong with: it is used where nothing else leads on."""

_Top = tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of the ways to one checkpoint that have failed.

    Attributes:
        count: how many.
        suspects: segments that something is wrong with: other ways are taken first.
        unreadable: segments that cannot be opened.
        based: encodings that need something of their base.
        tops: beginnings of ways, from the wanted checkpoint downwards, with which every way fails.
        unheld: ways that begin with a state that is held in memory have failed: none is used any more.
    """

    count: int = 0
    suspects: frozenset[str] = frozenset()
    unreadable: frozenset[str] = frozenset()
    based: frozenset[Edge] = frozenset()
    tops: frozenset[_Top] = frozenset()
    unheld: bool = False

    def knowing(self, based: Collection[Edge]) -> Tried:
        """The same, and that some encodings need something of their base."""
        return replace(self, based=self.based.union(based))

    def failed(
        self, top: Iterable[Encoding], suspects: Iterable[str], *, unreadable: Iterable[str] = (), unheld: bool = False
    ) -> Tried:
        """The same, and one way more.

        Args:
            top: its encodings from the wanted one down to the one that is at fault; none, if what follows says it all.
            suspects: more segments that something is wrong with.
            unreadable: more segments that cannot be opened.
            unheld: it began with a state in memory, which may be at fault.
        """
        named = tuple(map(edge_of, top))
        return replace(
            self,
            count=self.count + 1,
            suspects=self.suspects.union(suspects, unreadable),
            unreadable=self.unreadable.union(unreadable),
            tops=self.tops | {named} if named else self.tops,
            unheld=self.unheld or unheld,
        )


UNTRIED: Final = Tried()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a search from the wanted checkpoint downwards has come to.

    Attributes:
        node: the checkpoint that is to be reached.
        top: the encodings so far, while some failed way begins with them; None: none does.
        read: whether segments are opened here, as far as is known.
    """

    node: Node
    top: _Top | None
    read: bool


def next_way(
    catalog: Catalog,
    target: CheckpointId,
    tried: Tried,
    cost: Cost | None = None,
    held: Collection[CheckpointId] = (),
) -> Plan:
    """The cheapest way to `target` that has not failed; one without a suspected segment before all others.

    Args:
        catalog, target, cost, held: see `restore_plan`.

    Raises:
        CorruptLogError, CorruptSegmentError: there is none, or so many have failed that no more are tried.
    """
    if tried.count >= MOST_WAYS:
        raise no_way(catalog, target, tried.suspects)
    search = _Search(catalog, tried, cost or restore_seconds(catalog), () if tried.unheld else held)
    found = search.run(target.node)
    if found is None:
        raise no_way(catalog, target, tried.suspects)
    return Plan(target, *found)


class _Search:
    """Dijkstra from the wanted checkpoint downwards, over places."""

    def __init__(self, catalog: Catalog, tried: Tried, cost: Cost, held: Collection[CheckpointId]) -> None:
        self._catalog = catalog
        self._tried = tried
        self._cost = cost
        self._held = {one.node: one for one in held}
        self._beginnings = {top[:length] for top in tried.tops for length in range(len(top))}

    def run(self, goal: Node) -> tuple[tuple[Encoding, ...], float] | None:
        """The encodings of the cheapest way, in the order of application, and what they cost."""
        order = itertools.count()  # among equals the first one
        came: dict[_Place, tuple[Encoding, _Place]] = {}
        start = _Place(goal, (), True)
        waiting: list[tuple[float, int, _Place | None, tuple[Encoding, _Place] | None]] = [
            (0.0, next(order), start, None)
        ]
        settled: set[_Place] = set()
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
            for encoding, below in self._onwards(place):
                step = total + self._price(encoding)
                heapq.heappush(waiting, (step, next(order), below, (encoding, place)))
        return None

    def _onwards(self, place: _Place) -> Iterator[tuple[Encoding, _Place | None]]:
        """The encodings that lead to a place, each with the place below it; None: nothing, or a held state, is."""
        for encoding in self._catalog.encodings.get(place.node, ()):
            if not usable(self._catalog, encoding, frozenset(), list(self._held.values())):
                continue
            if place.read and not self._tried.unreadable.isdisjoint(encoding.segments):
                continue
            edge = edge_of(encoding)
            top = None if place.top is None else (*place.top, edge)
            # Prevents: the same failure once more, and no other way tried; endless rounds in a circle of encodings.
            if top in self._tried.tops or edge in (place.top or ()):
                continue
            below = base_node(encoding)
            if below is None or (below in self._held and self._held[below] == encoding.base):
                yield encoding, None
                continue
            rest = top if top in self._beginnings else None
            yield encoding, _Place(below, rest, place.read and edge in self._tried.based)

    def _price(self, encoding: Encoding) -> float:
        return self._cost(encoding) + _SUSPECTED * len(self._tried.suspects.intersection(encoding.segments))

    def _way(self, last: tuple[Encoding, _Place], came: dict[_Place, tuple[Encoding, _Place]]) -> tuple[Encoding, ...]:
        encodings = [last[0]]
        place = last[1]
        while place in came:
            encoding, place = came[place]
            encodings.append(encoding)
        return tuple(encodings)
