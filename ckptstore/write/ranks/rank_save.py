"""Hold the data of one save on one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.backends.sharing import SaveSpace
from ckptstore.formats.states.state import FlatState
from ckptstore.host.progress import Progress
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.capture.unit_copy import UnitCopy
from ckptstore.write.policy.orders import FULL_ORDER, Order
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.rank_agreement import Agreement
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.job import Job
from ckptstore.write.saves.ledger import Labels, Saves
from ckptstore.write.steps.step_encoding import EncodedStep
from ckptstore.write.steps.updates import Update

__all__ = ["Adopted", "RankSave"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that the caller has copied to memory that does not change until it is given back.

    Attributes:
        snapshot: owns its memory. `gradients`: owns the memory of the gradients; None: there are none.
    """

    snapshot: Snapshot
    gradients: Snapshot | None = None

    def give_back(self) -> None:
        """Give the memory back: the save is no longer in flight. May be repeated."""
        self.snapshot.land()
        self.snapshot.free()
        if self.gradients is not None:
            self.gradients.free()


class RankSave(Job):
    """A save as one rank sees it: a job that rank 0 orders and commits, and that this rank alone cannot cancel.

    Attributes:
        exchange: its letters, for the thread that has the save now.
        asynchronous: its caller does not wait for it.
        progress: reports progress to its caller.
        agreement: which rank writes what.
        kept: the agreement is an earlier step's.
        share: what this rank stores. `tree`: of this rank's state. `digests`: of the replicas that are compared.
        snapshot: owns the share's memory; None: training owns it.
        adopted: the adopted state that contains the share; None: the state was not adopted.
        feed: copies the share as it is written or compressed; None: the share needs no such copy.
        updates: the optimizers' updates of the share. `explained`: updates= described part of the state.
        gradients: owns the memory of the gradients of `updates`.
        flaw: why this rank cannot store it; the other ranks are told.
        order: how it is stored; None: rank 0 has sent no order.
        coded: the step diff; None: it is not a step diff, or there is a flaw.
        begun: segments that were begun for it. `dropped`: segments that its commit drops.
        space: its share of the medium, from its first byte to its commit.
        began: when writing began, on the monotonic clock. `time`: when the caller saved it, seconds since 1970.
        retained: the snapshot stays in memory.
    """

    def __init__(
        self,
        saves: Saves,
        step: int,
        exchange: Exchange,
        labels: Labels | None = None,
        progress: Progress | None = None,
        *,
        asynchronous: bool,
    ) -> None:
        super().__init__(saves, step, Labels() if labels is None else labels)
        self.take()  # Prevents: a save that one rank cancels, and the others commit.
        self.exchange = exchange
        self.asynchronous = asynchronous
        self.progress = progress
        self.agreement: Agreement | None = None
        self.kept = False
        self.share: FlatState | None = None
        self.tree: Any = None
        self.digests: Mapping[str, int] | None = None
        self.snapshot: Snapshot | None = None
        self.adopted: Adopted | None = None
        self.feed: UnitCopy | None = None
        self.updates: Sequence[Update] = ()
        self.explained = False
        self.gradients: Snapshot | None = None
        self.flaw: BaseException | None = None
        self.order: Order | None = None
        self.coded: EncodedStep | None = None
        self.begun: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self.space = SaveSpace()
        self.began = 0.0
        self.time = time.time()
        self.retained = False

    @property
    def how(self) -> Order:
        """How it is stored: a full, unless there is an order."""
        return self.order or FULL_ORDER

    @property
    def told(self) -> bool:
        """Whether the call that saved it raises its error."""
        return not self.asynchronous or (self.feed is not None and self.feed.told)

    def enter(self, place: Place) -> None:
        """See `Job.enter`. The save leaves when it is durable on all ranks, has failed, or waits for its batch."""
        super().enter(place)
        # Prevents: a kill that costs more than `max_in_flight` saves, because written shares wait for their commit.
        self.done.add_done_callback(lambda _: self.leave())

    def arrive(self) -> None:
        """Wait for devices that still copy to its memory. Raises the error of a device."""
        for copies in (self.snapshot, self.gradients):
            if copies is not None:
                copies.arrive()

    def let_go(self) -> None:
        """Free its memory, except for a retained snapshot. May be repeated."""
        if self.feed is not None:
            self.feed.finish()
        # Prevents: memory that stays mapped, and registered with devices, until Python's collector finds this save.
        gradients, self.gradients = self.gradients, None
        snapshot, self.snapshot = self.snapshot, None
        if gradients is not None:
            gradients.free()
        self.updates = ()
        if snapshot is not None and not self.retained:
            snapshot.free()
        self.share = self.adopted = None
