"""Writes a given history (terms, segments, checkpoints, tags) to another place, in an order that can be resumed.

For every term, ascending, it writes the OPEN. Then, in batches by step, it makes the segments of the checkpoints
durable and writes a COMMIT that names them. Some checkpoints must be in the log but are not kept: parents of terms, and
held bases. They are promised and retired again, as in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ckptstore.errors import UsageError
from ckptstore.formats.history.catalog import CLOSED, HIGHEST, LACKS, REACHED, Catalog, TermEntry
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    SegmentEntry,
    ref_of,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.log.log_copy import LogCopy
from ckptstore.maintenance.copies.copy_selection import known_to

__all__ = ["Supply", "Transfer"]

_BATCH_BYTES: Final = 256 << 20
_BATCH: Final = 256
"""At most this many bytes, of this many checkpoints, are copied again after a crash."""


class Supply(Protocol):
    """A source of segments."""

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """Make these segments durable in the new place. Raises `CorruptSegmentError`, `StorageError`."""


@dataclass
class _Unit:
    """What one COMMIT keeps together: a checkpoint, if it is not promised yet, and encodings of it or older ones."""

    step: int
    checkpoint: CheckpointEntry | None
    edges: list[Encoding] = field(default_factory=list)


class Transfer:
    """Writes a wanted catalog to a `LogCopy`."""

    def __init__(
        self,
        wanted: Catalog,
        replica: LogCopy,
        supply: Supply,
        lacks: Mapping[int, int] | None = None,
        source: Catalog | None = None,
    ) -> None:
        """
        Args:
            wanted: the terms, checkpoints (promised and held), encodings, segments and tags to add to the place. It
                includes the segments and the base of every encoding.
            lacks: term -> the lowest omitted step. It is recorded in the place, which would otherwise look complete.
            source: the whole catalog that `wanted` was chosen from; None: checkpoints that are there but not in
                `wanted` are retired.
        """
        self._wanted = wanted
        self._replica = replica
        self._supply = supply
        self._lacks = lacks or {}
        self._source = source
        self._orders = _by_term(wanted, replica.catalog)
        self._added: set[Node] = set()

    def missing(self) -> list[SegmentEntry]:
        """Return the segments to copy."""
        return [entry for entry in self._wanted.segments.values() if entry.id not in self._replica.catalog.segments]

    def run(self) -> None:
        """Run the transfer.

        Raises:
            UsageError: the place cannot become this: it has been written to, or its term is newer than the additions.
            TakenError: another process adds to the place.
            CorruptSegmentError: raised by `Supply`. What was copied so far stays.
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
                continue  # its checkpoints are not requested this time
            if ours is None or ours.nonce != opened.nonce:
                raise UsageError(
                    f"{url}: it was written to in term {number}, and is now a branch of the run; copy to another place"
                )
        if self._replica.begun and self._source is not None:
            known = known_to(self._source)
            for node in there.checkpoints:
                if not known(node):
                    # Prevents: retiring a checkpoint that came from a store with more of the run (perhaps by a copy in
                    # progress), because this source does not have it.
                    raise UsageError(
                        f"{url}: the unfinished copy that is there has {ref_of(node)}, which this store never had: it "
                        "comes from a store with newer checkpoints; finish it from there, or copy to another place"
                    )
        for node, entry in (*self._wanted.checkpoints.items(), *self._wanted.held.items()):
            found = there.find(node)
            if found is not None and found.state != entry.state:
                raise UsageError(f"{url}: its {entry.ref} is another state than the one to be copied")
        late = [number for number, units in self._orders.items() if number < there.term and _left(units, there)]
        unpromised = [node for node in self._wanted.checkpoints if node in there.held]
        if late or unpromised:
            what = f"the additions are of term {late[0]}" if late else f"{ref_of(unpromised[0])} is there as a base"
            raise UsageError(f"{url}: it has term {there.term} already, and {what}; copy to an empty place")

    def _open(self, opened: TermEntry) -> None:
        there = self._replica.catalog
        if opened.term in there.terms:
            return
        extra = {name: value for name, value in opened.extra.items() if name not in (CLOSED, HIGHEST, REACHED)}
        if (
            reached := there.reached()
        ) is not None:  # the highest step of this copy, which may have less than the source
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
        """Record the lowest omitted step of a term, before anything of a newer term is written.

        Prevents: taking a checkpoint that was never here for one that was retired here. The next term, opened on any
        machine and after any crash, records which step this term had reached.
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
        """Commit what is known at the end: retirements, tags, retention rules."""
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
        """Tell whether a promised checkpoint is there only because another one needs, or needed, it."""
        if node in self._wanted.checkpoints:
            return False
        if self._replica.begun:
            return True
        # In a place that already was a store, a checkpoint that is not wanted now was requested by an earlier copy.
        there = self._replica.catalog
        return node in self._added or not there.restorable(there.checkpoints[node].id)


def _by_term(wanted: Catalog, there: Catalog) -> dict[int, list[_Unit]]:
    """Map each term to the content of its COMMITs, by step. An encoding belongs to the term of its newest segment."""
    orders: dict[int, dict[Node, _Unit]] = {}
    # The parent of a term has to be promised when the term begins, even if only its name is known.
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
    """Return what of these units is not there yet."""
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
    """Group units into COMMITs."""
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
