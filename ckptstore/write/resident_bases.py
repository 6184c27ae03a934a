"""Holds the bases of deltas: in host memory, or read back from the store if they exceed a memory budget.

A writer of one process holds whole states here, a rank its shares of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.policy.orders import Order

if TYPE_CHECKING:
    from ckptstore.restore.stored_base import StoredBase
    from ckptstore.write.capture.bounded_capture import Feed
    from ckptstore.write.delta_encoding import ArrivingState

__all__ = ["MemoryBase", "ResidentBases"]


class MemoryBase:
    """A base whose tensors are in host memory.

    Attributes:
        id: its identity.
        tensors: its tensors by name.
        snapshot: owns their memory.
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
        """The host memory that it takes, in bytes."""
        return sum(source.nbytes for source in self.tensors.values())

    def forget(self) -> None:
        """Free the memory."""
        self.snapshot.free()


class ResidentBases:
    """The bases of one writer, or of one rank. One thread at a time calls it; any thread may call `ids`."""

    def __init__(
        self,
        memory: int | None,
        snapshots: SnapshotPool,
        workers: Workers,
        reopen: Callable[[CheckpointId, FlatState], StoredBase],
    ) -> None:
        """
        Args:
            memory: bytes of host memory for bases; None: no limit.
            snapshots: memory for copies.
            workers: the threads that copy.
            reopen: opens a committed checkpoint with the given state as a base that is read from the store.
        """
        self._memory = memory
        self._snapshots = snapshots
        self._workers = workers
        self._reopen = reopen
        self._bases: dict[CheckpointId, MemoryBase | StoredBase] = {}
        self._receiver: Snapshot | None = None  # receives the state that is copied unit by unit

    def ids(self) -> list[CheckpointId]:
        """The identities of the bases."""
        return list(self._bases)

    def get(self, identity: CheckpointId) -> MemoryBase | StoredBase | None:
        """The base of this identity; None: there is none."""
        return self._bases.get(identity)

    def receive(self, order: Order, feed: Feed, *, follow: bool) -> ArrivingState | None:
        """Provide memory for a state that is copied unit by unit and compressed against `order.base`.

        The state replaces the base, unit by unit, if nothing needs the base afterwards. If anything fails before
        `settle`, call `discard`: a base that is partly replaced is lost.

        Args:
            follow: the order cannot be changed: a state that does not fit into the memory of the base gets other
                memory.

        Returns:
            None: the state must be stored as a full, because the base is not in memory, or too much of the state has
            another size. With `follow`, the latter does not happen.
        """
        from ckptstore.write.delta_encoding import ArrivingState

        assert order.base is not None
        base = self._bases[order.base]
        if isinstance(base, MemoryBase):
            if not order.keep:
                return ArrivingState(feed, None)
            found = base.snapshot.room(feed.flat) if order.base in order.forget else None
            if found is not None:
                self._receiver = base.snapshot.turned(feed.flat, found)
                return ArrivingState(feed, found)
            if order.base not in order.forget or follow:
                self._receiver = self._snapshots.empty(feed.flat)
                return ArrivingState(feed, self._receiver.room(feed.flat))
        return None

    def receive_whole(self, feed: Feed) -> Snapshot:
        """Copy the whole state of a feed at once, for a full. It takes the memory of the bases, which are dropped."""
        self.clear()
        self._receiver = feed.whole(lambda: self._snapshots.copy(feed.flat, self._workers.pool))
        return self._receiver

    def discard(self) -> bool:
        """Drop every base, because a received state is not committed -> False: no state was being received."""
        if self._receiver is None:
            return False
        self.clear()
        return True

    def settle(self, order: Order, identity: CheckpointId, flat: FlatState, snapshot: Snapshot | None) -> bool:
        """Keep a committed checkpoint as a base, and forget other bases, as the order says.

        Args:
            flat: its state, still unchanged.
            snapshot: owns the memory of `flat`; None: training owns it, or the state was received.

        Returns:
            Whether `snapshot` was kept. If not, the caller must free its memory.

        Raises:
            MemoryError, StorageError: it cannot be kept. Then every base must be dropped (`clear`).
        """
        received, self._receiver = self._receiver, None
        if order.base is None:
            # Prevents: a base that stays forever on a rank that gave a step up: rank 0 has dropped its own by then, and
            # never names it again.
            self.forget()
        for old in order.forget:
            if old in self._bases:
                self._bases.pop(old).forget()
        if not order.keep:
            if received is not None:
                received.free()
            return False
        base = self._base(identity, flat, received or snapshot)
        self._bases[identity] = base
        return isinstance(base, MemoryBase) and snapshot is not None and received is None

    def _base(self, identity: CheckpointId, flat: FlatState, snapshot: Snapshot | None) -> MemoryBase | StoredBase:
        nbytes = sum(source.nbytes for source in flat.tensors.values())
        held = sum(base.nbytes for base in self._bases.values() if isinstance(base, MemoryBase))
        if self._memory is not None and held + nbytes > self._memory:
            return self._reopen(identity, flat)
        return MemoryBase(identity, snapshot or self._snapshots.copy(flat, self._workers.pool))

    def clear(self) -> None:
        """Drop every base, and a state that is being received."""
        received, self._receiver = self._receiver, None
        if received is not None:
            received.free()
        self.forget()

    def forget(self) -> None:
        """Drop every base."""
        for base in self._bases.values():
            base.forget()
        self._bases.clear()
