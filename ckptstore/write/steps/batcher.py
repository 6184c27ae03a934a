"""A writer's step diffs: the state of the last step in memory, what waits for its batch, when a full is due.

The committer's thread alone uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from ckptstore.errors import UsageError
from ckptstore.formats import digest
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, Node, SegmentEntry
from ckptstore.formats.retention_forecast import Chains
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.option_checks import seconds, whole
from ckptstore.host.threads import Workers
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.deltas import MemoryBase
from ckptstore.write.encoding import Choices, Fed
from ckptstore.write.job import Job
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.batch_segments import write_batch
from ckptstore.write.steps.encoding import EncodedStep, StepChoices, encode_step
from ckptstore.write.steps.fed import FedStep, TooLongError, digest_of, plan_fed
from ckptstore.write.steps.gradient_sum import Sums
from ckptstore.write.steps.unexplained import Unexplained
from ckptstore.write.steps.updates import Update

__all__ = ["Adapting", "BecomesFullError", "DiffOptions", "Diffs", "Waiting", "Written"]


class Pair(Protocol):
    """A configuration of the LowDiff model: checkpoints from one full to the next, steps of a batch."""

    @property
    def interval(self) -> int:
        """1/f."""

    @property
    def batch(self) -> int:
        """b."""


class Adapting(Protocol):
    """What adapts (f, b) while training runs: `tuning.Controller`."""

    @property
    def configuration(self) -> Pair:
        """What is best now."""

    def wrote(self, nbytes: float, seconds: float) -> None:
        """A full was written."""

    def ran(self, seconds: float) -> None:
        """So much time went by without a failure."""

    def adapt(self) -> object:
        """Move, if it pays."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How a writer stores steps.

    Attributes:
        full_every: checkpoints from one full to the next: restoring any step replays fewer than that.
        batch: steps that are written at once. What waits for its batch is lost if the process is killed; a
            `PendingSave` is done only when the batch is durable. Asking for its result writes it, as `Writer.save`
            does.
        seconds: the longest that a step waits for its batch; None or infinity: until it is full.
        batch_bytes: coded bytes that may wait in memory.
        flush_on_sigterm: write what waits when the process is told to end (only for writers that the main thread
            opens).
        policy: which codecs tensors get that no optimizer moves.
        accumulate: ``concatenate``: every step of a batch is a checkpoint, exact. ``sum``: their gradients are added
            up and applied as one step; the batch's last step is its only checkpoint, *lossy* under every optimizer,
            and is marked so wherever it appears. Saves of the other steps answer with that one, their tags name it, and
            its metadata are the last step's.
        controller: chooses `full_every` and `batch` instead, and changes them when a full is due: a
            `tuning.Controller` is told how long fulls take and how long training has run.
    """

    full_every: int = 100
    batch: int = 1
    seconds: float | None = 30.0
    batch_bytes: int = 256 << 20
    flush_on_sigterm: bool = True
    policy: Policy = FAST_POLICY
    accumulate: Literal["concatenate", "sum"] = "concatenate"
    controller: Adapting | None = None

    @property
    def waits(self) -> bool:
        """Whether a step may wait for others."""
        return self.batch > 1 or self.controller is not None

    def __post_init__(self) -> None:
        for name, number in (("full_every", self.full_every), ("batch", self.batch)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"{name}: {number!r}; a whole number from 1 on is needed")
        object.__setattr__(self, "seconds", seconds("seconds", self.seconds, above=True))
        whole("batch_bytes", self.batch_bytes, 0)
        if not isinstance(self.policy, Policy):
            raise UsageError(f"policy: {self.policy!r:.80}; a Policy of ckptstore.formats.codecs is needed")
        if self.controller is not None and not hasattr(self.controller, "adapt"):
            raise UsageError(f"controller: {self.controller!r:.80}; a tuning.Controller is needed")
        if self.accumulate not in ("concatenate", "sum"):
            raise UsageError(f"accumulate: {self.accumulate!r}, 'concatenate' or 'sum'")


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

    def __init__(self, options: DiffOptions, draft: SegmentDoc, workers: Workers, chains: Chains) -> None:
        """Begin without a step in memory: the first checkpoint is a full.

        Args:
            draft: what all segments of the term say of themselves.
            workers: threads that code.
            chains: says which checkpoint is to be a full, because rules keep it. Of fulls it knows already.
        """
        self._chains = chains
        self._size = 0.0  # of the last step diff, as a part of a full
        self._unexplained = Unexplained()
        self._missed: int | None = None  # a step that could not be coded, since the one in memory
        self.options = options
        self._draft = draft
        self._term = draft.term
        self._workers = workers
        self._choices = Choices(options.policy)
        self._step_choices = StepChoices()
        self._previous: MemoryBase | None = None
        self._depth = 0
        self._begun = time.monotonic()
        self._sums = Sums()
        self._latest: Snapshot | None = None  # of what is being summed up
        self._incomplete = False  # a step is missing from the sums
        self.waiting: list[Waiting] = []

    @property
    def full_every(self) -> int:
        """Checkpoints from one full to the next, at present."""
        controller = self.options.controller
        return self.options.full_every if controller is None else controller.configuration.interval

    @property
    def batch(self) -> int:
        """Steps of a batch, at present."""
        controller = self.options.controller
        return self.options.batch if controller is None else controller.configuration.batch

    def due(self, restorable: Callable[[CheckpointId], bool], step: int) -> bool:
        """Whether the next checkpoint has to be a full.

        Args:
            step: its step.
            restorable: whether the catalog can restore a checkpoint, so that others may build on it.
        """
        if self._previous is None or self._incomplete or self._depth + 1 >= self.full_every:
            return True
        if self._chains.wants_full(step, self._previous.id.step, self._size):
            return True
        return not self.waiting and not restorable(self._previous.id)

    def _stored(self, step: int, base: int, stored: int, nbytes: int) -> None:
        """A step diff takes `stored` bytes of a state of `nbytes`."""
        self._size = stored / nbytes if nbytes else 1.0
        self._chains.stored(step, base, self._size)

    def begin(self, identity: CheckpointId, snapshot: Snapshot, nbytes: int, seconds: float) -> None:
        """A full of `nbytes`, written in `seconds`, is durable: the next step is coded against it.

        Takes `snapshot` over.
        """
        controller = self.options.controller
        if controller is not None:  # first: if it raises, `snapshot` is still the caller's
            before, self._begun = self._begun, time.monotonic()
            controller.ran(self._begun - before)
            controller.wrote(max(nbytes, 1), max(seconds, 1e-6))
            controller.adapt()
        self._advance(MemoryBase(identity, snapshot))
        self._depth = 0
        self._incomplete = False

    def add(self, snapshot: Snapshot, updates: Sequence[Update], job: Job) -> bool:
        """Code a step; it waits for its batch -> whether the batch is full. Takes `snapshot` over.

        Raises:
            StorageError, MemoryError: nothing has changed; `snapshot` is still the caller's.
            UsageError: a gradient is missing that was to be summed up; likewise, but the next checkpoint is a full.
        """
        assert self._previous is not None
        step = job.step
        if self.options.accumulate == "sum":
            try:
                self._sums.add(updates, snapshot.flat, self._previous)
            except BaseException:
                self._incomplete = True  # sums without this step lead to where training never was near
                raise
            self._depth += 1
            self._keep_latest(snapshot)
            self.waiting.append(Waiting(job, time.time(), None))
            return len(self.waiting) >= self.batch
        if self._missed is not None:
            _warn_unexplained(step, self._missed)
            updates = ()  # Prevents: a step explained by itself alone, from a checkpoint that lies further back.
        try:
            coded = self._encode(snapshot, updates, step)
        except BaseException:
            self._missed = step
            raise
        self._missed = None
        self._unexplained.look(step, coded.base.step, coded.excess)
        self._stored(step, coded.base.step, coded.stored, coded.nbytes)
        self._depth += 1
        self.waiting.append(Waiting(job, time.time(), coded))
        self._advance(MemoryBase(CheckpointId(self._term, step, coded.state), snapshot))
        stored = sum(one.coded.stored for one in self.waiting if one.coded is not None)
        return len(self.waiting) >= self.batch or stored > self.options.batch_bytes

    def room(self, flat: FlatState) -> dict[str, Bytes] | None:
        """Where the tensors of a step that is fed take the places of the step before -> None: a full has to be stored,
        as too much of it is new.
        """
        assert self._previous is not None
        return self._previous.snapshot.room(flat)

    def add_fed(self, fed: Fed, updates: Sequence[Update], job: Job) -> bool:
        """As `add`, of a step that comes unit by unit.

        Raises:
            BecomesFullError: it has to be stored as a full, from memory.
            anything else: the next checkpoint is a full. What waits is none the worse for it.
        """
        with self._advanced(fed, updates, job.step) as (plan, reached):
            coded = plan.encode(fed, self._workers)
            reached(coded.state)
        self._unexplained.look(job.step, coded.base.step, coded.excess)
        self._stored(job.step, coded.base.step, coded.stored, coded.nbytes)
        self.waiting.append(Waiting(job, time.time(), coded))
        stored = sum(one.coded.stored for one in self.waiting if one.coded is not None)
        return len(self.waiting) >= self.batch or stored > self.options.batch_bytes

    def stream(self, session: SegmentSession, fed: Fed, updates: Sequence[Update], job: Job) -> Written:
        """Make a step durable that comes unit by unit and waits for no other; raises as `add_fed`, and StorageError."""
        moment, step, labels = time.time(), job.step, job.labels
        with self._advanced(fed, updates, step) as (plan, reached):
            written = plan.write(fed, session, self._draft, moment)
            reached(written.state)
        base, stored = written.encoding.base, written.encoding.bytes
        assert base is not None
        self._unexplained.look(step, base.step, written.excess)
        self._stored(step, base.step, stored or 0, written.nbytes)
        entry = CheckpointEntry(self._term, step, written.state, moment, written.tensors, written.nbytes, labels.extra)
        return Written(written.segments, (written.encoding,), (entry,), dict.fromkeys(labels.tags, entry.node))

    @contextmanager
    def _advanced(
        self, fed: Fed, updates: Sequence[Update], step: int
    ) -> Iterator[tuple[FedStep, Callable[[str], None]]]:
        """How a step is coded that takes the place of the one before, and what is to be told its state hash then."""
        assert self._previous is not None
        assert fed.room is not None
        before, flat = self._previous, fed.feed.flat
        with fed.feed.reading():
            plan = plan_fed(
                flat,
                updates,
                before,
                step,
                choices=self._choices,
                step_choices=self._step_choices,
                workers=self._workers,
            )
        # From here on it is no state that anybody saved, until all of the new one is there.
        self._previous = None
        snapshot = before.snapshot.turned(flat, fed.room)

        def reached(state: str) -> None:
            self._previous = MemoryBase(CheckpointId(self._term, step, state), snapshot)
            self._depth += 1

        try:
            yield plan, reached
        except TooLongError as error:
            raise BecomesFullError(snapshot) from error
        except BaseException:
            snapshot.free()
            raise

    def write(self, session: SegmentSession) -> Written:
        """Make everything that waits durable.

        Raises:
            StorageError: the medium failed.
        """
        coded = [one.coded for one in self.waiting if one.coded is not None]
        if self._latest is not None:
            coded = [self._summed_up()]
        moments = [one.time for one in self.waiting]
        segments, encodings = write_batch(
            session,
            coded,
            self._draft,
            times=moments[-len(coded) :],  # of what was summed up: the last step's
            digests=self._digests(coded[-1]),
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

    def _encode(self, snapshot: Snapshot, updates: Sequence[Update], step: int, *, lossy: bool = False) -> EncodedStep:
        assert self._previous is not None
        return encode_step(
            snapshot.flat,
            updates,
            self._previous,
            step,
            choices=self._choices,
            step_choices=self._step_choices,
            workers=self._workers,
            lossy=lossy,
        )

    def _summed_up(self) -> EncodedStep:
        """The one step that stands for all that wait."""
        assert self._previous is not None
        assert self._latest is not None
        step, snapshot = self.waiting[-1].step, self._latest
        coded = self._encode(snapshot, self._sums.apply(snapshot.flat, self._previous), step, lossy=True)
        self._stored(step, coded.base.step, coded.stored, coded.nbytes)
        self._sums.clear()
        self._latest = None
        self._advance(MemoryBase(CheckpointId(self._term, step, coded.state), snapshot))
        return coded

    def _keep_latest(self, snapshot: Snapshot | None) -> None:
        before, self._latest = self._latest, snapshot
        if before is not None:
            before.free()

    def restart(self) -> None:
        """Let go of the step in memory: the next checkpoint is a full. What waits is forgotten."""
        self.waiting.clear()
        self._sums.clear()
        self._incomplete = False
        self._keep_latest(None)
        self._advance(None)

    def _advance(self, following: MemoryBase | None) -> None:
        self._missed = None
        previous, self._previous = self._previous, following
        if previous is not None:
            previous.forget()

    def _digests(self, last: EncodedStep) -> dict[str, int]:
        """State digests of the last step."""
        found = {tensor.spec.name: digest_of(tensor) for unit in last.units for tensor in unit}
        known = {name: number for name, number in found.items() if number is not None}
        if len(known) == len(found):
            return known  # it was fed, and what is in memory may be torn by now
        assert self._previous is not None
        tensors = self._previous.tensors
        return dict(zip(tensors, self._workers.pool.map(_digest, tensors.values()), strict=True))


def _warn_unexplained(step: int, missed: int) -> None:
    """Say why a step is stored as a difference."""
    warn(
        f"step {step} is stored as a difference, which takes more bytes: step {missed} before it "
        "could not be stored, and one step can be explained",
        UnexplainedStepWarning,
    )


def _digest(source: TensorSource) -> int:
    image = source.view()
    assert image is not None  # snapshots are host memory
    return digest.digest(image)
