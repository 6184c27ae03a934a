"""Making a wanted history somewhere else: terms, segments, checkpoints and tags, in an order that can be gone on with.

For every term, ascending: its OPEN; then, in batches by step, the segments of its checkpoints' encodings, durable, and
a COMMIT that names them. What must be known to the log and is not kept (what a term continued from, bases that nobody
promises) is promised and retired again, as it was where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ckptstore.errors import UsageError
from ckptstore.formats.catalog import CLOSED, HIGHEST, LACKS, REACHED, Catalog, TermEntry
from ckptstore.formats.records import (
    CheckpointEntry,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    SegmentEntry,
    ref_of,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.log.log_copy import Replica
from ckptstore.maintenance.copies.copy_selection import known_to

__all__ = ["Supply", "Transfer"]

_BATCH_BYTES: Final = 256 << 20
_BATCH: Final = 256
"""What is copied again at most after a crash: so many bytes, of so many checkpoints."""


class Supply(Protocol):
    """Where segments come from."""

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """Make these segments durable in the new place. Raises `CorruptSegmentError`, `StorageError`."""


@dataclass
class _Unit:
    """What goes together: a checkpoint, if it is still to be promised, and encodings, of it or of an older one."""

    step: int
    checkpoint: CheckpointEntry | None
    edges: list[Encoding] = field(default_factory=list)


class Transfer:
    """Brings a wanted catalog to a `Replica`."""

    def __init__(
        self,
        wanted: Catalog,
        replica: Replica,
        supply: Supply,
        lacks: Mapping[int, int] | None = None,
        source: Catalog | None = None,
    ) -> None:
        """
        Args:
            wanted: terms, checkpoints (promised and held), encodings, segments and tags that are to be there in the
                end, besides what is. Every encoding's segments and base are in it.
            lacks: term -> the lowest step that is left out, although the place may be taken for one that has all: noted
                there.
            source: what `wanted` was chosen from: all of a store; None: whatever is there and not in `wanted` is not
                promised any more.
        """
        self._wanted = wanted
        self._replica = replica
        self._supply = supply
        self._lacks = lacks or {}
        self._source = source
        self._orders = _by_term(wanted, replica.catalog)
        self._added: set[Node] = set()

    def missing(self) -> list[SegmentEntry]:
        """The segments that are to be brought."""
        return [entry for entry in self._wanted.segments.values() if entry.id not in self._replica.catalog.segments]

    def run(self) -> None:
        """Do it.

        Raises:
            UsageError: what is there cannot become this: it went on by itself, or is too new for what is to be added.
            TakenError: another process adds to the place.
            CorruptSegmentError: of `Supply`. What was brought so far stays.
            StorageError: a medium failed.
        """
        self._check()
        for number, opened in sorted(self._wanted.terms.items()):
            self._open(opened)
            self._note_lacking(number)
            self._fill(number)
            self._close(opened)
        self._settle()

    def _check(self) -> None:
        there, url = self._replica.catalog, self._replica.backend.url
        for number, opened in there.terms.items():
            ours = self._wanted.terms.get(number)
            if ours is None and not self._replica.begun:
                continue  # of checkpoints that are not asked for this time
            if ours is None or ours.nonce != opened.nonce:
                raise UsageError(
                    f"{url}: it went on by itself in term {number}, a branch of the run by now; copy to another place"
                )
        if self._replica.begun and self._source is not None:
            known = known_to(self._source)
            for node in there.checkpoints:
                if not known(node):
                    # Prevents: what was copied of a store that has more of the run, perhaps by somebody who is at it
                    # now, taken for something that is not promised any more, and retired.
                    raise UsageError(
                        f"{url}: the unfinished copy that is there has {ref_of(node)}, which this store never had: it "
                        "is made of one that has gone on further; finish it from there, or copy to another place"
                    )
        for node, entry in (*self._wanted.checkpoints.items(), *self._wanted.held.items()):
            found = there.find(node)
            if found is not None and found.state != entry.state:
                raise UsageError(f"{url}: its {entry.ref} is another state than the one to be copied")
        late = [number for number, units in self._orders.items() if number < there.term and _left(units, there)]
        unpromised = [node for node in self._wanted.checkpoints if node in there.held]
        if late or unpromised:
            what = (
                f"what is to be added is of term {late[0]}" if late else f"{ref_of(unpromised[0])} is there as a base"
            )
            raise UsageError(f"{url}: it has term {there.term} already, and {what}; copy to an empty place")

    def _open(self, opened: TermEntry) -> None:
        there = self._replica.catalog
        if opened.term in there.terms:
            return
        extra = {name: value for name, value in opened.extra.items() if name not in (CLOSED, HIGHEST, REACHED)}
        if (reached := there.reached()) is not None:  # here, which may not be as far as where it comes from
            extra[REACHED] = reached
        self._replica.open(
            OpenRecord(
                opened.term,
                opened.parent,
                opened.nonce,
                opened.time,
                opened.writer,
                extra=extra,
            )
        )

    def _note_lacking(self, number: int) -> None:
        """Say what of a term is left out, before anything above it is there.

        Prevents: whoever opens the next term, on whatever machine and after whatever crash, says that the term had come
        further than that, and what was never here is taken for something that was retired here.
        """
        there, step = self._replica.catalog, self._lacks.get(number)
        if step is None or number != there.term:
            return
        known = there.terms[number].extra.get(LACKS)
        if type(known) is not int or step < known:
            self._replica.commit(CommitRecord(term=number, extra={LACKS: step}))

    def _fill(self, number: int) -> None:
        there = self._replica.catalog
        for batch in _batches(_left(self._orders.get(number, []), there), self._wanted, there):
            needed = dict.fromkeys(segment for unit in batch for edge in unit.edges for segment in edge.segments)
            entries = [self._wanted.segments[one] for one in needed if one not in there.segments]
            self._supply.bring(entries)
            crash_point("copy.brought")
            self._replica.commit(
                CommitRecord(
                    term=number,
                    segments=tuple(entries),
                    checkpoints=tuple(unit.checkpoint for unit in batch if unit.checkpoint is not None),
                    encodings=tuple(edge for unit in batch for edge in unit.edges),
                )
            )
            self._added.update(unit.checkpoint.node for unit in batch if unit.checkpoint is not None)

    def _close(self, opened: TermEntry) -> None:
        there = self._replica.catalog.terms[opened.term]
        if opened.term == self._replica.catalog.term and CLOSED in opened.extra and CLOSED not in there.extra:
            self._replica.commit(CommitRecord(term=opened.term, extra={CLOSED: True}))

    def _settle(self) -> None:
        """What is known at the end: which checkpoints are promised no longer, the tags, the rules of retention."""
        there = self._replica.catalog
        if not there.term:
            return
        retires = tuple(node for node in there.checkpoints if self._is_spent(node))
        tags = {name: node for name, node in self._wanted.tags.items() if there.tags.get(name) != node}
        known = self._wanted.keep_seq >= 0 and self._wanted.keep != there.keep
        keep = self._wanted.keep if known else None
        if retires or tags or keep is not None:
            self._replica.commit(CommitRecord(term=there.term, retires=retires, tags=tags, keep=keep))

    def _is_spent(self, node: Node) -> bool:
        """Whether a promised checkpoint is there only because something needs, or needed, it."""
        if node in self._wanted.checkpoints:
            return False
        if self._replica.begun:
            return True
        # In a place that was a store before, what was not promised just now was asked for another time.
        there = self._replica.catalog
        return node in self._added or not there.restorable(there.checkpoints[node].id)


def _by_term(wanted: Catalog, there: Catalog) -> dict[int, list[_Unit]]:
    """Term -> what its COMMITs say, by step. An encoding is of the term of its newest segment."""
    orders: dict[int, dict[Node, _Unit]] = {}
    # What a term continued from has to be promised when it begins, if nothing else is known of it but its name.
    parents = [one.parent for one in wanted.terms.values() if one.parent is not None and one.term not in there.terms]
    entries = {one.node: CheckpointEntry(one.term, one.step, one.state, 0.0, 0, 0) for one in parents}
    for table in (wanted.held, wanted.checkpoints):
        entries |= dict(table.items())
    for node, entry in entries.items():
        orders.setdefault(node[0], {})[node] = _Unit(node[1], entry)
    for node, edges in wanted.encodings.items():
        for edge in edges:
            home = max(wanted.segments[segment].term for segment in edge.segments)
            orders.setdefault(home, {}).setdefault(node, _Unit(node[1], None)).edges.append(edge)
    return {term: sorted(units.values(), key=lambda unit: unit.step) for term, units in orders.items()}


def _left(units: Iterable[_Unit], there: Catalog) -> list[_Unit]:
    """What of these is not there yet."""
    found: list[_Unit] = []
    for unit in units:
        entry = unit.checkpoint
        known = entry is not None and there.find(entry.node) is not None
        node = entry.node if entry is not None else unit.edges[0].checkpoint
        have = {(edge.segments, edge.base) for edge in there.encodings.get(node, ())}
        edges = [edge for edge in unit.edges if (edge.segments, edge.base) not in have]
        if edges or (entry is not None and not known):
            found.append(_Unit(unit.step, None if known else entry, edges))
    return found


def _batches(units: Sequence[_Unit], wanted: Catalog, there: Catalog) -> Iterator[list[_Unit]]:
    """Units in groups, each worth a COMMIT."""
    batch: list[_Unit] = []
    nbytes = 0
    seen: set[str] = set()
    for unit in units:
        new = {one for edge in unit.edges for one in edge.segments if one not in seen and one not in there.segments}
        size = sum(wanted.segments[one].size for one in new)
        if batch and (len(batch) == _BATCH or nbytes + size > _BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(unit)
        nbytes += size
        seen |= new
    if batch:
        yield batch
