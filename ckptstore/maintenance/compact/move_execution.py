"""One move of a compaction, made: nothing is given up before what takes its place is durable, read back and compared.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`): the catalog may have gone on since the plan was made.
2. Decode each checkpoint through its chain, every chunk compared with its hash; write it anew under ``seg/<t>/`` of the
   newest term t, durable.
3. Read that back through its whole new chain: every chunk's hash again, and the state's with the log's.
4. One record adds the encodings and drops what nothing needs any more: the writer of t is asked for it, or it is
   committed here (`ckptstore.log.change_committer`).

Killed before 4, it leaves segments that nothing names, for gc; after it, the move is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ckptstore.errors import CorruptionError, CorruptSegmentError, FencedError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.commit_checks import check_commit, droppable, users
from ckptstore.formats.records import CheckpointEntry, Encoding, Node, SegmentEntry, ref_of
from ckptstore.host.crash_points import crash_point
from ckptstore.log.change import Change
from ckptstore.log.change_committer import Author
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.log.requests import Outcome
from ckptstore.maintenance.compact.moves import Move, Rewrite
from ckptstore.maintenance.compact.writer_bases import built_on
from ckptstore.maintenance.merge.chunk_copies import copied_bytes, copy_encodings, merged_draft
from ckptstore.maintenance.merge.delta_merge import recode
from ckptstore.maintenance.merge.merge_check import opened_plan
from ckptstore.maintenance.merge.merge_range import unneeded
from ckptstore.maintenance.merge.rewrite_context import Workshop
from ckptstore.restore.restore_plan import Plan, plan

__all__ = ["Made", "Maker"]


@dataclass(frozen=True, slots=True)
class Made:
    """What one move did, or asked for.

    Attributes:
        outcome: of the record.
        stored: what each checkpoint is coded against now; None: it is a full.
        written, dropped: the segments that the record adds and drops.
    """

    outcome: Outcome
    stored: dict[Node, Node | None]
    written: tuple[SegmentEntry, ...]
    dropped: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The checkpoints of a move, as they are restored at present."""

    plans: dict[Node, Plan]
    besides: tuple[Plan, ...] = ()

    @property
    def segments(self) -> tuple[str, ...]:
        read = (*self.plans.values(), *self.besides)
        return tuple(dict.fromkeys(segment for chosen in read for segment in chosen.segments))


