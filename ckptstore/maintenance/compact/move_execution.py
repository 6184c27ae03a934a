"""Makes one move of a compaction. Nothing is given up before its replacement is durable, read back and compared.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`): the catalog may have changed since the plan was made.
2. Decode each checkpoint through its chain, every chunk compared with its hash. Write it again under ``seg/<t>/`` of
   the newest term t, durable.
3. Read it back through its whole new chain. Check every chunk's hash again, and the state's hash against the log.
4. One record adds the encodings and drops what nothing needs now. The writer of t is asked to commit it, or it is
   committed here (`ckptstore.log.change_committer`).

A kill before 4 leaves segments that nothing names, for gc. After it, the move is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ckptstore.errors import CorruptionError, CorruptSegmentError, FencedError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import check_commit, droppable, users
from ckptstore.formats.history.records import PLAIN, CheckpointEntry, Encoding, Node, SegmentEntry, ref_of
from ckptstore.host.crash_points import crash_point
from ckptstore.log.change import CatalogChange
from ckptstore.log.change_committer import ChangeCommitter
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.log.requests import Outcome
from ckptstore.maintenance.compact.moves import Move, Rewrite
from ckptstore.maintenance.compact.writer_bases import writer_bases
from ckptstore.maintenance.merge.chunk_copies import copied_bytes, copy_encodings, merged_draft
from ckptstore.maintenance.merge.delta_merge import reencode, write_as_full
from ckptstore.maintenance.merge.merge_check import opened_plan
from ckptstore.maintenance.merge.merge_range import unneeded
from ckptstore.maintenance.merge.rewrite_context import RewriteContext
from ckptstore.restore.restore_plan import Plan, plan

__all__ = ["ExecutedMove", "MoveExecutor"]


@dataclass(frozen=True, slots=True)
class ExecutedMove:
    """What one move did, or asked for.

    Attributes:
        outcome: the outcome of the record.
        stored: the new base of each checkpoint; None: it is a full.
        written, dropped: the segments that the record adds and drops.
    """

    outcome: Outcome
    stored: dict[Node, Node | None]
    written: tuple[SegmentEntry, ...]
    dropped: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True)
class _ReadPlans:
    """The checkpoints of a move, with the plans that restore them now."""

    plans: dict[Node, Plan]
    others: tuple[Plan, ...] = ()

    @property
    def segments(self) -> tuple[str, ...]:
        read = (*self.plans.values(), *self.others)
        return tuple(dict.fromkeys(segment for chosen in read for segment in chosen.segments))


class MoveExecutor:
    """Makes moves, one by one."""

    def __init__(self, journal: Journal, author: ChangeCommitter, context: RewriteContext) -> None:
        """
        Args:
            author: commits the record, or asks the live writer to.
            context: threads and memory for writing.
        """
        self._journal = journal
        self._backend = journal.backend
        self._author = author
        self._context = context

    def make(self, move: Move) -> ExecutedMove:
        """Make a move.

        Raises:
            UsageError: it is not worth it, or no longer possible. Nothing was changed.
            CorruptionError: the data it reads, or wrote, is damaged. Nothing was changed.
            StorageError: the medium failed. Segments that were not reported to a writer are removed.
            FencedError: a newer term has begun.
            CommitUnknownError: only after a take-over: it is unknown whether the record was committed.
        """
        with claim(self._journal, lambda catalog: _choose(catalog, move), lambda chosen: chosen.segments) as (
            view,
            chosen,
        ):
            catalog, context = view.catalog, self._context
            if self._author.owned is not None and catalog.term != self._author.owned:
                raise FencedError(f"{self._journal.url}: term {catalog.term} began after term {self._author.owned}")
            context.term = catalog.term
            with context.removing_on_failure(), context.fenced_if_newer_term():
                segments, encodings = self._write(catalog, chosen, move)
                context.remove({segment.id for segment in segments})
                self._prove(catalog, chosen.others)
                change = self._change(catalog, move, chosen.others, segments, encodings)
                crash_point("compact.verified")
            context.release()
        outcome = self._author.commit(catalog.term, f"compact: {move.kind}", change)
        crash_point("compact.committed")
        return ExecutedMove(
            outcome,
            {edge.checkpoint: None if edge.base is None else edge.base.node for edge in encodings},
            tuple(segments),
            tuple(catalog.segments[segment] for segment in change.drops),
        )

    def _prove(self, catalog: Catalog, others: Sequence[Plan]) -> None:
        """Read what the spared checkpoints are restored from after the move: it may never have been checked."""
        for one in others:
            entry = _entry(catalog, one.target.node)
            self._context.tally.total += entry.nbytes
            with opened_plan(self._backend, catalog, entry, one.encodings) as found:
                self._context.check(found)

    def _write(self, catalog: Catalog, chosen: _ReadPlans, move: Move) -> tuple[list[SegmentEntry], list[Encoding]]:
        if move.kind == "drop":
            return [], []
        if move.kind == "merge":
            return self._copy(catalog, chosen, move)
        segments: list[SegmentEntry] = []
        encodings: list[Encoding] = []
        chains = {node: one.encodings for node, one in chosen.plans.items()}
        for rewrite in move.rewrites:
            written, chain = self._rewrite(catalog, rewrite, chains, segments)
            segments += written
            encodings.append(chain[-1])
            chains[rewrite.node] = chain
            crash_point("compact.rewritten")
        return segments, encodings

    def _rewrite(
        self,
        catalog: Catalog,
        rewrite: Rewrite,
        chains: dict[Node, tuple[Encoding, ...]],
        before: Sequence[SegmentEntry],
    ) -> tuple[list[SegmentEntry], tuple[Encoding, ...]]:
        """Rewrite a checkpoint and verify it. Return the new segments, and the chain that then restores it."""
        entry = _entry(catalog, rewrite.node)
        below = () if rewrite.base is None else chains[rewrite.base]
        self._context.tally.total += 2 * entry.nbytes
        with ExitStack() as stack:
            found = stack.enter_context(opened_plan(self._backend, catalog, entry, chains[rewrite.node], before))
            base = None
            if rewrite.base is not None:
                other = _entry(catalog, rewrite.base)
                base = stack.enter_context(opened_plan(self._backend, catalog, other, below, before))
            write = write_as_full if rewrite.plain else partial(reencode, below=base)
            written, edge, state = write(
                self._context.session,
                found,
                draft=lambda one: merged_draft([one], catalog, self._journal.run, self._context.term),
            )
        if rewrite.plain:
            edge = replace(edge, extra={**edge.extra, PLAIN: True})
        if state != entry.state:
            raise CorruptSegmentError(f"checkpoint {entry.ref}: its chain gives another state than the log says")
        chain = (edge,) if edge.base is None else (*below, edge)
        with opened_plan(self._backend, catalog, entry, chain, [*before, *written]) as again:
            self._context.check(again)
        return written, chain

    def _copy(self, catalog: Catalog, chosen: _ReadPlans, move: Move) -> tuple[list[SegmentEntry], list[Encoding]]:
        edges = [chosen.plans[rewrite.node].encodings[-1] for rewrite in move.rewrites]
        last = move.rewrites[-1].node
        context = self._context
        context.tally.total += 2 * copied_bytes(self._backend, catalog, edges) + _entry(catalog, last).nbytes
        segments, encodings = copy_encodings(
            context.session, self._backend, catalog, edges, run=self._journal.run, term=context.term
        )
        context.check_copies(catalog, segments, encodings)
        moved = {edge.checkpoint: edge for edge in encodings}
        chain = [moved.get(edge.checkpoint, edge) for edge in chosen.plans[last].encodings]
        with opened_plan(self._backend, catalog, _entry(catalog, last), chain, segments) as found:
            context.check(found)
        return segments, encodings

    def _change(
        self,
        catalog: Catalog,
        move: Move,
        others: Sequence[Plan],
        segments: Sequence[SegmentEntry],
        encodings: Sequence[Encoding],
    ) -> CatalogChange:
        if move.kind == "drop" and not move.spared:
            drops = droppable(catalog, catalog.held)
        else:
            kept = {segment for one in others for segment in one.segments}
            given_up = {edge.checkpoint for edge in encodings} | {one.target.node for one in others}
            last = [one.encodings[-1] for one in others]
            drops = unneeded(catalog, (), given_up, [*encodings, *last])
            drops = tuple(one for one in drops if one not in kept)
        if self._author.owned is None:
            # A live writer may be about to build on them.
            busy = {node for node in writer_bases(catalog) if node not in catalog.checkpoints}
            drops = tuple(one for one in drops if busy.isdisjoint(users(catalog, one)))
        drops = tuple(one for one in drops if one in catalog.segments)
        new, old = sum(one.size for one in segments), sum(catalog.segments[one].size for one in drops)
        if not drops and not move.required:
            raise UsageError("there is nothing left to free")
        if new >= old and not move.required and move.kind != "merge":
            raise UsageError(f"it would take {new:,} bytes and free {old:,}")
        change = CatalogChange(tuple(segments), encodings=tuple(encodings), drops=drops)
        check_commit(catalog, change.record(catalog.term))
        return change


def _choose(catalog: Catalog, move: Move) -> _ReadPlans:
    """Return the plans of what a move reads. Raises `UsageError` if the move is out of date."""
    nodes = [node for rewrite in move.rewrites for node in (rewrite.node, rewrite.base) if node is not None]
    if move.kind == "merge":
        nodes = [rewrite.node for rewrite in move.rewrites]
    for node in nodes:
        if node not in catalog.checkpoints:
            raise UsageError(f"{ref_of(node)} was retired meanwhile")
    plans = {node: plan(catalog, catalog.checkpoints[node].id) for node in dict.fromkeys(nodes)}
    return _ReadPlans(plans, tuple(_other_plans(catalog, move)))


def _other_plans(catalog: Catalog, move: Move) -> list[Plan]:
    """Return plans that restore the spared without the dropped segments. Raises `UsageError` if there are none now."""
    found = []
    for node in move.spared:
        if node not in catalog.checkpoints:
            continue  # it was retired in the meantime and needs no plan
        try:
            found.append(plan(catalog, catalog.checkpoints[node].id, avoid=frozenset(move.drops)))
        except CorruptionError as error:
            raise UsageError(f"{ref_of(node)} no longer has another encoding: {error}") from error
    return found


def _entry(catalog: Catalog, node: Node) -> CheckpointEntry:
    entry = catalog.find(node)
    assert entry is not None, node
    return entry
