"""Run the write thread of a rank: make the share of each step durable and hand it in, in the order of the saves."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from ckptstore.errors import CommitUnknownError, FailedRankError
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Tally
from ckptstore.segments.plain_segments import write_plain
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.delta_encoding import ArrivingState, Base, Choices, write_coded
from ckptstore.write.policy.orders import Order
from ckptstore.write.ranks.commit_coordinator import CommitCoordinator
from ckptstore.write.ranks.messages.rank_messages import RankPart
from ckptstore.write.ranks.messages.step_messages import attempt_id
from ckptstore.write.ranks.rank_batches import RankBatches
from ckptstore.write.ranks.rank_orders import RankOrders
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.ranks.share_snapshot import with_digests
from ckptstore.write.resident_bases import ResidentBases
from ckptstore.write.stage import Stage

__all__ = ["ShareWriter"]


class ShareWriter:
    """The work of the write thread, one step after the other."""

    def __init__(
        self,
        resources: RankResources,
        rank_term: RankTerm,
        coordinator: CommitCoordinator,
        bases: ResidentBases | None,
        ordering: RankOrders | None,
        batches: RankBatches | None,
    ) -> None:
        """
        Args:
            bases: the bases of deltas; None: there are no deltas.
            ordering: if checkpoints build on others; None: all are plain fulls.
            batches: if steps are stored as step diffs; else None.
        """
        self._resources = resources
        self._rank_term = rank_term
        self._coordinator = coordinator
        self._bases = bases
        self._deltas = resources.options.deltas
        self._choices = None if self._deltas is None else Choices(self._deltas.policy)
        self._ordering = ordering
        self._batches = batches

    def write(self, one: RankSave) -> None:
        """Write this rank's share of a step and hand in its part, or compress it for a batch."""
        one.exchange = one.exchange.using(self._rank_term.write_box)
        begun: list[str] = []
        kept = False
        try:
            if self._rank_term.stopped is not None:
                raise self._rank_term.stopped
            if self._ordering is not None:
                one.order = self._ordering.order(one)
            if one.flaw is None:
                assert one.stage is not None
                one.stage.arrive()  # Prevents: writing memory that a device still copies to.
            if one.how.after is not None:
                self._add(one)
            else:
                kept = self._store(one, begun)
        except CommitUnknownError as error:
            self._rank_term.stopped = error
            self._rank_term.tell(one, error)
        except BaseException as error:  # noqa: BLE001  # its caller is told
            self._rank_term.abandon(begun)
            if one.order is not None:
                self._coordinator.restart()
            self._rank_term.tell_flaw(one, error)
            self._rank_term.tell(one, error)
        finally:
            if self._batches is not None:
                self._batches.coding = False
            one.let_go(kept=kept)

    def _add(self, one: RankSave) -> None:
        if self._batches is None:
            raise FailedRankError("rank 0 stores step diffs, and this rank's writer was opened without diffs=")
        self._batches.add(one)

    def _store(self, one: RankSave, begun: list[str]) -> bool:
        """Write a full or a delta and hand it in -> whether its snapshot stays in memory as a base."""
        if one.flaw is not None:
            raise one.flaw
        one.dropped = tuple(self._rank_term.abandoned)  # the commit drops them, if it succeeds
        one.began = time.monotonic()
        # Until it is committed: only then is the space of what it retires free for the shares of later steps.
        one.space = space = self._resources.journal.backend.begin_save()
        one.done.add_done_callback(lambda _: space.end())
        with space.within():
            part = self._write_share(one, begun)
        one.segments = tuple(segment.id for segment in part.segments)
        one.measured.stored = sum(segment.size for segment in part.segments)
        crash_point("ranks.before-part")
        self._rank_term.hand_in(one.exchange, part.packed())
        crash_point("ranks.part-sent")
        one.begun = tuple(begun)
        settled = self._resources.commit_thread.submit(self._coordinator.settle, one)
        if self._ordering is None:
            return False
        return settled.result()  # the next step may build on this one

    def _write_share(self, one: RankSave, begun: list[str]) -> RankPart:
        stage = one.stage
        assert stage is not None
        assert one.agreement is not None
        total = sum(source.nbytes for source in stage.flat.tensors.values())
        session = self._resources.session(begun.append, Tally(one.progress, total).advance)
        segments: tuple[SegmentEntry, ...] = ()
        entries: list[TensorEntry] = []
        if stage.flat.tensors:
            segments, entries = self._write_tensors(one, stage, session)
        elif stage.feed is not None:
            stage.feed.windows(())
        rank = self._resources.group.rank
        return RankPart(rank, one.agreement.id, segments, tuple(entries), one.digests or {}, one.tree, one.dropped)

    def _write_tensors(
        self, one: RankSave, stage: Stage, session: SegmentSession
    ) -> tuple[tuple[SegmentEntry, ...], list[TensorEntry]]:
        def documents(count: int) -> list[SegmentDoc]:
            return self._documents(one, count)

        base = self._base(one.how)
        arriving: ArrivingState | None = None
        if (feed := stage.feed) is not None:
            if self._bases is None or base is None:
                # Whole: the next step is compressed against the copy.
                self._coordinator.give_place()
                resources = self._resources
                stage.snapshot = feed.whole(lambda: resources.snapshots.copy(feed.flat, resources.workers.pool))
                stage.flat = with_digests(stage.snapshot.flat, one.digests)
            else:
                arriving = self._bases.receive(one.how, feed, follow=True)
                assert arriving is not None  # a budget for copies and one for bases are not given together
        if self._deltas is None or self._choices is None or (base is None and not self._deltas.compress_fulls):
            return write_plain(session, stage.flat, documents)
        return write_coded(
            session, stage.flat, documents, base=base, gap=one.how.gap, choices=self._choices, arriving=arriving
        )

    def _base(self, order: Order) -> Base | None:
        """Return this rank's share of the base. Raises `FailedRankError` if the rank does not have it."""
        if self._bases is None or order.base is None:
            return None
        base = self._bases.get(order.base)
        if base is None:
            raise FailedRankError(f"its share of {order.base.ref}, the base, is neither in memory nor open")
        return base

    def _documents(self, one: RankSave, count: int) -> list[SegmentDoc]:
        """The header of each of this rank's segments: SPEC.md 5.1, segments of many ranks."""
        identity = attempt_id(self._rank_term.opening.nonce, one.step, one.exchange.attempt)
        term, order = self._rank_term.number, one.how
        return [
            replace(
                self._rank_term.draft,
                segment=uuid.uuid4().hex,
                encodings={
                    one.step: StepEncoding(
                        term, order.kind, order.base, one.time, part=SegmentPart(identity, 1 + number, 1 + count)
                    )
                },
                extra={"rank": [[one.step, self._resources.group.rank]]},
            )
            for number in range(count)
        ]