class Maker:
    """Makes moves, one after the other."""

    def __init__(self, journal: Journal, author: Author, shop: Workshop) -> None:
        """
        Args:
            author: commits, or asks who does.
            shop: what is written with.
        """
        self._journal = journal
        self._backend = journal.backend
        self._author = author
        self._shop = shop

    def make(self, move: Move) -> Made:
        """Make a move.

        Raises:
            UsageError: it is not worth it, or not possible any more. Nothing was changed.
            CorruptionError: what it reads, or wrote, is damaged. Nothing was changed.
            StorageError: the medium failed. What nobody was told of is removed.
            FencedError: a newer term has begun.
            CommitUnknownError: only who has taken over: whether it was committed is not known.
        """
        with claim(self._journal, lambda catalog: _choose(catalog, move), lambda chosen: chosen.segments) as (
            view,
            chosen,
        ):
            catalog, shop = view.catalog, self._shop
            if self._author.owned is not None and catalog.term != self._author.owned:
                raise FencedError(f"{self._journal.url}: term {catalog.term} began after term {self._author.owned}")
            shop.term = catalog.term
            with shop.nothing_left_behind(), shop.term_goes_on():
                segments, encodings = self._write(catalog, chosen, move)
                shop.remove({segment.id for segment in segments})
                self._prove(catalog, chosen.besides)
                change = self._change(catalog, move, chosen.besides, segments, encodings)
                crash_point("compact.verified")
            shop.told()
        outcome = self._author.commit(catalog.term, f"compact: {move.kind}", change)
        crash_point("compact.committed")
        return Made(
            outcome,
            {edge.checkpoint: None if edge.base is None else edge.base.node for edge in encodings},
            tuple(segments),
            tuple(catalog.segments[segment] for segment in change.drops),
        )

    def _prove(self, catalog: Catalog, besides: Sequence[Plan]) -> None:
        """Read what the spared are restored from afterwards: nobody may have looked at it since it was written."""
        for one in besides:
            entry = _entry(catalog, one.target.node)
            self._shop.tally.total += entry.nbytes
            with opened_plan(self._backend, catalog, entry, one.encodings) as found:
                self._shop.check(found)

    def _write(self, catalog: Catalog, chosen: _Chosen, move: Move) -> tuple[list[SegmentEntry], list[Encoding]]:
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
        """Store a checkpoint anew, and prove it -> the new segments, and what then restores it."""
        entry = _entry(catalog, rewrite.node)
        below = () if rewrite.base is None else chains[rewrite.base]
        self._shop.tally.total += 2 * entry.nbytes
        with ExitStack() as stack:
            found = stack.enter_context(opened_plan(self._backend, catalog, entry, chains[rewrite.node], before))
            base = None
            if rewrite.base is not None:
                other = _entry(catalog, rewrite.base)
                base = stack.enter_context(opened_plan(self._backend, catalog, other, below, before))
            written, edge, state = recode(
                self._shop.session,
                found,
                base,
                lambda one: merged_draft([one], catalog, self._journal.run, self._shop.term),
            )
        if state != entry.state:
            raise CorruptSegmentError(f"checkpoint {entry.ref}: its chain gives another state than the log says")
        chain = (edge,) if edge.base is None else (*below, edge)
        with opened_plan(self._backend, catalog, entry, chain, [*before, *written]) as again:
            self._shop.check(again)
        return written, chain

    def _copy(self, catalog: Catalog, chosen: _Chosen, move: Move) -> tuple[list[SegmentEntry], list[Encoding]]:
        edges = [chosen.plans[rewrite.node].encodings[-1] for rewrite in move.rewrites]
        last = move.rewrites[-1].node
        shop = self._shop
        shop.tally.total += 2 * copied_bytes(self._backend, catalog, edges) + _entry(catalog, last).nbytes
        segments, encodings = copy_encodings(
            shop.session, self._backend, catalog, edges, run=self._journal.run, term=shop.term
        )
        shop.check_copies(catalog, segments, encodings)
        moved = {edge.checkpoint: edge for edge in encodings}
        chain = [moved.get(edge.checkpoint, edge) for edge in chosen.plans[last].encodings]
        with opened_plan(self._backend, catalog, _entry(catalog, last), chain, segments) as found:
            shop.check(found)
        return segments, encodings

    def _change(
        self,
        catalog: Catalog,
        move: Move,
        besides: Sequence[Plan],
        segments: Sequence[SegmentEntry],
        encodings: Sequence[Encoding],
    ) -> Change:
        if move.kind == "drop" and not move.spared:
            drops = droppable(catalog, catalog.held)
        else:
            kept = {segment for one in besides for segment in one.segments}
            given_up = {edge.checkpoint for edge in encodings} | {one.target.node for one in besides}
            last = [one.encodings[-1] for one in besides]
            drops = unneeded(catalog, (), given_up, [*encodings, *last])
            drops = tuple(one for one in drops if one not in kept)
        if self._author.owned is None:
            # A live writer may be about to build on it.
            busy = {node for node in built_on(catalog) if node not in catalog.checkpoints}
            drops = tuple(one for one in drops if busy.isdisjoint(users(catalog, one)))
        drops = tuple(one for one in drops if one in catalog.segments)
        new, old = sum(one.size for one in segments), sum(catalog.segments[one].size for one in drops)
        if not drops and not move.required:
            raise UsageError("there is nothing to free any more")
        if new >= old and not move.required and move.kind != "merge":
            raise UsageError(f"it would take {new:,} bytes and free {old:,}")
        change = Change(tuple(segments), encodings=tuple(encodings), drops=drops)
        check_commit(catalog, change.record(catalog.term))
        return change


def _choose(catalog: Catalog, move: Move) -> _Chosen:
    """Plans of what a move reads. Raises `UsageError` if it is out of date."""
    nodes = [node for rewrite in move.rewrites for node in (rewrite.node, rewrite.base) if node is not None]
    if move.kind == "merge":
        nodes = [rewrite.node for rewrite in move.rewrites]
    for node in nodes:
        if node not in catalog.checkpoints:
            raise UsageError(f"{ref_of(node)} was retired meanwhile")
    plans = {node: plan(catalog, catalog.checkpoints[node].id) for node in dict.fromkeys(nodes)}
    return _Chosen(plans, tuple(_besides(catalog, move)))


def _besides(catalog: Catalog, move: Move) -> list[Plan]:
    """What restores the spared without the segments that go. Raises `UsageError` if nothing does any more."""
    found = []
    for node in move.spared:
        if node not in catalog.checkpoints:
            continue  # retired meanwhile: it needs nothing
        try:
            found.append(plan(catalog, catalog.checkpoints[node].id, avoid=frozenset(move.drops)))
        except CorruptionError as error:
            raise UsageError(f"{ref_of(node)} has no other encoding any more: {error}") from error
    return found


def _entry(catalog: Catalog, node: Node) -> CheckpointEntry:
    entry = catalog.find(node)
    assert entry is not None, node
    return entry
