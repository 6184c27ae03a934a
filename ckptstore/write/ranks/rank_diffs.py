"""Step diffs of one rank: it compresses its share of a step against its share of the step before, in its own memory.

Rank 0 decides which steps are diffs and when a batch is written, and tells the others (`rank_orders`, `rank_batches`).
A rank compresses what an optimizer moved by its arithmetic where it stores a parameter and its moments alike, which
`division` sees to.
"""

from __future__ import annotations

from dataclasses import replace

from ckptstore.errors import FailedRankError
from ckptstore.formats.records import CheckpointId
from ckptstore.host.threads import Workers
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.delta_encoding import Fed
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.steps.bounded_step import TooLongError
from ckptstore.write.steps.gradient_sum import GradientSum
from ckptstore.write.steps.resident_step import ResidentStep
from ckptstore.write.steps.step_encoding import EncodedStep

__all__ = ["RankDiffs"]


class RankDiffs:
    """The step diffs of a rank. The thread that writes calls it, and the one that settles while that waits.

    Attributes:
        options: of this rank's writer; rank 0's decide.
        waiting: steps that wait for their batch: compressed, summed up, or with the reason why they could not be.
        base: the checkpoint that the first of them builds on; None: there is none.
    """

    def __init__(self, options: DiffOptions, workers: Workers, snapshots: SnapshotPool, policy: OrderPolicy) -> None:
        """
        Args:
            policy: learns what the steps cost. Learns of fulls and deltas elsewhere.
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
        """Compress a step, or sum its gradients up; it then waits. If that fails, its batch will fail."""
        try:
            if one.flaw is None:
                self._check_base(one)
                if self.options.accumulate == "sum":
                    self._sum(one)
                else:
                    self._compress(one)
        except BaseException as error:  # noqa: BLE001  # all ranks are told when the batch is written
            one.flaw = error
        finally:
            self.waiting.append(one)
            one.let_go()
            one.leave()  # a batch has a bound of its own

    def _check_base(self, one: RankSave) -> None:
        base = self._resident.base
        if base is None or base.id.step != one.how.after:
            raise FailedRankError(
                f"its share of step {one.how.after}, against which step {one.step} is compressed, is gone"
            )

    def _sum(self, one: RankSave) -> None:
        assert one.snapshot is not None
        self._sums.add(one.updates, one.snapshot, self._resident.here, explained=one.explained)
        one.retained = True
        self._policy.joined()

    def _compress(self, one: RankSave) -> None:
        assert one.share is not None
        if isinstance(one.feed, Feed):
            coded = self._encode_fed(one, one.feed)
        else:
            coded = self._resident.encode(one.share, one.updates, one.step)
        assert one.snapshot is not None
        assert one.how.after is not None
        self._resident.unexplained.look(one.step, one.how.after, coded.excess)
        one.coded = coded
        one.retained = True
        self._learn(one, coded, one.snapshot)
        self._policy.joined()

    def _learn(self, one: RankSave, coded: EncodedStep, snapshot: Snapshot | None) -> None:
        """A step was compressed; `snapshot`: the next one is compressed against it (None: it is there already)."""
        assert one.how.after is not None
        identity = CheckpointId(0, one.step, "")
        self._policy.compressed(identity, one.how.after, coded.stored, coded.nbytes)
        if snapshot is not None:
            self._resident.advance(identity, snapshot)

    def _encode_fed(self, one: RankSave, feed: Feed) -> EncodedStep:
        """Compress a share that is copied unit by unit: it takes the place of the one before."""
        plan = self._resident.plan(feed, one.updates, one.step)
        before = self._resident.here
        room = before.snapshot.room(feed.flat)
        if room is not None:
            snapshot = self._resident.turn(feed.flat, room)
        else:  # tensors of this rank alone have changed their sizes
            snapshot = self._snapshots.empty(feed.flat)
            room = snapshot.room(feed.flat)
        one.snapshot = snapshot
        try:
            return plan.encode(Fed(feed, room), self._workers)
        except TooLongError:
            # All of it is in memory, and what it was compressed against is not.
            return self._resident.encode_alone(snapshot.flat, before.id, one.step)

    def take(self) -> list[RankSave]:
        """Everything that waits, which from now on does not."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def checkpoints(self, batch: list[RankSave]) -> list[RankSave]:
        """Those steps of a batch that become checkpoints: all, or the last one for the sum of all."""
        if self._sums.latest is None:
            return batch
        last = batch[-1]
        last.coded = self._sums.finish(self._resident, CheckpointId(0, last.step, ""))
        self._learn(last, last.coded, None)
        return [last]

    def placed(self, batch: list[RankSave], states: list[str], term: int) -> list[EncodedStep]:
        """The steps of a batch, each with the identity of the one that it builds on.

        Args:
            states: hashes of the states of all ranks; that of the last step is not needed.
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
        """A full, or a delta, is durable: the next step is compressed against it. Takes `snapshot` over.

        Args:
            seconds: how long it took.
        """
        self._policy.begin_steps(info.id, info.stored, seconds)
        self._resident.advance(info.id, snapshot)
        self.base = info.id

    def written(self, info: CheckpointInfo) -> None:
        """A batch is durable, of which this is the last checkpoint."""
        self._policy.batch_committed(info.id)
        self.base = info.id

    def restart(self) -> None:
        """Give up the step in memory: the next checkpoint is no diff."""
        self.base = None
        self._sums.clear()
        self._policy.end_steps()
        self._resident.clear()
