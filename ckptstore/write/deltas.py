"""A writer's deltas: which bases it keeps in memory, and how the next checkpoint is stored.

The strategy is asked once per checkpoint, by the committer's thread alone: `write` makes segments durable, `committed`
is told when the record is history. Only then does the checkpoint become a base.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, UsageError
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.formats.records import CheckpointId, Encoding
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.segment_steps import StepEncoding
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.plain import WrittenState, write_full
from ckptstore.segments.session import SegmentSession
from ckptstore.write.encoding import Base, Choices, write_packed
from ckptstore.write.interval import FULL, Decision, Form, RestoreBound, Schedule
from ckptstore.write.snapshot import Snapshot, SnapshotPool

__all__ = ["DeltaOptions", "Deltas", "MemoryBase"]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How a writer makes deltas.

    Attributes:
        interval: checkpoints that share one base (T), or ``auto``: chosen from the sizes measured, within the bound.
        form: ``anchor`` (one state in memory) or ``paper`` (each checkpoint against the one T before; T states).
        bound: what restoring any checkpoint may cost.
        policy: which codecs may be chosen, and what for.
        compress_fulls: code fulls, too. They are smaller, but other tools cannot load them.
        memory: host bytes for bases; a base that does not fit is read back from the store. None: no limit.
    """

    interval: int | Literal["auto"] = "auto"
    form: Form = "anchor"
    bound: RestoreBound = field(default_factory=RestoreBound)
    policy: Policy = FAST_POLICY
    compress_fulls: bool = False
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 0:
            raise UsageError(f"memory for bases: {self.memory} bytes")
        Schedule(self.interval, self.form, self.bound)  # says what is wrong with them


