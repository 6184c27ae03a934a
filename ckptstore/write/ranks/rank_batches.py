"""Batch the step diffs of ranks: keep steps waiting, end a batch, and write it together with all ranks.

1. Rank 0 orders each step (`rank_orders`). Every rank compresses its share, which waits in the rank's memory.
2. Rank 0 ends a batch: with the order of its last step; or, between two steps (a caller waits, or time is up), with a
   message ``batch`` of its first step. Another rank whose caller waits asks rank 0 for that (``hurry``).
3. Every rank posts what it has compressed of all steps (``share``). Rank 0 combines the state of each step and posts
   the hashes (``states``): a step needs the hash of the step that it builds on.
4. Every rank writes its share of all steps in one segment, and hands in its part. Rank 0 writes the trees and commits.

A rank that could not compress a step reports it when the batch ends. Then the batch fails on all ranks, and a full
follows. If gradients are summed, a batch becomes one checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ckptstore.errors import CkptError, CommitUnknownError, FailedRankError, MailboxError, MissingRankError
from ckptstore.formats.segment_files.segment import Chunk, TensorEntry
from ckptstore.formats.step_text import named_steps
from ckptstore.host.crash_points import crash_point
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.ranks.commit_coordinator import CommitCoordinator
from ckptstore.write.ranks.gathered_parts import GatheredState
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline, fetch
from ckptstore.write.ranks.messages.rank_messages import BatchPart, CommitVerdict, RankPart, pack, unpack
from ckptstore.write.ranks.messages.step_messages import Exchange, attempt_id
from ckptstore.write.ranks.rank_committer import Batched
from ckptstore.write.ranks.rank_diffs import RankDiffs
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.saves.ledger import Labels
from ckptstore.write.steps.batch_segments import RankShare, write_batch
from ckptstore.write.steps.step_encoding import EncodedStep, EncodedTensor

__all__ = ["LOOK_SECONDS", "RankBatches"]

LOOK_SECONDS: Final = 0.1
"""Seconds between two checks whether the batch of the waiting steps ends."""


class RankBatches:
    """The waiting steps of one rank. The write thread calls it, except where a method says otherwise.

    Attributes:
        coding: on rank 0: the current step is being compressed and will also wait.
    """

    def __init__(
        self,
        resources: RankResources,
        rank_term: RankTerm,
        policy: OrderPolicy,
        diffs: RankDiffs,
        coordinator: CommitCoordinator,
    ) -> None:
        self._policy = policy
        self._resources = resources
        self._rank_term = rank_term
        self._diffs = diffs
        self._coordinator = coordinator
        self._first: Exchange | None = None  # of the first step that waits; other threads read it
        self._due = float("inf")  # the latest time at which the waiting steps are written
        self._late = float("inf")  # when this rank stops waiting for rank 0
        self._wanted: set[int] = set()  # steps whose callers wait on this rank
        self.coding = False

    @property
    def busy(self) -> bool:
        """Whether a step is being compressed against the last one, or waits. Any thread."""
        return self.coding or bool(self._diffs.waiting)

    @property
    def waiting(self) -> list[RankSave]:
        """Steps that wait. Any thread."""
        return list(self._diffs.waiting)

    def letter_key(self) -> str | None:
        """The key under which rank 0 posts the end of the batch; None: nothing waits."""
        return None if self._first is None else self._first.key("batch")

    def add(self, one: RankSave) -> None:
        """Compress a step, and write its batch if it is the last one."""
        self._diffs.add(one)
        self.coding = False
        crash_point("ranks.coded")
        if self._first is None:
            seconds = self._diffs.options.seconds
            self._due = float("inf") if seconds is None else time.monotonic() + seconds
            self._first = one.exchange
        if one.how.last:
            self.flush(ordered=True)
        elif one.flaw is not None or self._policy.too_large(self._diffs.stored):
            self.end_early()

    def end_early(self) -> None:
        """Write the waiting steps: at once on rank 0; another rank asks rank 0 for it."""
        if self._rank_term.committer is not None:
            self.flush()
        elif self._first is not None and self._late == float("inf"):
            self._late = time.monotonic() + 2 * self._resources.ranks.timeout
            with contextlib.suppress(MailboxError):  # the next check raises it, too
                self._first.hurry()

    def end_early_for(self, step: int) -> None:
        """Call `end_early` if this step is among the waiting steps."""
        if any(one.step == step for one in self._diffs.waiting):
            self.end_early()

    def hurry(self, step: int) -> None:
        """Note that a caller on this rank waits for a step. Any thread."""
        self._wanted.add(step)

    def hurried(self) -> bool:
        """Rank 0: whether a caller on any rank waits for a step that waits for its batch."""
        return self._first is not None and (self._is_wanted() or self._first.hurried())

    def _is_wanted(self) -> bool:
        return any(one.step in self._wanted for one in self.waiting)

    # -- the thread that polls

    def look(self) -> None:
        """If the batch ends, submit it to the write thread. Called every `LOOK_SECONDS`."""
        first = self._first
        if first is None:
            return
        first = first.using(self._rank_term.watch_box)
        now = time.monotonic()
        try:
            if self._rank_term.committer is not None:
                ends = now >= self._due or self._is_wanted() or first.hurried()
            else:
                ends = now >= self._late or first.mailbox.has([first.key("batch")])
        except MailboxError:
            ends = True  # writing it raises that
        if ends:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._resources.write_thread.submit(
                    self.flush if self._rank_term.committer is not None else self.follow
                )

    # -- the end of a batch

    def follow(self) -> None:
        """Another rank than 0: write the batch if rank 0 has ended it, and this rank has all of its steps."""
        if self._first is None:
            return
        try:
            last = self._fetch_last()
        except CkptError as error:
            self._fail(self._take_batch(), [], error)
            return
        if last is None and time.monotonic() >= self._late:
            late = MissingRankError(
                f"step {self._first.step} was not saved: rank 0 did not write its batch within "
                f"{2 * self._resources.ranks.timeout:g} s"
            )
            self._fail(self._take_batch(), [], late)
        elif last is not None and self._diffs.waiting[-1].step >= last[0]:
            self.flush()

    def wait_for_end(self) -> None:
        """Write the waiting steps together with the other ranks, because the writer is closing."""
        if self._rank_term.committer is not None:
            self.flush()
            return
        if self._first is not None:
            self.end_early()
            with contextlib.suppress(CkptError):
                deadline = ReplyDeadline(2 * self._resources.ranks.timeout, ranks=self._resources.group.size)
                deadline.wait(lambda: self._fetch_last() is not None)
            self._late = 0.0
            self.follow()

    def _fetch_last(self) -> tuple[int, int] | None:
        """The last step of the batch and its attempt, if rank 0 has ended the batch."""
        assert self._first is not None
        letter = fetch(self._first.mailbox, self._first.key("batch"))
        if letter is None:
            return None
        step, attempt = unpack(letter, self._first.key("batch"))
        return step, attempt

    def flush(self, *, ordered: bool = False) -> None:
        """Write the waiting steps together with all other ranks. Each step is then committed or has failed.

        Args:
            ordered: all ranks know that this is a batch, and its last step.
        """
        if self._diffs.waiting:
            self._rank_term.building = self._diffs.waiting[-1].step
        batch = self._take_batch()
        if not batch:
            return
        last = batch[-1]
        begun: list[str] = []
        try:
            if self._rank_term.stopped is not None:
                raise self._rank_term.stopped
            if not ordered:
                self._agree_on_end(batch)
            if (flaw := next((one.flaw for one in batch if one.flaw is not None), None)) is not None:
                raise flaw
            last.dropped = tuple(self._rank_term.abandoned)
            batched = self._write_shares(batch, begun)
            last.begun = tuple(begun)
            self._resources.commit_thread.submit(self._coordinator.settle_batch, batch, batched).result()
        except BaseException as error:  # noqa: BLE001  # the callers that wait for the steps are told
            self._fail(batch, begun, error)
        finally:
            self._leave(batch)

    def _take_batch(self) -> list[RankSave]:
        """Remove the waiting steps -> the steps, which are now written or fail."""
        self._first, self._due, self._late = None, float("inf"), float("inf")
        batch = self._diffs.take()
        self._wanted.difference_update([one.step for one in batch])
        return batch

    def _agree_on_end(self, batch: Sequence[RankSave]) -> None:
        first, last = batch[0].exchange, batch[-1].exchange
        if self._rank_term.committer is not None:
            first.post("batch", pack([last.step, last.attempt]))
            crash_point("ranks.ended")
            return
        letter = fetch(first.mailbox, first.key("batch"))
        if letter is not None and unpack(letter, "batch") != [last.step, last.attempt]:
            raise FailedRankError(f"steps {first.step} to {last.step} were not saved: rank 0 has another batch")

    def _fail(self, batch: Sequence[RankSave], begun: Sequence[str], error: BaseException) -> None:
        """Tell the other ranks that this rank could not do its part of a batch, and fail its steps."""
        if isinstance(error, CommitUnknownError):
            self._rank_term.stopped = error
        else:
            self._rank_term.abandon(list(begun))
            self._rank_term.tell_flaw(batch[-1], error)
        self._coordinator.restart()
        if len(batch) > 1:
            error.add_note(f"{named_steps(one.step for one in batch)} were to be written together")
        for one in batch:
            one.coded = None
            self._rank_term.failed(one, error)

    def _leave(self, batch: Sequence[RankSave]) -> None:
        """Note that this rank reads no more messages of these steps, except the last: the commit thread reads those."""
        for one in batch[:-1]:
            if self._rank_term.committer is not None:
                self._rank_term.answered.append(one.exchange)
            else:
                with contextlib.suppress(MailboxError):
                    one.exchange.see()

    def _write_shares(self, batch: Sequence[RankSave], begun: list[str]) -> list[Batched]:
        """Write this rank's share of a batch and hand it in -> what rank 0 commits; empty on other ranks."""
        exchange = batch[-1].exchange
        made = self._diffs.checkpoints(list(batch))
        parts = [self._part(one) for one in made]
        exchange.post("share", RankPart.packed_all(parts), exchange.rank)
        crash_point("ranks.shared")
        wholes = self._wholes(made, exchange)
        states = [whole.state for whole in wholes] if wholes else self._states(made, exchange)
        steps = self._diffs.placed(made, states, self._rank_term.number)
        tree = attempt_id(self._rank_term.opening.nonce, exchange.step, exchange.attempt)
        part = self._store_shares(made, steps, RankShare(exchange.rank, tree), begun)
        crash_point("ranks.before-part")
        self._rank_term.hand_in(exchange, part.packed())
        crash_point("ranks.part-sent")
        for one, used, cost in zip(made, part.used, part.costs, strict=True):
            one.segments, one.measured.stored = used, cost
        return [
            Batched(one.step, one.time, _labels(one, batch, made), whole, step.base, step.lossy)
            for one, whole, step in zip(made, wholes, steps, strict=bool(wholes))
        ]

    def _store_shares(
        self, batch: Sequence[RankSave], steps: Sequence[EncodedStep], share: RankShare, begun: list[str]
    ) -> BatchPart:
        dropped = batch[-1].dropped
        if not any(step.units for step in steps):  # this rank stores nothing of this state
            return BatchPart(share.rank, (), ((),) * len(batch), (0,) * len(batch), dropped)
        segments, encodings = write_batch(
            self._resources.session(begun.append),
            steps,
            self._rank_term.draft,
            times=[one.time for one in batch],
            digests=self._diffs.digests(steps[-1]),
            share=share,
        )
        used = tuple(encoding.segments for encoding in encodings)
        return BatchPart(share.rank, segments, used, tuple(encoding.bytes or 0 for encoding in encodings), dropped)

    def _part(self, one: RankSave) -> RankPart:
        assert one.coded is not None
        assert one.agreement is not None
        entries = tuple(_entry(tensor) for unit in one.coded.units for tensor in unit)
        return RankPart(self._resources.group.rank, one.agreement.id, (), entries, one.digests or {}, one.tree)

    def _wholes(self, batch: Sequence[RankSave], exchange: Exchange) -> list[GatheredState]:
        """Rank 0: the state of all ranks at each step. Posts their hashes if other ranks need them."""
        committer, agreement = self._rank_term.committer, batch[-1].agreement
        if committer is None:
            return []
        assert agreement is not None
        own = exchange.using(self._rank_term.commit_box)
        steps = [one.step for one in batch]
        wholes = self._resources.commit_thread.submit(committer.wholes, own, agreement, steps).result()
        if len(batch) > 1:
            exchange.post("states", pack([whole.state for whole in wholes]))
            crash_point("ranks.states")
        return wholes

    def _states(self, batch: Sequence[RankSave], exchange: Exchange) -> list[str]:
        """The hashes of the states that rank 0 has combined; not needed for a single step, whose base is known."""
        if len(batch) == 1:
            return []
        deadline = ReplyDeadline(2 * self._resources.ranks.timeout, ranks=exchange.size)
        letter = exchange.first([exchange.key("verdict"), exchange.key("states")], deadline)
        if letter is None:
            raise MissingRankError(
                f"step {exchange.step} was not saved: rank 0 did not say on what within {deadline.seconds:g} s"
            )
        # Fetch it again: the verdict may have come after `letter`.
        if (verdict := fetch(exchange.mailbox, exchange.key("verdict"))) is not None:
            raise CommitVerdict.unpacked(verdict, "verdict").error or MissingRankError(
                "rank 0 continued without this rank"
            )
        return list(unpack(letter, "states"))


def _labels(one: RankSave, batch: Sequence[RankSave], made: Sequence[RankSave]) -> Labels:
    """The labels of a checkpoint of a batch. One that replaces all of the steps gets the tags of all."""
    if len(made) == len(batch):
        return one.labels
    tags = dict.fromkeys(tag for step in batch for tag in step.labels.tags)
    return replace(one.labels, tags=tuple(tags))


def _entry(tensor: EncodedTensor) -> TensorEntry:
    """Return the entry of a compressed tensor that is handed in: with the hashes of the decoded chunks."""
    spec = tensor.spec
    chunks = tuple(Chunk(0, 0, chunk.logical, "", chunk.decoded_hash) for chunk in tensor.chunks)
    return TensorEntry(spec.name, spec.dtype, spec.shape, chunks, tensor.codec, {}, spec.global_shape, spec.offset)
