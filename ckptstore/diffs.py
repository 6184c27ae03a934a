"""A writer's gradient diffs: the state of the last step in memory, what waits for its batch, when a full is due.

The committer's thread alone uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore.backends.base import Backend
from ckptstore.batches import write_batch
from ckptstore.checkpoint import CheckpointInfo
from ckptstore.deltas import MemoryBase
from ckptstore.diffing import EncodedStep, StepChoices, encode_step
from ckptstore.encoding import Choices
from ckptstore.formats import digest
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.formats.errors import UsageError
from ckptstore.formats.records import CheckpointEntry, CheckpointId, Encoding, FormatFile, SegmentEntry
from ckptstore.formats.state import TensorSource
from ckptstore.snapshot import Snapshot
from ckptstore.staging import Staging
from ckptstore.updates import Update

__all__ = ["DiffOptions", "Diffs", "Waiting"]


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How a writer stores steps.

    Attributes:
        full_every: checkpoints from one full to the next: restoring any step replays fewer than that.
        batch: steps that are written at once. What waits for its batch is lost if the process is killed; a
            `PendingSave` is done, and `Writer.save` returns, only when the batch is durable.
        seconds: the longest that a step waits for its batch; None: until it is full.
        batch_bytes: coded bytes that may wait in memory.
        flush_on_sigterm: write what waits when the process is told to end (only for writers that the main thread
            opens).
        policy: which codecs tensors get that no optimizer moves.
    """

    full_every: int = 100
    batch: int = 1
    seconds: float | None = 30.0
    batch_bytes: int = 256 << 20
    flush_on_sigterm: bool = True
    policy: Policy = FAST_POLICY

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise UsageError(f"full_every: {self.full_every}, at least 1 is needed")
        if self.batch < 1:
            raise UsageError(f"batch: {self.batch}, at least 1 step is needed")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"seconds: {self.seconds}, more than 0 are needed, or None")
        if self.batch_bytes < 0:
            raise UsageError(f"batch_bytes: {self.batch_bytes}")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that waits for its batch, and who waits for it."""

    coded: EncodedStep
    time: float
    done: Future[CheckpointInfo]


class Diffs:
    """The gradient diffs of one term."""

    def __init__(
        self,
        options: DiffOptions,
        backend: Backend,
        fmt: FormatFile,
        term: int,
        encoders: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        """Begin without a step in memory: the first checkpoint is a full.

        Args:
            encoders: threads that code; `threads`: how many those are.
        """
        self.options = options
        self._backend = backend
        self._format = fmt
        self._term = term
        self._encoders = encoders
        self._threads = threads
        self._choices = Choices(options.policy)
        self._step_choices = StepChoices()
        self._previous: MemoryBase | None = None
        self._depth = 0
        self.waiting: list[Waiting] = []

    def due(self, restorable: Callable[[CheckpointId], bool]) -> bool:
        """Whether the next checkpoint has to be a full.

        Args:
            restorable: whether the catalog can restore a checkpoint, so that others may build on it.
        """
        if self._previous is None or self._depth + 1 >= self.options.full_every:
            return True
        return not self.waiting and not restorable(self._previous.id)

    def begin(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        """A full is durable: the next step is coded against it. Takes `snapshot` over."""
        self._advance(MemoryBase(identity, snapshot))
        self._depth = 0

    def add(self, snapshot: Snapshot, updates: Sequence[Update], step: int, done: Future[CheckpointInfo]) -> bool:
        """Code a step; it waits for its batch -> whether the batch is full. Takes `snapshot` over.

        Raises:
            StorageError, MemoryError: nothing has changed; `snapshot` is still the caller's.
        """
        assert self._previous is not None
        coded = encode_step(
            snapshot.flat,
            updates,
            self._previous,
            step,
            choices=self._choices,
            step_choices=self._step_choices,
            encoders=self._encoders,
            threads=self._threads,
        )
        self.waiting.append(Waiting(coded, time.time(), done))
        self._advance(MemoryBase(CheckpointId(self._term, step, coded.state), snapshot))
        self._depth += 1
        stored = sum(one.coded.stored for one in self.waiting)
        return len(self.waiting) >= self.options.batch or stored > self.options.batch_bytes

    def write(
        self, staging: Staging, pool: ThreadPoolExecutor, begun: Callable[[str], None]
    ) -> tuple[tuple[SegmentEntry, ...], tuple[CheckpointEntry, ...], tuple[Encoding, ...]]:
        """Make everything that waits durable -> what the COMMIT adds.

        Raises:
            StorageError: the medium failed.
        """
        assert self._previous is not None
        segments, encodings = write_batch(
            self._backend,
            [one.coded for one in self.waiting],
            run=self._format.run,
            term=self._term,
            staging=staging,
            pool=pool,
            begun=begun,
            digests=self._digests(),
        )
        entries = tuple(
            CheckpointEntry(self._term, one.coded.step, one.coded.state, one.time, one.coded.tensors, one.coded.nbytes)
            for one in self.waiting
        )
        return segments, entries, encodings

    def restart(self) -> None:
        """Let go of the step in memory: the next checkpoint is a full. What waits is forgotten."""
        self.waiting.clear()
        self._advance(None)

    def _advance(self, following: MemoryBase | None) -> None:
        previous, self._previous = self._previous, following
        if previous is not None:
            previous.forget()

    def _digests(self) -> dict[str, int]:
        """State digests of the last step, which is in memory."""
        assert self._previous is not None
        tensors = self._previous.tensors
        return dict(zip(tensors, self._encoders.map(_digest, tensors.values()), strict=True))


def _digest(source: TensorSource) -> int:
    image = source.view()
    assert image is not None  # snapshots are host memory
    return digest.digest(image)