class MemoryBase:
    """A base whose tensors are in host memory.

    Attributes:
        id: its identity.
        tensors: by name.
    """

    def __init__(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        self.id = identity
        self.tensors = snapshot.flat.tensors
        self._snapshot = snapshot

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See `Base.spec`."""
        source = self.tensors.get(name)
        return None if source is None else (source.dtype, tuple(source.shape))

    def read(self, name: str, start: int, length: int) -> Bytes:
        """See `Base.read`. A view: nothing is copied."""
        view = self.tensors[name].view()
        assert view is not None  # snapshots are host memory
        return view[start : start + length]

    @property
    def nbytes(self) -> int:
        """Host memory it takes."""
        return sum(source.nbytes for source in self.tensors.values())

    def forget(self) -> None:
        """Give the memory back."""
        self._snapshot.free()


class Deltas:
    """The deltas of one term.

    Attributes:
        schedule: when a delta is made, and against what; None: never.
        workers: threads that copy, hash and code.
    """

    def __init__(
        self,
        options: DeltaOptions | None,
        backend: Backend,
        draft: SegmentDoc,
        snapshots: SnapshotPool,
        reopen: Callable[[CheckpointId], StoredBase],
        threads: int,
    ) -> None:
        """Begin without a base: the first checkpoint is a full.

        Args:
            options: None: every checkpoint is an uncompressed full.
            draft: what all segments of the term say of themselves.
            reopen: opens a committed checkpoint as a base, when memory does not suffice to keep it.
            threads: threads that code; each has a chunk and its payload in memory.
        """
        self._options = options or DeltaOptions()
        self.schedule: Schedule | None = None
        if options is not None:
            self.schedule = Schedule(options.interval, options.form, options.bound)
        self._backend = backend
        self._draft = draft
        self._snapshots = snapshots
        self._reopen = reopen
        self._choices = Choices(self._options.policy)
        self._bases: dict[int, MemoryBase | StoredBase] = {}
        self.workers = Workers.started(threads, "ckptstore-encode")

    def write(
        self,
        flat: FlatState,
        step: int,
        moment: float,
        session: SegmentSession,
        restorable: Callable[[CheckpointId], bool],
    ) -> tuple[WrittenState, Decision, Base | None]:
        """Store `flat` as the schedule decides, and make it durable (COMMIT step 1).

        Args:
            moment: when the checkpoint was made, seconds since 1970.
            session: what it is written with; not every segment that it begins need be part of the result.
            restorable: whether the catalog to which the record will be applied can restore a checkpoint.
        """

        def store(base: Base | None, gap: int) -> WrittenState:
            kind, below = ("full", None) if base is None else ("delta", base.id)
            encoding = StepEncoding(self._draft.term, kind, below, moment)
            return self._store(session, flat, replace(self._draft, encodings={step: encoding}), base, gap)

        decision, base = self._decide(restorable)
        began = time.monotonic()
        try:
            written = store(base, decision.gap)
        except CkptError as error:
            if isinstance(base, StoredBase):
                self._restart()  # whether reading it failed or not: the next save shall not depend on it
            if not (isinstance(base, StoredBase) and isinstance(error, CorruptionError)):
                raise
            _warn(f"{self._backend.url}: base {base.id.ref} is damaged, step {step} becomes a full: {error}")
            decision, base = self._decide(restorable)
            written = store(base, decision.gap)
        if self.schedule is not None:
            # Decoding is about as fast as encoding and writing; it bounds a restore in seconds well enough.
            self.schedule.rate = written.stored / max(time.monotonic() - began, 1e-6)
        return written, decision, base

    def _decide(self, restorable: Callable[[CheckpointId], bool]) -> tuple[Decision, MemoryBase | StoredBase | None]:
        if self.schedule is None:
            return FULL, None
        decision = self.schedule.decide()
        if decision.base is None:
            return decision, None
        base = self._bases[decision.base]
        if restorable(base.id):
            return decision, base
        # A request retired it and dropped its segments: a delta against it could never be committed.
        self._restart()
        return self.schedule.decide(), None

    def _store(
        self, session: SegmentSession, flat: FlatState, draft: SegmentDoc, base: Base | None, gap: int
    ) -> WrittenState:
        if base is None and not self._options.compress_fulls:
            return write_full(session, flat, draft)
        return write_packed(session, flat, draft, base=base, gap=gap, choices=self._choices)

    @staticmethod
    def encoding(written: WrittenState, node: tuple[int, int], base: Base | None) -> Encoding:
        """The edge that the COMMIT adds."""
        return Encoding(
            checkpoint=node,
            kind="full" if base is None else "delta",
            base=None if base is None else base.id,
            segments=tuple(segment.id for segment in written.segments),
            lossy=False,
            bytes=written.stored,
        )

    def committed(
        self,
        decision: Decision,
        identity: CheckpointId,
        flat: FlatState,
        snapshot: Snapshot | None,
        stored: int,
        interrupted: Callable[[], bool],
    ) -> bool:
        """The checkpoint is history -> whether `snapshot` was kept as a base (else its memory is the caller's to free).

        Raises nothing: what fails here must not look like a save that failed. The next checkpoint is then a full.

        Args:
            flat: the state that was written; still unchanged.
            snapshot: what owns its memory, or None if that is the training's.
            interrupted: whether the training may have begun to change its memory, asked after it was copied.
        """
        if self.schedule is None:
            return False
        number = self.schedule.written(decision, stored)
        for old in decision.forget:
            if old in self._bases:
                self._bases.pop(old).forget()
        if not decision.keep:
            return False
        try:
            base = self._base(identity, flat, snapshot)
        except Exception as error:  # noqa: BLE001  # warnings among them, where these are errors
            self._restart()
            _warn(f"{self._backend.url}: {identity.ref} cannot be kept as a base, the next save is a full: {error}")
            return False
        self._bases[number] = base
        if interrupted():
            # Prevents: deltas against bits that nobody saved.
            self._restart()
            return False
        return isinstance(base, MemoryBase) and snapshot is not None

    def _base(self, identity: CheckpointId, flat: FlatState, snapshot: Snapshot | None) -> MemoryBase | StoredBase:
        nbytes = sum(source.nbytes for source in flat.tensors.values())
        held = sum(base.nbytes for base in self._bases.values() if isinstance(base, MemoryBase))
        if self._options.memory is not None and held + nbytes > self._options.memory:
            return self._reopen(identity)
        return MemoryBase(identity, snapshot or self._snapshots.copy(flat, self.workers.pool))

    def begin(self, draft: SegmentDoc) -> None:
        """Another term of the same writer: without a base, as the first began."""
        self._restart()
        self._draft = draft

    def _restart(self) -> None:
        """Let go of every base; the next checkpoint is a full."""
        if self.schedule is not None:
            self.schedule.restart()
        for base in self._bases.values():
            base.forget()
        self._bases.clear()

    def close(self) -> None:
        """Let go of every base. A second time does nothing."""
        self.workers.pool.shutdown()
        self._restart()


def _warn(message: str) -> None:
    with contextlib.suppress(Warning):  # where warnings are errors: this thread has a commit to finish
        warnings.warn(message, stacklevel=2)
