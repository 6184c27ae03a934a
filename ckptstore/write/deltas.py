"""A writer's fulls and deltas: the policy decides how a state is stored; `Deltas` stores it and keeps the bases.

Only the committer's thread calls it: `write` makes segments durable, and `committed` follows when the record is in the
log. Only then does the checkpoint become a base.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, CorruptionError
from ckptstore.formats.history.records import CheckpointId, Encoding
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.caller_warnings import warn
from ckptstore.host.threads import Workers
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.segments.plain_segments import WrittenState, write_full
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.snapshot import HostTensor, Snapshot, SnapshotPool
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.policy.orders import Order
from ckptstore.write.resident_bases import MemoryBase, ResidentBases

if TYPE_CHECKING:
    from ckptstore.restore.stored_base import StoredBase
    from ckptstore.segments.mapped_fulls import MappedState
    from ckptstore.write.capture.bounded_capture import Feed
    from ckptstore.write.delta_encoding import ArrivingState, Base, Choices
    from ckptstore.write.policy.delta_options import DeltaOptions

__all__ = ["Deltas"]


class Deltas:
    """The fulls and deltas of one term.

    Attributes:
        policy: decides how each checkpoint is stored.
        workers: threads that copy, hash and compress.
    """

    def __init__(
        self,
        options: DeltaOptions | None,
        backend: Backend,
        draft: SegmentDoc,
        snapshots: SnapshotPool,
        reopen: Callable[[CheckpointId], StoredBase],
        threads: int,
        policy: OrderPolicy,
    ) -> None:
        """Begin without a base: the first checkpoint is a full.

        Args:
            options: None: every checkpoint is an uncompressed full.
            draft: the fields that all segments of the term share.
            reopen: opens a committed checkpoint as a base that is read from the store.
            threads: how many threads compress; each holds a chunk and its payload in memory.
            policy: decides how each checkpoint is stored.
        """
        self.policy = policy
        self._options = options
        self._backend = backend
        self._draft = draft
        self._choices: Choices | None = None  # once something is compressed
        self.workers = Workers.sleeping(threads, "ckptstore-encode")
        self._bases = ResidentBases(
            None if options is None else options.memory,
            snapshots,
            self.workers,
            lambda identity, _flat: reopen(identity),
        )

    def bases(self) -> list[CheckpointId]:
        """The checkpoints that the next deltas may build on."""
        return self.policy.bases()

    def map_full(self, flat: FlatState, step: int) -> MappedState | None:
        """Map segments for a full of a state like `flat`, to copy into; None: the medium has no mapped segments.

        Raises `StorageError`. Only for a writer that makes no deltas; any thread may call it.
        """
        from ckptstore.segments.mapped_fulls import MappedState, map_segments, regions_of

        encoding = StepEncoding(self._draft.term, "full", None, time.time())
        space = self._backend.begin_save()
        try:
            with space.within():  # once it is mapped, the medium counts it as used
                mapped = map_segments(self._backend, flat, replace(self._draft, encodings={step: encoding}))
        finally:
            space.end()
        if mapped is None:
            return None
        regions, places = regions_of(mapped, flat)
        tensors: dict[str, TensorSource] = {name: HostTensor(one, places[name]) for name, one in flat.tensors.items()}
        return MappedState(flat.tree, tensors, regions, mapped=mapped)

    def write(
        self,
        flat: FlatState,
        step: int,
        moment: float,
        session: SegmentSession,
        restorable: Callable[[CheckpointId], bool],
        feed: Feed | None = None,
    ) -> tuple[WrittenState, Order]:
        """Store `flat` as the policy decides, and make it durable (COMMIT step 1).

        Args:
            moment: when the checkpoint was made, in seconds since 1970.
            session: writes the segments; the result may leave out some segments that it began.
            restorable: whether the catalog to which the record will be applied can restore a checkpoint.
            feed: copies `flat` unit by unit; None: it is read in place. If anything fails before `committed`, call
                `torn`.
        """

        def store(order: Order, base: Base | None) -> WrittenState:
            encoding = StepEncoding(self._draft.term, order.kind, order.base, moment)
            return self._store(
                session, state, replace(self._draft, encodings={step: encoding}), base, order.gap, arriving
            )

        order, base = self._order(restorable, step)
        state: FlatState = flat
        arriving: ArrivingState | None = None
        if feed is not None:
            arriving = None if order.base is None else self._bases.receive(order, feed, follow=False)
            if arriving is None:
                # A full needs no base, and takes the memory of the old one.
                self.policy.forget_bases()
                state = self._bases.receive_whole(feed).flat
                order, base = self._order(restorable, step)
        began = time.monotonic()
        try:
            written = store(order, base)
        except CkptError as error:
            if base is None or isinstance(base, MemoryBase):
                raise
            self._restart()  # whether or not reading it failed: the next save must not depend on it
            if not isinstance(error, CorruptionError):
                raise
            warn(f"{self._backend.url}: base {base.id.ref} is damaged, step {step} becomes a full: {error}")
            order, base = self._order(restorable, step)
            written = store(order, base)
        self.policy.took(written.stored, time.monotonic() - began)
        return written, order

    def _order(
        self, restorable: Callable[[CheckpointId], bool], step: int
    ) -> tuple[Order, MemoryBase | StoredBase | None]:
        """How the next checkpoint is stored, and its base."""
        order = self.policy.state_order(step, restorable)
        if order.base is not None:
            base = self._bases.get(order.base)
            assert base is not None  # the policy names only bases that were kept
            return order, base
        if not self.policy.bases():
            self._bases.forget()
        return order, None

    def torn(self) -> None:
        """Note that a state copied unit by unit is not committed: the base that it has partly replaced is lost."""
        if self._bases.discard():
            self.policy.forget_bases()

    def _store(
        self,
        session: SegmentSession,
        flat: FlatState,
        draft: SegmentDoc,
        base: Base | None,
        gap: int,
        arriving: ArrivingState | None,
    ) -> WrittenState:
        if isinstance(flat, LaidOutState) and flat.mapped_directly:
            from ckptstore.segments.mapped_fulls import MappedState, write_direct

            assert isinstance(flat, MappedState)
            if (direct := write_direct(session, flat, draft)) is not None:
                return direct
        if self._options is None or (base is None and not self._options.compress_fulls):
            return write_full(session, flat, draft)
        # Plain fulls, which need no codec, never import one.
        from ckptstore.write.delta_encoding import Choices, write_packed

        if self._choices is None:
            self._choices = Choices(self._options.policy)
        return write_packed(session, flat, draft, base=base, gap=gap, choices=self._choices, arriving=arriving)

    @staticmethod
    def encoding(written: WrittenState, node: tuple[int, int], order: Order) -> Encoding:
        """The encoding record that the COMMIT adds."""
        return Encoding(
            checkpoint=node,
            kind=order.kind,
            base=order.base,
            segments=tuple(segment.id for segment in written.segments),
            lossy=False,
            bytes=written.stored,
        )

    def committed(
        self,
        order: Order,
        identity: CheckpointId,
        flat: FlatState,
        snapshot: Snapshot | None,
        stored: int,
        interrupted: Callable[[], bool],
    ) -> bool:
        """Note that the checkpoint is in the log -> whether `snapshot` was kept as a base; if not, the caller frees it.

        Raises nothing: a failure here must not look like a failed save. The next checkpoint is then a full.

        Args:
            flat: the state that was written; still unchanged.
            snapshot: owns the memory of `flat`; None: training owns it, or it was copied unit by unit.
            interrupted: whether training may have begun to change that memory; called after `flat` was copied.
        """
        self.policy.committed(order, identity, stored, sum(source.nbytes for source in flat.tensors.values()))
        try:
            kept = self._bases.settle(order, identity, flat, snapshot)
        except Exception as error:  # noqa: BLE001  # includes warnings, if they are turned into errors
            self._restart()
            warn(f"{self._backend.url}: {identity.ref} cannot be kept as a base, the next save is a full: {error}")
            return False
        if order.keep and interrupted():
            # Prevents: deltas against bits that were never saved.
            self._restart()
            return False
        return kept

    def begin(self, draft: SegmentDoc) -> None:
        """Begin another term of the same writer without a base, as for the first term."""
        self._restart()
        self.policy.begin_term()
        self._draft = draft

    def _restart(self) -> None:
        """Discard every base; the next checkpoint is a full."""
        self.policy.forget_bases()
        self._bases.clear()

    def close(self) -> None:
        """Discard every base. A second call does nothing."""
        self.workers.pool.shutdown()
        self._restart()
