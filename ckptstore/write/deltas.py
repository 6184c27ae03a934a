"""A writer's deltas: which bases it keeps in memory, and how the next checkpoint is stored.

The strategy is asked once per checkpoint, by the committer's thread alone: `write` makes segments durable, `committed`
is told when the record is history. Only then does the checkpoint become a base.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError, UsageError
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.formats.records import CheckpointId, Encoding
from ckptstore.formats.retention_forecast import Chains
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.segment_steps import StepEncoding
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import warn
from ckptstore.host.option_checks import whole
from ckptstore.host.threads import Workers
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.mapped_fulls import DirectState, map_segments, regions_of, write_direct
from ckptstore.segments.plain_segments import WrittenState, write_full
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.encoding import Base, Choices, Fed, write_packed
from ckptstore.write.feeding import Feed
from ckptstore.write.interval import FULL, Decision, Form, RestoreBound, Schedule
from ckptstore.write.snapshot import HostTensor, Snapshot, SnapshotPool

__all__ = ["DeltaOptions", "Deltas", "MemoryBase"]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How a writer makes deltas.

    Attributes:
        interval: checkpoints that share one base (T), or ``auto``: chosen from the sizes measured, within the bound.
        form: ``anchor`` (one state in memory) or ``paper`` (each checkpoint against the one T before; T states).
        bound: what restoring any checkpoint may cost; a text is read as `RestoreBound.parse` does (``3x,30s``).
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
        if self.memory is not None:
            whole("memory (bytes for bases)", self.memory, 0)
        bound: object = self.bound
        if isinstance(bound, str):
            object.__setattr__(self, "bound", RestoreBound.parse(bound))
        elif not isinstance(bound, RestoreBound):
            raise UsageError(f"bound: {bound!r:.80}; a RestoreBound is needed, or a text as '3x,30s'")
        if not isinstance(self.policy, Policy):
            raise UsageError(f"policy: {self.policy!r:.80}; a Policy of ckptstore.formats.codecs is needed")
        Schedule(self.interval, self.form, self.bound)  # says what is wrong with them


class MemoryBase:
    """A base whose tensors are in host memory.

    Attributes:
        id: its identity.
        tensors: by name.
        snapshot: what owns their memory.
    """

    def __init__(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        self.id = identity
        self.tensors = snapshot.flat.tensors
        self.snapshot = snapshot

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
        self.snapshot.free()


class Deltas:
    """The deltas of one term.

    Attributes:
        schedule: when a delta is made, and against what; None: never.
        chains: what they keep stored.
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
        chains: Chains | None = None,
    ) -> None:
        """Begin without a base: the first checkpoint is a full.

        Args:
            options: None: every checkpoint is an uncompressed full.
            draft: what all segments of the term say of themselves.
            reopen: opens a committed checkpoint as a base, when memory does not suffice to keep it.
            threads: threads that code; each has a chunk and its payload in memory.
            chains: says which checkpoint is to be a full, because rules keep it; None: there are no rules.
        """
        self.chains = Chains(tuple) if chains is None else chains
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
        self._fed: Snapshot | None = None  # what takes the state that is being fed
        self.workers = Workers.sleeping(threads, "ckptstore-encode")

    def bases(self) -> list[CheckpointId]:
        """What the next checkpoints may be coded against."""
        return [base.id for base in self._bases.values()]

    def map_full(self, flat: FlatState, step: int) -> DirectState | None:
        """Segments for a full of a state like `flat`, mapped to be copied into; None: the medium has no such memory.

        Raises `StorageError`. For a writer that makes no deltas; by any thread.
        """
        encoding = StepEncoding(self._draft.term, "full", None, time.time())
        mapped = map_segments(self._backend, flat, replace(self._draft, encodings={step: encoding}))
        if mapped is None:
            return None
        regions, places = regions_of(mapped, flat)
        tensors: dict[str, TensorSource] = {name: HostTensor(one, places[name]) for name, one in flat.tensors.items()}
        return DirectState(flat.tree, tensors, regions, mapped=mapped)

    def write(
        self,
        flat: FlatState,
        step: int,
        moment: float,
        session: SegmentSession,
        restorable: Callable[[CheckpointId], bool],
        feed: Feed | None = None,
    ) -> tuple[WrittenState, Decision, Base | None]:
        """Store `flat` as the schedule decides, and make it durable (COMMIT step 1).

        Args:
            moment: when the checkpoint was made, seconds since 1970.
            session: what it is written with; not every segment that it begins need be part of the result.
            restorable: whether the catalog to which the record will be applied can restore a checkpoint.
            feed: how `flat` comes, if it is not read where it is. Whatever goes wrong from here on until `committed`,
                `torn` has to be told.
        """

        def store(base: Base | None, gap: int) -> WrittenState:
            kind, below = ("full", None) if base is None else ("delta", base.id)
            encoding = StepEncoding(self._draft.term, kind, below, moment)
            return self._store(session, state, replace(self._draft, encodings={step: encoding}), base, gap, fed)

        decision, base = self._decide(restorable, step)
        state, fed = flat, None
        if feed is not None:
            decision, base, state, fed = self._taken_in(decision, base, feed)
        began = time.monotonic()
        try:
            written = store(base, decision.gap)
        except CkptError as error:
            if isinstance(base, StoredBase):
                self._restart()  # whether reading it failed or not: the next save shall not depend on it
            if not (isinstance(base, StoredBase) and isinstance(error, CorruptionError)):
                raise
            warn(f"{self._backend.url}: base {base.id.ref} is damaged, step {step} becomes a full: {error}")
            decision, base = self._decide(restorable, step)
            written = store(base, decision.gap)
        if self.schedule is not None:
            # Decoding is about as fast as encoding and writing; it bounds a restore in seconds well enough.
            self.schedule.rate = written.stored / max(time.monotonic() - began, 1e-6)
        return written, decision, base

    def _decide(
        self, restorable: Callable[[CheckpointId], bool], step: int
    ) -> tuple[Decision, MemoryBase | StoredBase | None]:
        if self.schedule is None:
            return FULL, None
        decision = self.schedule.decide()
        if decision.base is None:
            return decision, None
        base = self._bases[decision.base]
        size = self.schedule.expected(decision.gap)
        if restorable(base.id) and not self.chains.wants_full(step, base.id.step, size):
            return decision, base
        # A request retired it and dropped its segments: a delta against it could never be committed. Or rules keep this
        # checkpoint, and would keep the chain below it stored.
        self._restart()
        return self.schedule.decide(), None

    def _taken_in(
        self, decision: Decision, base: MemoryBase | StoredBase | None, feed: Feed
    ) -> tuple[Decision, MemoryBase | StoredBase | None, FlatState, Fed | None]:
        """Where a state that is fed goes: it replaces the base if that is no base afterwards, unit by unit."""
        assert self.schedule is not None
        if isinstance(base, MemoryBase):
            if not decision.keep:
                return decision, base, feed.flat, Fed(feed, None)
            if decision.base not in decision.forget:
                self._fed = self._snapshots.empty(feed.flat)
                room = self._fed.room(feed.flat)
                return decision, base, feed.flat, Fed(feed, room)
            found = base.snapshot.room(feed.flat)
            if found is not None:
                self._fed = base.snapshot.turned(feed.flat, found)
                return decision, base, feed.flat, Fed(feed, found)
        # A full: no base is needed any more, and it takes the memory of one.
        self._restart()
        self._fed = feed.whole(lambda: self._snapshots.copy(feed.flat, self.workers.pool))
        return self.schedule.decide(), None, self._fed.flat, None

    def torn(self) -> None:
        """A state that was fed is not history: what it has begun to replace is no base any more."""
        fed, self._fed = self._fed, None
        if fed is not None:
            self._restart()
            fed.free()

    def _store(
        self,
        session: SegmentSession,
        flat: FlatState,
        draft: SegmentDoc,
        base: Base | None,
        gap: int,
        fed: Fed | None,
    ) -> WrittenState:
        if isinstance(flat, DirectState) and (direct := write_direct(session, flat, draft)) is not None:
            return direct
        if base is None and not self._options.compress_fulls:
            return write_full(session, flat, draft)
        return write_packed(session, flat, draft, base=base, gap=gap, choices=self._choices, fed=fed)

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
            snapshot: what owns its memory, or None if that is the training's, or it was fed.
            interrupted: whether the training may have begun to change its memory, asked after it was copied.
        """
        nbytes = sum(source.nbytes for source in flat.tensors.values())
        below = None if decision.base is None else self._bases[decision.base].id.step
        self.chains.stored(identity.step, below, stored / nbytes if nbytes else 1.0)
        if self.schedule is None:
            return False
        if self._fed is not None:
            snapshot, self._fed = self._fed, None
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
            warn(f"{self._backend.url}: {identity.ref} cannot be kept as a base, the next save is a full: {error}")
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
