"""A writer's step diffs: what waits for its batch, and how that is written.

The committer's thread alone uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, Node, SegmentEntry
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import Workers
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.delta_encoding import Fed
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.policy.orders import Order
from ckptstore.write.saves.job import Job
from ckptstore.write.steps.batch_segments import write_batch
from ckptstore.write.steps.bounded_step import FedStep, TooLongError
from ckptstore.write.steps.gradient_sum import GradientSum
from ckptstore.write.steps.resident_step import ResidentStep
from ckptstore.write.steps.step_encoding import EncodedStep
from ckptstore.write.steps.updates import Update

__all__ = ["BecomesFullError", "Diffs", "Waiting", "Written"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits for its batch.

    Attributes:
        job: its save.
        time: when it was compressed, seconds since 1970.
        coded: how it will be stored; None where gradients are summed up.
    """

    job: Job
    time: float
    coded: EncodedStep | None

    @property
    def step(self) -> int:
        """Its number."""
        return self.job.step


@dataclass(frozen=True, slots=True)
class Written:
    """What the COMMIT of a batch adds, and for each step that waited the checkpoint that it became; tags name those."""

    segments: tuple[SegmentEntry, ...]
    encodings: tuple[Encoding, ...]
    became: tuple[CheckpointEntry, ...]
    tags: Mapping[str, Node]

    @property
    def checkpoints(self) -> tuple[CheckpointEntry, ...]:
        """Each once."""
        return tuple({entry.step: entry for entry in self.became}.values())


