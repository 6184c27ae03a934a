"""The states that deltas build on: in host memory, or read back from the store where a budget does not allow that.

A writer of one process has whole states here, a rank its shares of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.formats.records import CheckpointId
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.restore.stored_base import StoredBase
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.delta_encoding import Fed
from ckptstore.write.policy.orders import Order

__all__ = ["MemoryBase", "ResidentBases"]


class MemoryBase:
    """A base whose tensors are in host memory.

    Attributes:
        id: its identity.
        tensors: by name.
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
        """Host memory it takes."""
        return sum(source.nbytes for source in self.tensors.values())

    def forget(self) -> None:
        """Give the memory back."""
        self.snapshot.free()


class ResidentBases:
    """The bases of one writer, or of one rank. One thread calls it at a time; `ids` may be called by any thread."""

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
            reopen: opens a committed checkpoint as a base that is read from the store; told the state that it has.
        """
        self._memory = memory
        self._snapshots = snapshots
        self._workers = workers
        self._reopen = reopen
        self._bases: dict[CheckpointId, MemoryBase | StoredBase] = {}
        self._fed: Snapshot | None = None  # receives the state that is copied unit by unit

    def ids(self) -> list[CheckpointId]:
        """The bases that are here."""
        return list(self._bases)

    def get(self, identity: CheckpointId) -> MemoryBase | StoredBase | None:
        """The base of this identity; None: it is not here."""
        return self._bases.get(identity)

    def receive(self, order: Order, feed: Feed, *, follow: bool) -> Fed | None:
        """Say where a state goes that is copied unit by unit and compressed against `order.base`.

        It takes the place of the base, unit by unit, if nothing needs the base afterwards. If anything fails before
        `settle`, call `discard`: what the state has begun to replace is no base any more.

        Args:
            follow: the order cannot be changed: a state that does not fit into the place of the base gets memory of
                its own.

        Returns:
            None (never with `follow`): the base is not in memory, or too much of the state has another size. It has to
            be stored as a full.
        """
        assert order.base is not None
        base = self._bases[order.base]
        if isinstance(base, MemoryBase):
            if not order.keep:
                return Fed(feed, None)
            found = base.snapshot.room(feed.flat) if order.base in order.forget else None
            if found is not None:
                self._fed = base.snapshot.turned(feed.flat, found)
                return Fed(feed, found)
            if order.base not in order.forget or follow:
                self._fed = self._snapshots.empty(feed.flat)
                return Fed(feed, self._fed.room(feed.flat))
        return None

    def receive_whole(self, feed: Feed) -> Snapshot:
        """Copy a full that is given unit by unit, at once. It takes the memory of the bases, which are given up."""
        self.clear()
        self._fed = feed.whole(lambda: self._snapshots.copy(feed.flat, self._workers.pool))
        return self._fed

    def discard(self) -> bool:
        """A state that was received is not committed: give up every base -> False: none was being received."""
        if self._fed is None:
            return False
        self.clear()
        return True

    def settle(self, order: Order, identity: CheckpointId, flat: FlatState, snapshot: Snapshot | None) -> bool:
        """The checkpoint is committed: keep it as a base, and forget others, as the order says.

        Args:
            flat: its state, still unchanged.
            snapshot: owns the memory of `flat`; None: training does, or it was received.

        Returns:
            Whether `snapshot` was kept. Else its memory is the caller's to free.

        Raises:
            MemoryError, StorageError: it cannot be kept. Every base has to be given up then (`clear`).
        """
        received, self._fed = self._fed, None
        if order.base is None:
            # Prevents: a base that stays for ever on a rank that gave a step up: rank 0 has let go of its own then, and
            # names it no more.
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
        """Give up every base, and a state that is being received."""
        received, self._fed = self._fed, None
        if received is not None:
            received.free()
        self.forget()

    def forget(self) -> None:
        """Give up every base."""
        for base in self._bases.values():
            base.forget()
        self._bases.clear()
