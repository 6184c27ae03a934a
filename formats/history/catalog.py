"""The catalog: the content of a store after all records of its log have been applied in order.

Checkpoints are nodes and encodings are edges. A checkpoint is *promised* from the COMMIT that adds it until the one
that retires it. A retired checkpoint is *held* while others build on it. Applying a record never fails, because a log
with a damaged slot must remain readable. `commit_checks` decides in advance whether a record may be written.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ckptstore.errors import CorruptLogError
from ckptstore.formats.history.columns import CheckpointRows, EncodingRows, SegmentRows, SlotRows
from ckptstore.formats.history.dependents import EdgeIndex
from ckptstore.formats.history.members import MAX_INT
from ckptstore.formats.history.records import (
    NO_SLOT,
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    Record,
    SegmentEntry,
    object_of,
)
from ckptstore.formats.history.spans import Spans
from ckptstore.formats.history.tables import NodeTable, Table
from ckptstore.formats.history.term_members import CLOSED, HIGHEST, LACKS, REACHED, REMOTE

__all__ = ["CLOSED", "HIGHEST", "LACKS", "REACHED", "REMOTE", "Catalog", "CatalogBuilder", "TermEntry"]

_MOST_FOUND: Final = 1024
"""The most checkpoints that a catalog remembers to be restorable."""


@dataclass(frozen=True, slots=True)
class TermEntry:
    """A term in the history.

    Attributes:
        parent: the checkpoint it continues from; None: it starts without one.
        time: Unix seconds; information only.
        writer: who opened it; information only.
        seq: the slot of its OPEN.
        known: False if the OPEN is damaged. Then parent, time and writer are unknown, and `seq` is its first COMMIT.
        nonce: the nonce of its OPEN; its COMMITs repeat it.
        parent_found: False if the parent was not promised when the term was opened: a COMMIT is lost.
    """

    term: int
    parent: CheckpointId | None
    time: float
    writer: Mapping[str, Any]
    seq: int
    known: bool = True
    nonce: str = ""
    parent_found: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def _checkpoints() -> NodeTable[CheckpointEntry]:
    return NodeTable(CheckpointRows())


def _encodings() -> NodeTable[tuple[Encoding, ...]]:
    return NodeTable(EncodingRows())


def _segments() -> Table[str, SegmentEntry]:
    return Table(SegmentRows())


def _slots() -> NodeTable[int]:
    return NodeTable(SlotRows())


@dataclass(slots=True)
class Catalog:
    """The state that results from the log. Read only, except for the `CatalogBuilder` that owns it.

    Attributes:
        term: the newest term; 0 before the first.
        next_seq: the slot after the last applied one.
        terms: term -> its OPEN.
        checkpoints: (term, step) -> promised checkpoint. Tables are in the order of their keys.
        slots: (term, step) of a promised checkpoint -> the slot that promised it.
        held: (term, step) -> retired checkpoint that still has encodings, because others build on it.
        encodings: (term, step) -> the ways to restore it, oldest first.
        segments: id -> live segment.
        dropped: ids of dropped segments of the newest term. (Dropped segments of older terms are just unreferenced.)
        spent: steps of the newest term whose checkpoint was retired. A (term, step) is never used twice.
        tags: name -> (term, step).
        requests: uuid -> None if accepted, else the reason for refusing it; requests answered in the newest term.
        manifests: id -> (term, slot) of manifest objects that a reader may still need.
        damage: slots that are damaged or missing, or do not continue the previous slot; ascending.
        lost: the highest term above `term` that has segments but no OPEN, which shows that the end of the log is lost;
            0: none. It comes from the current READ, not from the log, and no fold stores it.
        place: the path or URL that the store was opened with, for messages. It is not part of the log either.
        last: xxh3_128 of the bytes of the last slot, the `previous` of the next one; `NO_SLOT` in an empty log.
        ro_compat: features that a writer must know.
        unknown: (slot, members) of every record with members that this version does not know.
        keep: the retention rules (`ckptstore.formats.history.retention_rules`). Empty: every checkpoint is kept.
        keep_seq: the slot that set the rules; -1: none did.
    """

    term: int = 0
    next_seq: int = 0
    terms: dict[int, TermEntry] = field(default_factory=dict)
    checkpoints: NodeTable[CheckpointEntry] = field(default_factory=_checkpoints)
    slots: NodeTable[int] = field(default_factory=_slots)
    held: NodeTable[CheckpointEntry] = field(default_factory=_checkpoints)
    encodings: NodeTable[tuple[Encoding, ...]] = field(default_factory=_encodings)
    segments: Table[str, SegmentEntry] = field(default_factory=_segments)
    dropped: set[str] = field(default_factory=set)
    spent: Spans = field(default_factory=Spans)
    tags: dict[str, Node] = field(default_factory=dict)
    requests: dict[str, str | None] = field(default_factory=dict)
    manifests: dict[str, tuple[int, int]] = field(default_factory=dict)
    damage: tuple[int, ...] = ()
    lost: int = 0
    place: str = field(default="", repr=False, compare=False)
    last: str = NO_SLOT
    ro_compat: frozenset[str] = frozenset()
    unknown: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    keep: tuple[str, ...] = ()
    keep_seq: int = -1
    _edges: EdgeIndex | None = field(default=None, repr=False, compare=False)
    _found: set[Node] = field(default_factory=set, init=False, repr=False, compare=False)  # see `restorable`

    def apply(self, record: Record, seq: int) -> Catalog:
        """Return a new catalog with `record` from slot `seq` applied. This catalog does not change."""
        builder = CatalogBuilder(self)
        builder.apply(record, seq)
        return builder.catalog

    def edges(self) -> EdgeIndex:
        """The index of the encodings. It is built at the first call and kept up to date from then on."""
        if self._edges is None or self._edges.rows is not self.encodings.rows:
            self._edges = EdgeIndex(self.encodings)
        return self._edges

    def bases(self, node: Node) -> set[Node]:
        """Return the checkpoints that the encodings of `node` are against."""
        return {edge.base.node for edge in self.encodings.get(node, ()) if edge.base is not None}

    def dependents(self, node: Node) -> list[Node]:
        """Return the checkpoints with a live encoding against `node`."""
        return [other for other in self.edges().dependents(node) if node in self.bases(other)]

    def find(self, node: Node) -> CheckpointEntry | None:
        """Return the checkpoint, promised or held; None if there is none."""
        return self.checkpoints.get(node) or self.held.get(node)

    def restorable(self, identity: CheckpointId) -> bool:
        """Whether a path of live encodings leads to exactly this checkpoint, promised or held.

        The search ends at a checkpoint for which a path was found before. `CatalogBuilder` forgets those whose path a
        record may have removed. So what a save asks does not take longer with each save of its chain.
        """
        entry = self.find(identity.node)
        if entry is None or entry.state != identity.state:
            return False
        stack, seen = [identity.node], {identity.node}
        while stack:
            node = stack.pop()
            if node in self._found:
                return self._note_found(identity.node)
            for edge in self.encodings.get(node, ()):
                if edge.base is None:
                    return self._note_found(identity.node)
                base = self.find(edge.base.node)
                if base is not None and base.state == edge.base.state and base.node not in seen:
                    seen.add(base.node)
                    stack.append(base.node)
        return False

    def _note_found(self, node: Node) -> bool:
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found.add(node)
        return True

    def reached(self) -> int | None:
        """Return the highest step that the newest term ever promised, limited to the steps below its first gap.

        A gap is a step that is missing from this copy of the log (member `LACKS`). None: there is no such step.
        """
        node = self.checkpoints.highest(self.term)
        highest = max((step for step in (node and node[1], self.spent.highest) if step is not None), default=None)
        lacks = self.terms[self.term].extra.get(LACKS) if self.term in self.terms else None
        if highest is None or type(lacks) is not int:
            return highest
        return min(highest, lacks - 1) if lacks > 0 else None

    def with_highest(self, record: CommitRecord) -> CommitRecord:
        """Return `record`, of the newest term, with member `HIGHEST` if it adds a step below an already promised one.

        Prevents: an older step as ``latest`` if the COMMIT of the highest step is lost and this COMMIT came after it.
        """
        node = self.checkpoints.highest(self.term)
        highest = max(self.spent.highest or 0, 0 if node is None else node[1])
        if all(checkpoint.step >= highest for checkpoint in record.checkpoints):
            return record
        return replace(record, extra={**record.extra, HIGHEST: highest})

    def latest(self) -> CheckpointEntry | None:
        """Return the newest checkpoint: the highest step of the newest term, or the term's parent if it has no step.

        If that checkpoint is retired, return the nearest one before it on its line of parents.

        Raises:
            CorruptLogError: a newer checkpoint may be lost: a damaged slot may have promised it, or the newest term
                continues from one that the log does not have. Names the slot and the last intact checkpoint.
        """
        found, searched = self._newest_on_line()
        if self.lost > self.term:
            raise self._uncertain(
                f"there are segments of term {self.lost}, but the log ends in term {self.term}: its end is lost, or an "
                "older copy was put back",
                found,
            )
        if orphan := self._orphan(found):
            raise self._uncertain(
                f"term {orphan.term} continues from {orphan.parent and orphan.parent.ref}, which the log no longer "
                "holds: the record that promised it is damaged or lost",
                found,
            )
        certain = self._certain(found, searched)
        if hidden := [seq for seq in self.damage if seq > certain]:
            raise self._uncertain(f"log slot {hidden[0]} is damaged, so the newest checkpoint is not known", found)
        return found

    def _certain(self, found: CheckpointEntry | None, searched: TermEntry | None) -> int:
        """Return the slot up to which damage cannot have changed the answer, `found`.

        This is the OPEN of the term that was searched last: the term's steps were promised after it, and the OPEN names
        the parent. In the newest term it is the COMMIT of the highest step that the term ever promised, if no COMMIT
        says that there was a higher one. -1: any damage may have changed the answer. See SPEC.md 7.4.
        """
        if found is not None and found.term == self.term:
            highest = max(self.spent.highest or 0, self.terms[self.term].extra.get(HIGHEST, 0))
            if highest <= found.step:
                return self.slots[found.node]
        return searched.seq if searched is not None and searched.known else -1

    def _uncertain(self, why: str, found: CheckpointEntry | None) -> CorruptLogError:
        """Return the error of `latest`, with `why`, and a checkpoint to name instead.

        That checkpoint is `found` (the answer if nothing were damaged), else the newest one. If there is none, the
        error has a hint how to repair the store.
        """
        if found is None and self.checkpoints:
            found = self.checkpoints[max(self.checkpoints)]
        if found is not None:
            which = f"the last intact checkpoint is {found.ref}"
            return CorruptLogError(f"{why}; {which}. Name a checkpoint to load it, or to continue from it")
        error = CorruptLogError(f"{why}; no checkpoint is intact")
        error.add_note(self.remedy())
        return error

    def remedy(self) -> str:
        """Return a command that recovers a store whose log has lost every checkpoint, ready to paste."""
        place = shlex.quote(self.place) if self.place else "STORE"
        return f"`ckpt repair {place} DST` builds a store from what the segments still contain"

    def _orphan(self, found: CheckpointEntry | None) -> TermEntry | None:
        """Return the newest term on the way to `found` whose parent was lost before the term began."""
        term = self.term
        while (entry := self.terms.get(term)) is not None and (found is None or found.term != term):
            if not entry.parent_found:
                return entry
            if entry.parent is None:
                break
            term = entry.parent.term
        return None

    def _newest_on_line(self) -> tuple[CheckpointEntry | None, TermEntry | None]:
        """Return `latest` as if nothing were lost, and the term whose steps were searched last.

        If the answer is the parent of a term, the parent's own term is not searched: an intact OPEN names the parent.
        """
        term, highest = self.term, MAX_INT
        searched = None
        while entry := self.terms.get(term):
            searched = entry
            node = self.checkpoints.highest(term, highest)
            if node is not None:
                return self.checkpoints[node], searched
            if entry.parent is None:
                return None, searched
            if (parent := self.checkpoints.get(entry.parent.node)) is not None:
                return parent, searched
            term, highest = entry.parent.term, entry.parent.step
        return None, None

    def stored_bytes(self) -> int:
        """Return the bytes of all segments of the log, computed from columns without creating an entry for each."""
        rows = self.segments.rows
        sizes: Any = rows.columns[2] if len(rows) else ()
        total: int = sum(sizes)
        for identity, entry in self.segments.changes.items():
            start, stop = rows.find(identity)
            total += (0 if entry is None else entry.size) - sum(sizes[start:stop])
        return total

    def collectable(self, key: str) -> bool:
        """Whether gc may delete this object below ``seg/`` if no pin names it (SPEC.md 10, GC 3).

        It may if the object is dropped, or unreferenced and of a term below the newest. While a slot is damaged, that
        slot may have promised an unreferenced object, so only dropped ones may go. Objects of a term that the log does
        not have may belong to a lost end of the log, so they stay, too.
        """
        place = object_of(key)
        if place is None:  # no store writes such a key
            return False
        term, identity = place
        if identity in self.segments or identity in self.manifests:
            return False
        return identity in self.dropped or (term < self.term and term in self.terms and not self.damage)


class CatalogBuilder:
    """A catalog to which records are applied in place. It belongs to one reading session or one term.

    Attributes:
        catalog: the current catalog. It changes with every record; pass `snapshot()` to other threads.
    """

    def __init__(self, base: Catalog | None = None) -> None:
        """Start from a snapshot of `base`, or from an empty log."""
        self.catalog = Catalog() if base is None else _copied(base)

    def snapshot(self) -> Catalog:
        """Return a copy that does not change. Old rows are shared with it, recent changes are copied."""
        return _copied(self.catalog)

    def apply(self, record: Record, seq: int, digest: str = NO_SLOT) -> None:
        """Apply the record in slot `seq`, whose bytes have the hash `digest`. Never fails, whatever the record says."""
        catalog = self.catalog
        catalog.next_seq, catalog.last = seq + 1, digest
        catalog.ro_compat |= frozenset(record.ro_compat)
        if isinstance(record, OpenRecord):
            promised = None if record.parent is None else catalog.checkpoints.get(record.parent.node)
            found = record.parent is None or (promised is not None and promised.state == record.parent.state)
            about = (record.parent, record.time, record.writer, seq)
            self._begin_term(TermEntry(record.term, *about, True, record.nonce, found, record.extra))
            return
        if record.term > catalog.term:  # its OPEN was in a damaged slot
            self._begin_term(TermEntry(record.term, None, 0.0, {}, seq, known=False, nonce=record.nonce))
        extra = dict(record.extra)
        self._mark_closed(record, extra.pop(CLOSED, None) is True)
        self._mark(record.term, LACKS, extra.pop(LACKS, None), min)  # it may be unaware of lower gaps
        self._mark(record.term, HIGHEST, extra.pop(HIGHEST, None), max)
        if extra:
            catalog.unknown += ((seq, extra),)
        if record.keep is not None:
            catalog.keep, catalog.keep_seq = record.keep, seq
        if record.manifest is not None:
            catalog.manifests[record.manifest] = (record.term, seq)
        self._add(record, seq)
        for node in record.retires:
            self._retire(node)
        self._forget_paths({node for segment in record.drops for node in self._drop(segment)})
        for name, tagged in record.tags.items():
            if tagged is None:
                catalog.tags.pop(name, None)
            else:
                catalog.tags[name] = tagged
        catalog.requests.update(record.requests)
        catalog.dropped.difference_update(record.swept)
        for table in _tables(catalog):
            table.consolidate()

    def mark_damaged(self, seq: int, digest: str = NO_SLOT) -> None:
        """Note that slot `seq` is damaged or lost, and continue with the slot after it.

        Args:
            seq: the damaged slot.
            digest: hash of its present bytes, which the next slot's `previous` would be; `NO_SLOT` if it has none.
        """
        self.catalog.damage += (seq,)
        self.catalog.next_seq, self.catalog.last = seq + 1, digest

    def _mark_closed(self, record: CommitRecord, closed: bool) -> None:
        """Update whether the term is closed: a COMMIT with `CLOSED` closes it, one that adds checkpoints reopens it."""
        terms = self.catalog.terms
        entry = terms.get(record.term)
        if entry is None:
            return  # a stray: readers refuse it earlier, and applying never fails
        if closed:
            terms[record.term] = replace(entry, extra={**entry.extra, CLOSED: True})
        elif record.checkpoints and CLOSED in entry.extra:
            left = {name: value for name, value in entry.extra.items() if name != CLOSED}
            terms[record.term] = replace(entry, extra=left)

    def _mark(self, term: int, name: str, step: object, choose: Callable[[int, int], int]) -> None:
        """Store `step` as member `name` of a term; if it has one already, store the one that `choose` returns."""
        entry = self.catalog.terms.get(term)
        if entry is None or type(step) is not int:
            return
        known = entry.extra.get(name)
        kept = choose(step, known) if type(known) is int else step
        self.catalog.terms[term] = replace(entry, extra={**entry.extra, name: kept})

    def _begin_term(self, entry: TermEntry) -> None:
        catalog = self.catalog
        catalog.term = entry.term
        catalog.terms[entry.term] = entry
        # Only the newest term's writer and gc use these. Unreferenced objects of older terms may be deleted anyway.
        catalog.dropped.clear()
        catalog.spent.clear()
        catalog.requests.clear()

    def _add(self, record: CommitRecord, seq: int) -> None:
        catalog = self.catalog
        for segment in record.segments:
            catalog.segments[segment.id] = segment
        for checkpoint in record.checkpoints:
            before = catalog.checkpoints.get(checkpoint.node)
            catalog.checkpoints[checkpoint.node] = checkpoint
            catalog.slots[checkpoint.node] = seq
            # Prevents: a fold that every reader ignores because it has a checkpoint both as promised and as held.
            held = catalog.held.pop(checkpoint.node, None)
            # Prevents: a path through a checkpoint whose state is another one now, as a damaged log can say.
            if before is not None or held is not None:
                catalog._found.clear()
        added: dict[Node, list[Encoding]] = {}  # grouped, because one checkpoint may get a million of them
        for edge in record.encodings:
            added.setdefault(edge.checkpoint, []).append(edge)
            if catalog._edges is not None:
                catalog._edges.add(edge)
        for node, edges in added.items():
            catalog.encodings[node] = (*catalog.encodings.get(node, ()), *edges)

    def _retire(self, node: Node) -> None:
        catalog = self.catalog
        entry = catalog.checkpoints.pop(node, None)
        catalog.slots.pop(node, None)
        if entry is not None and node in catalog.encodings:
            catalog.held[node] = entry
        if node[0] == catalog.term:
            catalog.spent.add(node[1])

    def _drop(self, segment: str) -> list[Node]:
        """Drop a segment, with the encodings that read it -> the checkpoints that had those."""
        catalog = self.catalog
        entry = catalog.segments.pop(segment, None)
        if entry is None or entry.term == catalog.term:
            catalog.dropped.add(segment)
        index = catalog.edges()
        nodes = list(index.users(segment))
        for node in nodes:
            edges = catalog.encodings.get(node, ())
            kept = tuple(edge for edge in edges if segment not in edge.segments)
            for edge in edges:
                if segment in edge.segments:
                    index.remove(edge, kept)
            if kept:
                catalog.encodings[node] = kept
            else:
                catalog.encodings.pop(node, None)
                catalog.held.pop(node, None)
        return nodes

    def _forget_paths(self, nodes: set[Node]) -> None:
        """Forget the paths that led through encodings which `nodes` had until now."""
        catalog = self.catalog
        catalog._found.difference_update(nodes)
        # Prevents: a checkpoint that counts as restorable after a segment on its path was dropped.
        if catalog._found and any(catalog.dependents(node) for node in nodes):
            catalog._found.clear()


def _tables(catalog: Catalog) -> tuple[Table[Any, Any], ...]:
    return (catalog.checkpoints, catalog.slots, catalog.held, catalog.encodings, catalog.segments)


def _copied(catalog: Catalog) -> Catalog:
    """Return a copy with its own changes, dictionaries and sets. Rows are shared; the indexes are not copied."""
    twin = copy.copy(catalog)
    for name in ("terms", "checkpoints", "slots", "held", "encodings", "segments", "dropped", "spent", "tags"):
        setattr(twin, name, getattr(catalog, name).copy())
    twin.requests, twin.manifests = dict(catalog.requests), dict(catalog.manifests)
    twin._edges, twin._found = None, set()
    return twin
