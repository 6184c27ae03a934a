"""Compress the step diffs of one rank: its share of a step against its share of the step before, in its own memory.

Rank 0 decides which steps are diffs and when a batch is written, and tells the others (`rank_orders`, `rank_batches`).
If a rank stores the same rows of a parameter and its moments, it compresses them with the optimizer's arithmetic;
`division` arranges that.
"""

from __future__ import annotations

from dataclasses import replace

from ckptstore.errors import FailedRankError
from ckptstore.formats.history.records import CheckpointId
from ckptstore.host.threads import Workers
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.delta_encoding import ArrivingState
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.stage import Stage
from ckptstore.write.steps.bounded_step import TooLongError
from ckptstore.write.steps.gradient_sum import GradientSum
from ckptstore.write.steps.resident_step import ResidentStep
from ckptstore.write.steps.step_encoding import EncodedStep

__all__ = ["RankDiffs"]


class RankDiffs:
    """The step diffs of a rank. The write thread calls it; so does the commit thread while the write thread waits.

    Attributes:
        options: those of this rank's writer; rank 0's decide.
        waiting: steps that wait for their batch: compressed, summed, or with the error that prevented it.
        base: the checkpoint that the first of them builds on; None: there is none.
    """

    def __init__(self, options: DiffOptions, workers: Workers, snapshots: SnapshotPool, policy: OrderPolicy) -> None:
        """
        Args:
            policy: receives the cost of the steps here, and that of fulls and deltas elsewhere.
        """
        self.options = options
        self.waiting: list[RankSave] = []
        self.base: CheckpointId | None = None
        self._policy = policy
        self._workers = workers
        self._snapshots = snapshots
        self._resident = ResidentStep(options.policy, workers)
        self._sums = GradientSum()

    @property
    def stored(self) -> int:
        """Compressed bytes that wait in memory."""
        return sum(one.coded.stored for one in self.waiting if one.coded is not None)

    def add(self, one: RankSave) -> None:
        """Compress a step, or add up its gradients; it then waits. If that fails, its batch will fail."""
        kept = False
        try:
            if one.flaw is None:
                self._check_base(one)
                assert one.stage is not None
                if self.options.accumulate == "sum":
                    self._sum(one, one.stage)
                else:
                    self._compress(one, one.stage)
                kept = True
        except BaseException as error:  # noqa: BLE001  # all ranks are told when the batch is written
            one.flaw = error
        finally:
            self.waiting.append(one)
            one.let_go(kept=kept)
            one.leave()  # a batch has its own limit

    def _check_base(self, one: RankSave) -> None:
        base = self._resident.base
        if base is None or base.id.step != one.how.after:
            raise FailedRankError(
                f"its share of step {one.how.after}, against which step {one.step} is compressed, is gone"
            )

    def _sum(self, one: RankSave, stage: Stage) -> None:
        assert stage.snapshot is not None
        self._sums.add(stage.updates, stage.snapshot, self._resident.here, explained=one.explained)
        self._policy.count_step()

    def _compress(self, one: RankSave, stage: Stage) -> None:
        if stage.feed is not None:
            coded = self._encode_arriving(one.step, stage, stage.feed)
        else:
            coded = self._resident.encode(stage.flat, stage.updates, one.step)
        assert stage.snapshot is not None
        assert one.how.after is not None
        self._resident.unexplained.look(one.step, one.how.after, coded.excess)
        one.coded = coded
        self._learn(one, coded, stage.snapshot)
        self._policy.count_step()

    def _learn(self, one: RankSave, coded: EncodedStep, snapshot: Snapshot | None) -> None:
        """Record the cost of a compressed step.

        The next step is compressed against `snapshot`; None: it is in memory already.
        """
        assert one.how.after is not None
        identity = CheckpointId(0, one.step, "")
        self._policy.compressed(identity, one.how.after, coded.stored, coded.nbytes)
        if snapshot is not None:
            self._resident.advance(identity, snapshot)

    def _encode_arriving(self, step: int, stage: Stage, feed: Feed) -> EncodedStep:
        """Compress a share that is copied unit by unit: it overwrites the share of the step before."""
        plan = self._resident.plan(feed, stage.updates, step)
        before = self._resident.here
        room = before.snapshot.room(feed.flat)
        if room is not None:
            stage.snapshot = self._resident.turn(feed.flat, room)
        else:  # tensors that only this rank has have changed their sizes
            stage.snapshot = self._snapshots.empty(feed.flat)
            room = stage.snapshot.room(feed.flat)
        try:
            return plan.encode(ArrivingState(feed, room), self._workers)
        except TooLongError:
            # All of the share is in memory; the share that it was compressed against is overwritten.
            return self._resident.encode_alone(stage.snapshot.flat, before.id, step)

    def take(self) -> list[RankSave]:
        """Remove and return all waiting steps."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def checkpoints(self, batch: list[RankSave]) -> list[RankSave]:
        """The steps of a batch that become checkpoints: all; or, if gradients are summed, the last one."""
        if self._sums.latest is None:
            return batch
        last = batch[-1]
        last.coded = self._sums.finish(self._resident, CheckpointId(0, last.step, ""))
        self._learn(last, last.coded, None)
        return [last]

    def placed(self, batch: list[RankSave], states: list[str], term: int) -> list[EncodedStep]:
        """The compressed steps of a batch, each with the identity of the checkpoint that it builds on.

        Args:
            states: for each step the hash of the state of all ranks; that of the last step is not needed.
        """
        assert self.base is not None
        bases = [self.base, *(CheckpointId(term, one.step, state) for one, state in zip(batch, states, strict=False))]
        placed = []
        for one, base in zip(batch, bases, strict=False):
            assert one.coded is not None
            placed.append(replace(one.coded, base=base))
        return placed

    def digests(self, last: EncodedStep) -> dict[str, int]:
        """State digests of this rank's share of the last step, which is in memory."""
        return self._resident.digests(last)

    def begin(self, info: CheckpointInfo, snapshot: Snapshot, seconds: float) -> None:
        """Compress the next step against a full or a delta that is durable. Takes ownership of `snapshot`.

        Args:
            seconds: how long the save of the full or delta took.
        """
        self._policy.begin_steps(info.id, info.stored, seconds)
        self._resident.advance(info.id, snapshot)
        self.base = info.id

    def written(self, info: CheckpointInfo) -> None:
        """Note that the batch with this last checkpoint is durable."""
        self._policy.batch_committed(info.id)
        self.base = info.id

    def restart(self) -> None:
        """Give up the step in memory: the next checkpoint is not a diff."""
        self.base = None
        self._sums.clear()
        self._policy.end_steps()
        self._resident.clear()
