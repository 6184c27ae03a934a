"""Step diffs of ranks: each codes its share of a step against its share of the step before, in its own memory.

Rank 0 decides which steps are diffs and when a batch is written; the others are told (`ordering`, `batches`). What an
optimizer moved is coded by its arithmetic where a rank has a parameter and its moments alike, which `division` sees to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ckptstore.errors import FailedRankError, UsageError
from ckptstore.formats import digest
from ckptstore.formats.records import CheckpointId
from ckptstore.formats.retention_forecast import Chains
from ckptstore.formats.state import TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.deltas import MemoryBase
from ckptstore.write.encoding import Choices, Fed
from ckptstore.write.feeding import Feed
from ckptstore.write.ranks.orders import Order
from ckptstore.write.ranks.saving import RankSave
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.batcher import DiffOptions
from ckptstore.write.steps.encoding import EncodedStep, StepChoices, encode_step
from ckptstore.write.steps.fed import TooLongError, digest_of, plan_fed
from ckptstore.write.steps.unexplained import Unexplained

__all__ = ["RankDiffs"]


class RankDiffs:
    """What a rank keeps for step diffs. The thread that writes calls it, and the one that settles while that waits.

    Attributes:
        options: of this rank's writer; rank 0's decide.
        waiting: steps that are coded, or could not be, and wait for their batch.
        base: the checkpoint that the first of them builds on; None: there is none.
    """

    def __init__(self, options: DiffOptions, workers: Workers, snapshots: SnapshotPool, chains: Chains) -> None:
        """
        Args:
            chains: says which checkpoint is to be a full, because rules keep it. Of fulls and deltas it knows already.
        """
        self._chains = chains
        self._size = 0.0  # of this rank's share of the last step diff, as a part of the share
        self.options = options
        self.waiting: list[RankSave] = []
        self.base: CheckpointId | None = None
        self._workers = workers
        self._snapshots = snapshots
        self._choices = Choices(options.policy)
        self._step_choices = StepChoices()
        self._previous: MemoryBase | None = None
        self._unexplained = Unexplained()
        self._depth = 0
        self._begun = time.monotonic()

    @staticmethod
    def check(options: DiffOptions) -> None:
        """Raise `UsageError` if gradients are to be summed up."""
        if options.accumulate != "concatenate":
            raise UsageError("DiffOptions(accumulate='sum') cannot be combined with group=: ranks store every step")

    @property
    def stored(self) -> int:
        """Coded bytes that wait in memory."""
        return sum(one.coded.stored for one in self.waiting if one.coded is not None)

    def order(self, one: RankSave, restorable: Callable[[CheckpointId], bool]) -> Order | None:
        """Rank 0: how the next step is stored; None: not as a diff.

        Args:
            restorable: whether the catalog can restore a checkpoint, so that others may build on it.
        """
        controller = self.options.controller
        every = self.options.full_every if controller is None else controller.configuration.interval
        batch = self.options.batch if controller is None else controller.configuration.batch
        previous = self._previous
        if previous is None or self.base is None or self._depth + 1 >= every:
            return None
        if not self.waiting and not restorable(self.base):
            return None
        if self._chains.wants_full(one.step, previous.id.step, self._size):
            return None
        return Order(after=previous.id.step, last=not one.asynchronous or len(self.waiting) + 1 >= batch)

    def add(self, one: RankSave) -> None:
        """Code a step, which then waits; what stands in the way is its flaw, and its batch will fail."""
        try:
            if one.flaw is None:
                one.coded = self._coded(one)
        except BaseException as error:  # noqa: BLE001  # all ranks are told when the batch is written
            one.flaw = error
        else:
            if one.coded is not None:
                assert one.snapshot is not None
                assert one.how.after is not None
                self._unexplained.look(one.step, one.how.after, one.coded.excess)
                self._size = one.coded.stored / one.coded.nbytes if one.coded.nbytes else 1.0
                self._chains.stored(one.step, one.how.after, self._size)
                one.retained = True
                self._advance(MemoryBase(CheckpointId(0, one.step, ""), one.snapshot))
                self._depth += 1
        finally:
            self.waiting.append(one)
            one.let_go()
            one.leave_place()

    def _coded(self, one: RankSave) -> EncodedStep:
        previous, order = self._previous, one.how
        if previous is None or previous.id.step != order.after:
            raise FailedRankError(f"its share of step {order.after}, against which step {one.step} is coded, is gone")
        assert one.share is not None
        if isinstance(one.feed, Feed):
            return self._fed(one, one.feed, previous)
        return encode_step(
            one.share,
            one.updates,
            previous,
            one.step,
            choices=self._choices,
            step_choices=self._step_choices,
            workers=self._workers,
        )

    def _fed(self, one: RankSave, feed: Feed, previous: MemoryBase) -> EncodedStep:
        """Code a share that comes unit by unit: it takes the place of the one before."""
        with feed.reading():
            plan = plan_fed(
                feed.flat,
                one.updates,
                previous,
                one.step,
                choices=self._choices,
                step_choices=self._step_choices,
                workers=self._workers,
            )
        room = previous.snapshot.room(feed.flat)
        if room is not None:
            self._previous = None  # from here on it is no state that anybody saved, until all of the new one is there
            snapshot = previous.snapshot.turned(feed.flat, room)
        else:  # tensors of this rank alone have changed their sizes
            snapshot = self._snapshots.empty(feed.flat)
            room = snapshot.room(feed.flat)
        one.snapshot = snapshot
        try:
            return plan.encode(Fed(feed, room), self._workers)
        except TooLongError:
            # All of it is in memory, and what it was coded against is not: it is coded by itself, which is longer.
            return encode_step(
                snapshot.flat,
                (),
                _Nothing(previous.id),
                one.step,
                choices=self._choices,
                step_choices=self._step_choices,
                workers=self._workers,
            )

    def take(self) -> list[RankSave]:
        """Everything that waits, which from now on does not."""
        waiting, self.waiting = self.waiting, []
        return waiting

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
        found = {tensor.spec.name: digest_of(tensor) for unit in last.units for tensor in unit}
        known = {name: number for name, number in found.items() if number is not None}
        if len(known) == len(found):
            return known  # it was fed
        assert self._previous is not None
        tensors = self._previous.tensors
        return dict(zip(tensors, self._workers.pool.map(_digest, tensors.values()), strict=True))

    def begin(self, info: CheckpointInfo, snapshot: Snapshot, seconds: float) -> None:
        """A full, or a delta, is durable: the next step is coded against it. Takes `snapshot` over.

        Args:
            seconds: how long it took.
        """
        controller = self.options.controller
        if controller is not None:
            before, self._begun = self._begun, time.monotonic()
            controller.ran(self._begun - before)
            controller.wrote(max(info.stored, 1), max(seconds, 1e-6))
            controller.adapt()
        self._advance(MemoryBase(info.id, snapshot))
        self.base = info.id
        self._depth = 0

    def written(self, info: CheckpointInfo) -> None:
        """A batch is durable, of which this is the last checkpoint."""
        self.base = info.id

    def restart(self) -> None:
        """Let go of the step in memory: the next checkpoint is no diff."""
        self.base = None
        self._advance(None)

    def _advance(self, following: MemoryBase | None) -> None:
        previous, self._previous = self._previous, following
        if previous is not None:
            previous.forget()


class _Nothing:
    """A base that has no tensor."""

    def __init__(self, identity: CheckpointId) -> None:
        self.id = identity

    def spec(self, name: str) -> None:  # as every base has it
        """None: there is none of that name."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Nobody asks for what is not there."""
        raise AssertionError(f"{length} bytes from {start} of {name!r}, of which there are none")


def _digest(source: TensorSource) -> int:
    image = source.view()
    assert image is not None  # snapshots are host memory
    return digest.digest(image)
