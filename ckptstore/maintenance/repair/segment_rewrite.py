"""Rewrites into new segments what cannot be copied unchanged.

An encoding that is intact in a damaged segment keeps its form. A checkpoint whose every chain has damage, although a
load still restores it (for example because its own encoding does not need the damaged part), becomes a full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, Node, SegmentEntry
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.crash_points import crash_point
from ckptstore.host.threads import Workers, workers
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import LogCopy
from ckptstore.maintenance.copies.copies_as_fulls import rewrite_as_full
from ckptstore.maintenance.merge.chunk_copies import copy_encodings
from ckptstore.maintenance.merge.merge_check import check_copies
from ckptstore.restore.restore_plan import Plan
from ckptstore.segments.write_session import SegmentSession

__all__ = ["Rewritten", "rewrite", "rewrite_as_fulls"]


@dataclass
class Rewritten:
    """The result of rewriting.

    Attributes:
        segments: new segments, durable and read back.
        encodings: the encodings that read them.
        present: checkpoints that an earlier try has already rewritten.
    """

    segments: list[SegmentEntry] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    present: list[Node] = field(default_factory=list)


def rewrite(
    source: Backend, replica: LogCopy, catalog: Catalog, edges: Sequence[Encoding], run: str, threads: int
) -> Rewritten:
    """Copy the chunks of the encodings `edges`: for each damaged segment into a new segment of the same term.

    Raises:
        CorruptSegmentError: a chunk has changed since it was verified.
        UsageError: only a newer version may rewrite a segment.
        StorageError: a medium failed.
    """
    done = Rewritten()
    groups: dict[tuple[int, tuple[str, ...]], list[Encoding]] = {}
    for edge in sorted(edges, key=lambda one: one.checkpoint):
        if replica.catalog.encodings.get(edge.checkpoint):
            done.present.append(edge.checkpoint)
        else:
            groups.setdefault((edge.checkpoint[0], edge.segments), []).append(edge)
    if not groups:
        return done
    target = replica.backend
    with _session(target, threads) as (session, staging, coders):
        for (term, _), members in groups.items():
            segments, encodings = copy_encodings(session, source, catalog, members, run=run, term=term)
            check_copies(target, catalog, segments, encodings, coders.pool, staging, lambda _: None)
            crash_point("repair.rewritten")
            done.segments += segments
            done.encodings += encodings
    return done


def rewrite_as_fulls(
    source: Journal, replica: LogCopy, catalog: Catalog, plans: Mapping[Node, Plan], threads: int, done: Rewritten
) -> None:
    """Write checkpoints as fulls, each restored by its plan.

    Args:
        done: collects what was written.

    Raises:
        CorruptSegmentError: stored data has changed since its trial restore.
        StorageError: a medium failed.
    """
    left = {}
    for node, plan in plans.items():
        if replica.catalog.encodings.get(node):
            done.present.append(node)
        else:
            left[node] = plan
    if not left:
        return
    with _session(replica.backend, threads) as (session, _, _):
        for node, plan in left.items():
            entry = catalog.checkpoints[node]
            segments, encoding = rewrite_as_full(session, source, catalog, entry, plan.encodings)
            crash_point("repair.rewritten")
            done.segments += segments
            done.encodings.append(encoding)


@contextmanager
def _session(target: Backend, threads: int) -> Iterator[tuple[SegmentSession, Staging, Workers]]:
    """Open a session for writing segments, with its memory and its encoder threads."""
    with ExitStack() as stack:
        blocks = stack.enter_context(workers(2, "write"))
        coders = stack.enter_context(workers(threads, "repair"))
        staging = Staging.for_chunks(2 * threads, DEFAULT_BUDGET)
        yield SegmentSession(target, staging, blocks.pool, coders, lambda _: None, lambda _: None), staging, coders
