"""A writer's step diffs: keeps the steps that wait for their batch, and writes the batch.

Only the committer's thread uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, Node, SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import Workers
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.delta_encoding import ArrivingState
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.policy.orders import Order
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.steps.batch_segments import write_batch
from ckptstore.write.steps.bounded_step import ArrivingStep, TooLongError
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
        time: when it was compressed, in seconds since 1970.
        coded: the compressed step; None if gradients are summed.
    """

    job: SaveJob
    time: float
    coded: EncodedStep | None

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.job.step


@dataclass(frozen=True, slots=True)
class Written:
    """What the COMMIT of a batch adds. `became` has a checkpoint for each step that waited; `tags` name them."""

    segments: tuple[SegmentEntry, ...]
    encodings: tuple[Encoding, ...]
    became: tuple[CheckpointEntry, ...]
    tags: Mapping[str, Node]

    @property
    def checkpoints(self) -> tuple[CheckpointEntry, ...]:
        """The checkpoints, each once."""
        return tuple({entry.step: entry for entry in self.became}.values())


class BecomesFullError(Exception):
    """A step cannot be stored as a step diff; all of it is in memory.

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
            draft: the fields that all segments of the term share.
            workers: threads that compress.
            policy: decides which step is a step diff. Another object informs it of fulls and deltas.
        """
        self._missed: int | None = None  # a step after the one in memory that could not be compressed
        self.options = options
        self._draft = draft
        self._term = draft.term
        self._policy = policy
        self._resident = ResidentStep(options.policy, workers)
        self._workers = workers
        self._sums = GradientSum()
        self.waiting: list[Waiting] = []

    def order(self, restorable: Callable[[CheckpointId], bool], step: int) -> Order | None:
        """Decide how `step` is stored as a step diff; None: it must be a full or a delta.

        Args:
            restorable: whether the catalog can restore a checkpoint, so that others may build on it.
        """
        return self._policy.step_order(step, restorable, waiting=len(self.waiting))

    def begin(self, identity: CheckpointId, snapshot: Snapshot, nbytes: int, seconds: float) -> None:
        """Note that a full of `nbytes`, written in `seconds`, is durable: the next step is compressed against it.

        Takes ownership of `snapshot`.
        """
        self._policy.begin_steps(identity, nbytes, seconds)  # first: if it raises, the caller still owns `snapshot`
        self._missed = None
        self._resident.advance(identity, snapshot)

    def add(self, snapshot: Snapshot, updates: Sequence[Update], job: SaveJob, order: Order) -> bool:
        """Compress a step, which then waits for its batch -> whether the batch must be written.

        Takes ownership of `snapshot`.

        Args:
            order: the result of `order` for this step.

        Raises:
            StorageError, MemoryError: nothing has changed; the caller still owns `snapshot`.
            UsageError: a gradient to be summed is missing; the caller still owns `snapshot`, and the next checkpoint is
                a full.
        """
        step = job.step
        if self.options.accumulate == "sum":
            try:
                self._sums.add(updates, snapshot, self._resident.here, explained=bool(updates))
            except BaseException:
                self._policy.end_steps()  # sums without this step lead to a state far from any state of training
                raise
            self._policy.count_step()
            self.waiting.append(Waiting(job, time.time(), None))
            return order.last
        if self._missed is not None:
            _warn_unexplained(step, self._missed)
            updates = ()  # Prevents: explaining the difference of several steps by the updates of the last one.
        try:
            coded = self._resident.encode(snapshot.flat, updates, step)
        except BaseException:
            self._missed = step
            raise
        self._missed = None
        self._resident.unexplained.look(step, coded.base.step, coded.excess)
        identity = CheckpointId(self._term, step, coded.state)
        self._policy.compressed(identity, coded.base.step, coded.stored, coded.nbytes)
        self._policy.count_step()
        self._resident.advance(identity, snapshot)
        return self._wait(job, coded, order)

    def _wait(self, job: SaveJob, coded: EncodedStep, order: Order) -> bool:
        """Add a compressed step to the waiting ones -> whether their batch must be written."""
        self.waiting.append(Waiting(job, time.time(), coded))
        return order.last or self._policy.too_large(self.waiting_nbytes)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of the payloads of the steps that wait for their batch."""
        return sum(one.coded.stored for one in self.waiting if one.coded is not None)

    def lose_step(self) -> None:
        """Note that a step was not saved, and is not part of the step in memory. See `OrderPolicy.lost`."""
        self._policy.lost()

    def room(self, flat: FlatState) -> dict[str, Bytes] | None:
        """Memory for a state that is copied unit by unit: its tensors replace those of the previous step.

        None: too much of the state has changed its size, so a full must be stored.
        """
        return self._resident.here.snapshot.room(flat)

    def add_arriving(self, arriving: ArrivingState, updates: Sequence[Update], job: SaveJob, order: Order) -> bool:
        """Compress a step that is copied unit by unit; otherwise as `add`.

        Raises:
            BecomesFullError: the step must be stored as a full. Its whole state is in memory.
            any other error: the next checkpoint is a full. Waiting steps are not affected.
        """
        with self._replace_step(arriving, updates, job.step) as (plan, reached):
            coded = plan.encode(arriving, self._workers)
            reached(coded.state)
        self._resident.unexplained.look(job.step, coded.base.step, coded.excess)
        self._policy.compressed(self._resident.here.id, coded.base.step, coded.stored, coded.nbytes)
        return self._wait(job, coded, order)

    def stream(
        self, session: SegmentSession, arriving: ArrivingState, updates: Sequence[Update], job: SaveJob
    ) -> Written:
        """Make a step durable at once, while it is copied unit by unit.

        Raises as `add_arriving`, and StorageError.
        """
        moment, step, labels = time.time(), job.step, job.labels
        with self._replace_step(arriving, updates, step) as (plan, reached):
            written = plan.write(arriving, session, self._draft, moment)
            reached(written.state)
        base, stored = written.encoding.base, written.encoding.bytes
        assert base is not None
        self._resident.unexplained.look(step, base.step, written.excess)
        self._policy.compressed(self._resident.here.id, base.step, stored or 0, written.nbytes)
        tensors, nbytes, extra = written.tensors, written.nbytes, labels.extra()
        entry = CheckpointEntry(self._term, step, written.state, moment, tensors, nbytes, extra)
        return Written(written.segments, (written.encoding,), (entry,), dict.fromkeys(labels.tags, entry.node))

    @contextmanager
    def _replace_step(
        self, arriving: ArrivingState, updates: Sequence[Update], step: int
    ) -> Iterator[tuple[ArrivingStep, Callable[[str], None]]]:
        """Yield a plan that compresses a step, and a function to call with its state hash.

        The step then replaces the previous one in memory.
        """
        assert arriving.room is not None
        plan = self._resident.plan(arriving.feed, updates, step)
        snapshot = self._resident.turn(arriving.feed.flat, arriving.room)
        self._missed = None

        def reached(state: str) -> None:
            identity = CheckpointId(self._term, step, state)
            self._resident.advance(identity, snapshot)
            self._policy.count_step()

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
        """Make all waiting steps durable.

        Raises:
            StorageError: the medium failed.
        """
        coded = [one.coded for one in self.waiting if one.coded is not None]
        if self._sums.latest is not None:
            coded = [self._sum_up()]
        moments = [one.time for one in self.waiting]
        segments, encodings = write_batch(
            session,
            coded,
            self._draft,
            times=moments[-len(coded) :],  # of a sum: the time of the last step
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
        tensors, nbytes, extra = coded.tensors, coded.nbytes, one.job.labels.extra()
        return CheckpointEntry(self._term, coded.step, coded.state, one.time, tensors, nbytes, extra)

    def _sum_up(self) -> EncodedStep:
        """The one step that represents all waiting steps."""
        coded = self._sums.finish(self._resident, CheckpointId(self._term, self.waiting[-1].step, ""))
        self._policy.compressed(self._resident.here.id, coded.base.step, coded.stored, coded.nbytes)
        return coded

    def restart(self) -> None:
        """Drop the step in memory and the waiting steps: the next checkpoint is a full."""
        self.waiting.clear()
        self._sums.clear()
        self._missed = None
        self._policy.end_steps()
        self._resident.clear()


def _warn_unexplained(step: int, missed: int) -> None:
    """Warn that a step is stored as a difference, and why."""
    warn(
        f"step {step} is stored as a difference, which takes more bytes: step {missed} before it "
        "could not be stored, and one step can be explained",
        UnexplainedStepWarning,
    )
