"""Deltas of ranks: rank 0 decides how a step is stored, all of them code their shares against their own of the base.

Every rank holds, in host memory, its share of each checkpoint that may be a base. Chains live inside one division of
the tensors: when the ranks agree anew, and after a step that failed, the next checkpoint is a full.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import FailedRankError, UsageError
from ckptstore.formats.records import CheckpointId, Node
from ckptstore.formats.retention_forecast import Chains
from ckptstore.write.deltas import DeltaOptions, MemoryBase
from ckptstore.write.encoding import Choices, Fed
from ckptstore.write.feeding import Feed
from ckptstore.write.interval import Decision, Schedule
from ckptstore.write.ranks.orders import Order
from ckptstore.write.snapshot import Snapshot, SnapshotPool

__all__ = ["RankDeltas"]


class RankDeltas:
    """What a rank keeps for deltas. One thread calls it."""

    def __init__(self, options: DeltaOptions, chains: Chains | None = None) -> None:
        """
        Args:
            chains: says which checkpoint is to be a full, because rules keep it; None: there are no rules.

        Raises:
            UsageError: bases that are read back from the store are not there for ranks.
        """
        if options.memory is not None:
            raise UsageError(
                "DeltaOptions(memory=...) cannot be combined with group=: ranks keep their bases in memory"
            )
        self._chains = Chains(tuple) if chains is None else chains
        self.options = options
        self.choices = Choices(options.policy)
        self._schedule = Schedule(options.interval, options.form, options.bound)
        self._numbers: dict[int, Node] = {}
        self._bases: dict[Node, MemoryBase] = {}
        self._decision: Decision | None = None
        self._fed: Snapshot | None = None  # what takes the share that is being fed

    def decide(self, restorable: Callable[[CheckpointId], bool], step: int) -> Order:
        """How the next checkpoint is stored; rank 0 asks."""
        decision = self._schedule.decide()
        if decision.base is not None:
            below = self._bases[self._numbers[decision.base]].id
            size = self._schedule.expected(decision.gap)
            # A request retired it: a delta against it could never be committed. Or rules keep this checkpoint, and
            # would keep the chain below it stored.
            if not restorable(below) or self._chains.wants_full(step, below.step, size):
                self.restart()
                decision = self._schedule.decide()
        self._decision = decision
        base = None if decision.base is None else self._bases[self._numbers[decision.base]].id
        forget = tuple(self._numbers[number] for number in decision.forget if number in self._numbers)
        return Order(base, decision.gap, decision.keep, forget)

    def bases(self) -> list[CheckpointId]:
        """What the next checkpoints may be coded against."""
        return [base.id for base in self._bases.copy().values()]

    def base(self, order: Order) -> MemoryBase | None:
        """This rank's share of the base. Raises `FailedRankError` if it does not have it."""
        if order.base is None:
            return None
        found = self._bases.get(order.base.node)
        if found is None or found.id != order.base:
            raise FailedRankError(f"its share of {order.base.ref}, the base, is not in memory")
        return found

    def give_place(self) -> None:
        """A full comes: no base is needed any more, and it takes the memory of one."""
        for base in self._bases.values():
            base.forget()
        self._bases.clear()

    def taken_in(self, order: Order, feed: Feed, snapshots: SnapshotPool) -> Fed:
        """Where a share goes that is fed, to be coded against `order.base`: unit by unit to the place of that, if that
        is no base afterwards. Whatever goes wrong until `committed`, `restart` has to be called."""
        assert order.base is not None
        if not order.keep:
            return Fed(feed, None)
        base = self._bases[order.base.node]
        room = base.snapshot.room(feed.flat) if order.base.node in order.forget else None
        if room is not None:
            self._fed = base.snapshot.turned(feed.flat, room)
        else:  # another one needs it; or tensors of this rank alone have changed their sizes
            self._fed = snapshots.empty(feed.flat)
            room = self._fed.room(feed.flat)
        return Fed(feed, room)

    def committed(
        self, order: Order, identity: CheckpointId, stored: int, seconds: float, keep: Callable[[], Snapshot]
    ) -> None:
        """The checkpoint is history.

        Args:
            stored: bytes of all ranks.
            seconds: how long they took.
            keep: gives a copy of this rank's share, if that was not fed.
        """
        if self._decision is not None:  # rank 0
            self._schedule.rate = stored / max(seconds, 1e-6)
            self._numbers[self._schedule.written(self._decision, stored)] = identity.node
            self._decision = None
        if order.base is None:
            # Prevents: a base that stays for ever on a rank that gave a step up: rank 0 has let go of its own then, and
            # names it no more.
            self.give_place()
        for node in order.forget:
            if node in self._bases:
                self._bases.pop(node).forget()
        if order.keep:
            fed, self._fed = self._fed, None
            self._bases[identity.node] = MemoryBase(identity, keep() if fed is None else fed)

    def restart(self) -> None:
        """Let go of every base; the next checkpoint is a full."""
        self._schedule.restart()
        self._decision = None
        fed, self._fed = self._fed, None
        if fed is not None:
            fed.free()
        self.give_place()
        self._numbers.clear()
