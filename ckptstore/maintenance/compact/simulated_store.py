"""Simulates a store: applies moves to a catalog of its own, with estimated sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from ckptstore.errors import CorruptionError
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import users
from ckptstore.formats.history.records import CheckpointEntry, CommitRecord, Encoding, Node, SegmentEntry
from ckptstore.maintenance.compact.moves import Kind, Move, Rewrite
from ckptstore.restore.restore_plan import TYPICAL, Plan, Rates, plan, restore_seconds

__all__ = ["SimulatedStore"]

_MADE: Final = "c0ffee00c0ffee00"
"""Prefix of the ids of simulated segments."""


class SimulatedStore:
    """A store after the moves so far.

    Attributes:
        catalog: its catalog, which changes with every move.
        nbytes: bytes of all its segments.
    """

    def __init__(self, catalog: Catalog, rates: Rates) -> None:
        """
        Args:
            rates: used to compute the seconds of a restore.
        """
        self._builder = CatalogBuilder(catalog)
        self.catalog = self._builder.catalog
        self.nbytes = sum(segment.size for segment in catalog.segments.values())
        self._seconds = restore_seconds(self.catalog, rates)
        self._choice = restore_seconds(self.catalog, TYPICAL)  # as a load will choose
        taken = [int(one.removeprefix(_MADE), 16) for one in catalog.segments if one.startswith(_MADE)]
        self._made = max(taken, default=0) + 1  # the catalog may itself come from a simulated store

    # -- queries

    def entry(self, node: Node) -> CheckpointEntry:
        """Return a checkpoint, promised or held."""
        found = self.catalog.find(node)
        assert found is not None, node
        return found

    def chain(self, node: Node) -> Plan | None:
        """Return the plan that restores a checkpoint; None: there is none."""
        try:
            return plan(self.catalog, self.entry(node).id, self._choice)
        except CorruptionError:
            return None

    def seconds(self, encodings: Iterable[Encoding]) -> float:
        """Return the seconds that applying these encodings takes."""
        return sum(map(self._seconds, encodings))

    def apart(self, node: Node, others: Collection[Node]) -> Plan | None:
        """Return the plan that restores a kept checkpoint through another encoding, without segments of `others`.

        None: it has no other encoding, or that one needs their segments.
        """
        if len(self.catalog.encodings.get(node, ())) < 2:
            return None
        theirs = {
            segment for one in others for edge in self.catalog.encodings.get(one, ()) for segment in edge.segments
        }
        try:
            return plan(self.catalog, self.entry(node).id, self._choice, frozenset(theirs))
        except CorruptionError:
            return None

    def edge(self, rewrite: Rewrite, segment: str = "") -> Encoding:
        """Return the encoding that a rewrite makes."""
        base = None if rewrite.base is None else self.entry(rewrite.base).id
        chain = self.chain(rewrite.node)
        lossy = chain is not None and chain.encodings[-1].lossy
        kind = "full" if base is None else "delta"
        return Encoding(rewrite.node, kind, base, (segment,), lossy, rewrite.nbytes)

    def bases(self, node: Node) -> set[Node]:
        """Return the bases of a checkpoint's encodings."""
        return {edge.base.node for edge in self.catalog.encodings.get(node, ()) if edge.base is not None}

    def dependents(self, node: Node) -> list[Node]:
        """Return the checkpoints that have an encoding against this one, ascending."""
        return sorted(other for other in self.catalog.edges().dependents(node) if node in self.bases(other))

    def sharers(self, node: Node) -> set[Node]:
        """Return the checkpoints that share a segment with this one's encodings, itself included."""
        edges = self.catalog.encodings.get(node, ())
        return {user for edge in edges for segment in edge.segments for user in users(self.catalog, segment)}

    def freed(self, renewed: Collection[Node], kept_bases: Collection[Node] = ()) -> tuple[str, ...]:
        """Return the ids of the segments that nothing needs once the checkpoints `renewed` are rewritten.

        Examines only them, what they build on, and checkpoints that share a segment with those.

        Args:
            kept_bases: the bases of the rewritten checkpoints.
        """
        below: set[Node] = set()
        wanted: set[Node] = set(kept_bases)
        stack = [other for node in renewed for other in (*self.bases(node), *self.sharers(node))]
        while stack:
            node = stack.pop()
            if node in below or node in self.catalog.checkpoints:
                continue
            below.add(node)
            stack += [*self.bases(node), *self.sharers(node)]
            for other in self.dependents(node):
                if other not in self.catalog.checkpoints:
                    stack.append(other)
                elif other not in renewed:
                    wanted.add(node)
        return self._alone({*renewed, *(below - self._reached(wanted, renewed))})

    def garbage(self) -> tuple[str, ...]:
        """Return the ids of the segments that no kept checkpoint needs."""
        return self._alone(set(self.catalog.held) - self._reached(self.catalog.checkpoints))

    def _reached(self, wanted: Iterable[Node], renewed: Collection[Node] = ()) -> set[Node]:
        """Return `wanted` and all that they build on. The encodings of `renewed` are given up, and not followed."""
        found: set[Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                if node not in renewed:
                    stack += self.bases(node)
        return found

    def _alone(self, nodes: set[Node]) -> tuple[str, ...]:
        segments = dict.fromkeys(
            segment
            for node in sorted(nodes)
            for edge in self.catalog.encodings.get(node, ())
            for segment in edge.segments
        )
        return tuple(
            segment
            for segment in segments
            if segment in self.catalog.segments and nodes.issuperset(users(self.catalog, segment))
        )

    def size(self, segments: Iterable[str]) -> int:
        """Return the bytes of segments."""
        return sum(self.catalog.segments[segment].size for segment in segments)

    def components(self) -> Iterator[frozenset[Node]]:
        """Yield groups of held checkpoints that build on one another or share a segment, by lowest node."""
        left = dict.fromkeys(sorted(self.catalog.held))
        while left:
            stack = [next(iter(left))]
            found: set[Node] = set()
            while stack:
                node = stack.pop()
                if node in found or node not in self.catalog.held:
                    continue
                found.add(node)
                left.pop(node, None)
                stack += [*self.bases(node), *self.dependents(node), *self.sharers(node)]
            yield frozenset(found)

    # -- changes

    def move(
        self,
        kind: Kind,
        why: str,
        rewrites: Sequence[Rewrite],
        drops: tuple[str, ...],
        *,
        required: bool = False,
        spared: Iterable[Node] = (),
    ) -> Move:
        """Make a move in this store, and return it."""
        before, nodes = self.nbytes, [rewrite.node for rewrite in rewrites]
        seconds_before = self._slowest(nodes)
        freed = self.size(drops)
        record = self.record(kind, rewrites, drops)
        self._builder.apply(record, self.catalog.next_seq)
        self.nbytes += sum(segment.size for segment in record.segments) - freed
        self._made += len(record.segments)
        return Move(
            kind,
            why,
            tuple(rewrites),
            drops,
            required,
            before,
            self.nbytes,
            seconds_before,
            self._slowest(nodes),
            tuple(sorted(spared)),
        )

    def record(self, kind: Kind, rewrites: Sequence[Rewrite], drops: tuple[str, ...]) -> CommitRecord:
        """Return the record that would commit a move."""
        segments, encodings = self._written(kind, rewrites)
        return CommitRecord(self.catalog.term, segments=tuple(segments), encodings=tuple(encodings), drops=drops)

    def _written(self, kind: Kind, rewrites: Sequence[Rewrite]) -> tuple[list[SegmentEntry], list[Encoding]]:
        if kind == "merge":  # one segment for all, with their present encodings
            segment = self._segment(0, sum(rewrite.nbytes for rewrite in rewrites))
            present = [self.catalog.encodings[rewrite.node][-1] for rewrite in rewrites]
            return [segment], [
                Encoding(edge.checkpoint, edge.kind, edge.base, (segment.id,), edge.lossy, edge.bytes)
                for edge in present
            ]
        segments = [self._segment(place, rewrite.nbytes) for place, rewrite in enumerate(rewrites)]
        return segments, [self.edge(rewrite, segment.id) for rewrite, segment in zip(rewrites, segments, strict=True)]

    def _segment(self, place: int, nbytes: int) -> SegmentEntry:
        identity = f"{_MADE}{self._made + place:0{32 - len(_MADE)}x}"
        return SegmentEntry(identity, max(1, self.catalog.term), nbytes, 0, "0" * 32)

    def _slowest(self, nodes: Iterable[Node]) -> float:
        chains = [chain for node in nodes if (chain := self.chain(node)) is not None]
        return max((self.seconds(chain.encodings) for chain in chains), default=0.0)
