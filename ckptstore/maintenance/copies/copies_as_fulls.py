"""Copies checkpoints as fulls: decodes each through its chain, verifies it, and writes it as a plain full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, Encoding, Node, SegmentEntry
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import workers
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import LogCopy
from ckptstore.maintenance.copies.copy_selection import lines_of, with_paths
from ckptstore.maintenance.copies.transfer import Transfer
from ckptstore.maintenance.merge.chunk_copies import merged_draft
from ckptstore.maintenance.merge.delta_merge import write_as_full
from ckptstore.maintenance.merge.merge_check import opened_plan
from ckptstore.restore.restore_plan import plan
from ckptstore.segments.write_session import SegmentSession

__all__ = ["WrittenFulls", "copy_as_fulls", "rewrite_as_full"]

_TOGETHER: Final = 16
"""Number of fulls that one round commits."""


@dataclass
class WrittenFulls:
    """The number of written segments, and their bytes."""

    brought: int = 0
    nbytes: int = 0

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """Do nothing: the segments are already there. See `transfer.Supply`."""


def copy_as_fulls(
    journal: Journal,
    catalog: Catalog,
    nodes: Sequence[Node],
    replica: LogCopy,
    done: WrittenFulls,
    lacks: Mapping[int, int],
    progress: Progress | None,
    threads: int,
) -> None:
    """Write the checkpoints `nodes` of `catalog`, whose segments the caller has pinned, as fulls.

    Args:
        done: counts what is written.
        lacks: see `Transfer`.

    Raises:
        TakenError: another process adds to the place.
        CorruptSegmentError: the stored data is not what was saved.
        StorageError: a medium failed.
    """
    part = Catalog(term=catalog.term)
    there = replica.catalog
    left = []
    for node in nodes:
        entry = catalog.checkpoints[node]
        if there.restorable(entry.id):
            with_paths(part, _merged(catalog, there), [node], there.encodings.get(node, ()))
        else:
            left.append(entry)
    tally = Tally(progress, sum(entry.nbytes for entry in left))
    replica.backend.check_space(tally.total)
    with ExitStack() as stack:
        blocks = stack.enter_context(workers(2, "write"))
        coders = stack.enter_context(workers(threads, "copy"))
        staging = Staging.for_chunks(2 * threads, DEFAULT_BUDGET)
        session = SegmentSession(replica.backend, staging, blocks.pool, coders, lambda _: None, tally.advance)
        for begin in range(0, max(1, len(left)), _TOGETHER):
            for entry in left[begin : begin + _TOGETHER]:
                segments, edge = rewrite_as_full(session, journal, catalog, entry, plan(catalog, entry.id).encodings)
                done.brought += len(segments)
                done.nbytes += sum(segment.size for segment in segments)
                part.segments.update((segment.id, segment) for segment in segments)
                part.checkpoints[entry.node] = entry
                part.encodings[entry.node] = (edge,)
                part.tags.update((name, node) for name, node in catalog.tags.items() if node == entry.node)
            numbers = lines_of(catalog, {node[0] for node in part.checkpoints})
            part.terms.update((number, catalog.terms[number]) for number in sorted(numbers))
            Transfer(part, replica, done, lacks).run()


def _merged(catalog: Catalog, there: Catalog) -> Catalog:
    """Return a catalog for `with_paths`: checkpoints of the one, segments of the other."""
    return Catalog(checkpoints=catalog.checkpoints, segments=there.segments, tags=catalog.tags)


def rewrite_as_full(
    session: SegmentSession,
    journal: Journal,
    catalog: Catalog,
    entry: CheckpointEntry,
    encodings: Sequence[Encoding],
) -> tuple[tuple[SegmentEntry, ...], Encoding]:
    """Decode a checkpoint through a chain of encodings, and write it as a full.

    Raises:
        CorruptSegmentError: the stored data is not what was saved.
        StorageError: a medium failed.
    """
    with opened_plan(journal.backend, catalog, entry, encodings) as found:
        segments, edge, state = write_as_full(
            session, found, lambda one: merged_draft([one], catalog, journal.run, entry.term)
        )
    if state != entry.state:
        raise CorruptSegmentError(f"checkpoint {entry.ref}: its chain gives another state than the log says")
    return tuple(segments), edge