class BecomesFullError(Exception):
    """A step cannot be stored as a step diff, and is in memory as a whole.

    Attributes:
        snapshot: the state.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class Diffs:
    """The step diffs of one term."""

    def __init__(self, options: DiffOptions, draft: SegmentDoc, workers: Workers, policy: OrderPolicy) -> None:
        """Begin without a step in memory: the first checkpoint is a full.

        Args:
            draft: the members that all segments of the term have.
            workers: threads that compress.
            policy: decides which step is a step diff. Learns of fulls and deltas elsewhere.
        """
        self._missed: int | None = None  # a step that could not be compressed, since the one in memory
        self.options = options
        self._draft = draft
        self._term = draft.term
        self._policy = policy
        self._resident = ResidentStep(options.policy, workers)
        self._workers = workers
        self._sums = GradientSum()
        self.waiting: list[Waiting] = []

    def order(self, restorable: Callable[[CheckpointId], bool], step: int) -> Order | None:
        """How `step` is stored as a step diff; None: it has to be a full, or a delta.

        Args:
            restorable: whether the catalog can restore a checkpoint, so that others may build on it.
        """
        return self._policy.step_order(step, restorable, waiting=len(self.waiting))

    def begin(self, identity: CheckpointId, snapshot: Snapshot, nbytes: int, seconds: float) -> None:
        """A full of `nbytes`, written in `seconds`, is durable: the next step is compressed against it.

        Takes `snapshot` over.
        """
        self._policy.begin_steps(identity, nbytes, seconds)  # first: if it raises, `snapshot` is still the caller's
        self._missed = None
        self._resident.advance(identity, snapshot)

    def add(self, snapshot: Snapshot, updates: Sequence[Update], job: Job, order: Order) -> bool:
        """Compress a step; it waits for its batch -> whether the batch has to be written. Takes `snapshot` over.

        Args:
            order: what `order` returned for this step.

        Raises:
            StorageError, MemoryError: nothing has changed; `snapshot` is still the caller's.
            UsageError: a gradient is missing that was to be summed up; likewise, but the next checkpoint is a full.
        """
        step = job.step
        if self.options.accumulate == "sum":
            try:
                self._sums.add(updates, snapshot, self._resident.here, explained=bool(updates))
            except BaseException:
                self._policy.end_steps()  # sums without this step lead to where training never was near
                raise
            self._policy.joined()
            self.waiting.append(Waiting(job, time.time(), None))
            return order.last
        if self._missed is not None:
            _warn_unexplained(step, self._missed)
            updates = ()  # Prevents: a step explained by itself alone, from a checkpoint that lies further back.
        try:
            coded = self._resident.encode(snapshot.flat, updates, step)
        except BaseException:
            self._missed = step
            raise
        self._missed = None
        self._resident.unexplained.look(step, coded.base.step, coded.excess)
        identity = CheckpointId(self._term, step, coded.state)
        self._policy.compressed(identity, coded.base.step, coded.stored, coded.nbytes)
        self._policy.joined()
        self._resident.advance(identity, snapshot)
        return self._wait(job, coded, order)

    def _wait(self, job: Job, coded: EncodedStep, order: Order) -> bool:
        """Put a compressed step to those that wait -> whether their batch has to be written."""
        self.waiting.append(Waiting(job, time.time(), coded))
        stored = sum(one.coded.stored for one in self.waiting if one.coded is not None)
        return order.last or self._policy.too_large(stored)

    def lose_step(self) -> None:
        """A step was not saved, and is not in the step in memory. See `OrderPolicy.lost`."""
        self._policy.lost()

    def room(self, flat: FlatState) -> dict[str, Bytes] | None:
        """Where the tensors of a state that is copied unit by unit take the places of the step before -> None: a full
        has to be stored, because too much of it has another size.
        """
        return self._resident.here.snapshot.room(flat)

    def add_fed(self, fed: Fed, updates: Sequence[Update], job: Job, order: Order) -> bool:
        """As `add`, of a step that is copied unit by unit.

        Raises:
            BecomesFullError: it has to be stored as a full, from memory.
            anything else: the next checkpoint is a full. What waits is not affected.
        """
        with self._advanced(fed, updates, job.step) as (plan, reached):
            coded = plan.encode(fed, self._workers)
            reached(coded.state)
        self._resident.unexplained.look(job.step, coded.base.step, coded.excess)
        self._policy.compressed(self._resident.here.id, coded.base.step, coded.stored, coded.nbytes)
        return self._wait(job, coded, order)

    def stream(self, session: SegmentSession, fed: Fed, updates: Sequence[Update], job: Job) -> Written:
        """Make a step durable that is copied unit by unit and waits for no other.

        Raises as `add_fed`, and StorageError.
        """
        moment, step, labels = time.time(), job.step, job.labels
        with self._advanced(fed, updates, step) as (plan, reached):
            written = plan.write(fed, session, self._draft, moment)
            reached(written.state)
        base, stored = written.encoding.base, written.encoding.bytes
        assert base is not None
        self._resident.unexplained.look(step, base.step, written.excess)
        self._policy.compressed(self._resident.here.id, base.step, stored or 0, written.nbytes)
        entry = CheckpointEntry(self._term, step, written.state, moment, written.tensors, written.nbytes, labels.extra)
        return Written(written.segments, (written.encoding,), (entry,), dict.fromkeys(labels.tags, entry.node))

    @contextmanager
    def _advanced(
        self, fed: Fed, updates: Sequence[Update], step: int
    ) -> Iterator[tuple[FedStep, Callable[[str], None]]]:
        """How a step is compressed that takes the place of the one before; call the function with its state hash."""
        assert fed.room is not None
        plan = self._resident.plan(fed.feed, updates, step)
        snapshot = self._resident.turn(fed.feed.flat, fed.room)
        self._missed = None

        def reached(state: str) -> None:
            identity = CheckpointId(self._term, step, state)
            self._resident.advance(identity, snapshot)
            self._policy.joined()

        try:
            yield plan, reached
        except TooLongError as error:
            self._policy.end_steps()
            raise BecomesFullError(snapshot) from error
        except BaseException:
            self._policy.end_steps()
            snapshot.free()
            raise

    def write(self, session: SegmentSession) -> Written:
        """Make everything that waits durable.

        Raises:
            StorageError: the medium failed.
        """
        coded = [one.coded for one in self.waiting if one.coded is not None]
        if self._sums.latest is not None:
            coded = [self._summed_up()]
        moments = [one.time for one in self.waiting]
        segments, encodings = write_batch(
            session,
            coded,
            self._draft,
            times=moments[-len(coded) :],  # of what was summed up: the last step's
            digests=self._resident.digests(coded[-1]),
        )
        last = self.waiting[-1]
        became = tuple(
            self._entry(coded[-1], last) if one.coded is None else self._entry(one.coded, one) for one in self.waiting
        )
        tags = {
            name: entry.node for one, entry in zip(self.waiting, became, strict=True) for name in one.job.labels.tags
        }
        return Written(segments, encodings, became, tags)

    def _entry(self, coded: EncodedStep, one: Waiting) -> CheckpointEntry:
        tensors, nbytes, extra = coded.tensors, coded.nbytes, one.job.labels.extra
        return CheckpointEntry(self._term, coded.step, coded.state, one.time, tensors, nbytes, extra)

    def _summed_up(self) -> EncodedStep:
        """The one step that stands for all that wait."""
        coded = self._sums.finish(self._resident, CheckpointId(self._term, self.waiting[-1].step, ""))
        self._policy.compressed(self._resident.here.id, coded.base.step, coded.stored, coded.nbytes)
        return coded

    def restart(self) -> None:
        """Give up the step in memory: the next checkpoint is a full. What waits is forgotten."""
        self.waiting.clear()
        self._sums.clear()
        self._missed = None
        self._policy.end_steps()
        self._resident.clear()


def _warn_unexplained(step: int, missed: int) -> None:
    """Say why a step is stored as a difference."""
    warn(
        f"step {step} is stored as a difference, which takes more bytes: step {missed} before it "
        "could not be stored, and one step can be explained",
        UnexplainedStepWarning,
    )
