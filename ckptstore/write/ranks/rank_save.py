"""One save as one rank sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.formats.state import FlatState
from ckptstore.host.progress import Progress
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.policy.orders import FULL_ORDER, Order
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.rank_agreement import Agreement
from ckptstore.write.ranks.share_units import ArrivingShare
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.job import Job
from ckptstore.write.saves.ledger import Labels, Saves
from ckptstore.write.steps.step_encoding import EncodedStep
from ckptstore.write.steps.updates import Update

__all__ = ["Adopted", "RankSave"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that the caller has copied, to memory that does not change until it is given back.

    Attributes:
        snapshot: what owns its memory. `gradients`: what owns that of the gradients; None: there are none.
    """

    snapshot: Snapshot
    gradients: Snapshot | None = None

    def give_back(self) -> None:
        """It is not in flight any more. May be repeated."""
        self.snapshot.land()
        self.snapshot.free()
        if self.gradients is not None:
            self.gradients.free()


class RankSave(Job):
    """A save as one rank sees it: a job that rank 0 orders and commits, and that this rank cannot give up by itself.

    Attributes:
        exchange: its letters, of the thread that has it now.
        asynchronous: its caller does not wait for it.
        progress: what its caller is told of it.
        agreement: who writes what.
        kept: the agreement is an earlier step's.
        share: what this rank stores. `tree`: of this rank's state. `digests`: of what others have alike.
        snapshot: owns the share's memory; None: it is training's.
        adopted: the state that the share is a part of, where it was adopted.
        feed: copies the share as it is written or compressed; None: it is where it stays.
        updates: what optimizers did to the share. `explained`: updates= said something of the state.
        gradients: owns the memory of those of `updates`.
        flaw: why this rank cannot store it; the others are told.
        order: how it is stored; None: rank 0 has not said so.
        coded: the step diff; None: it is none, or there is a flaw.
        begun: segments that were begun for it. `dropped`: those that its commit drops.
        began: when it began to be written, on the monotonic clock. `time`: when it was given, seconds since 1970.
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
        self.feed: Feed | ArrivingShare | None = None
        self.updates: Sequence[Update] = ()
        self.explained = False
        self.gradients: Snapshot | None = None
        self.flaw: BaseException | None = None
        self.order: Order | None = None
        self.coded: EncodedStep | None = None
        self.begun: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self.began = 0.0
        self.time = time.time()
        self.retained = False

    @property
    def how(self) -> Order:
        """How it is stored, where nobody has to say so: a full."""
        return self.order or FULL_ORDER

    @property
    def told(self) -> bool:
        """Whether the call that gave it raises what stops it."""
        return not self.asynchronous or (self.feed is not None and (self.feed.told or self.feed.spoiled))

    def enter(self, place: Place) -> None:
        """See `Job.enter`. It leaves when it is durable on all ranks or has failed, or waits for its batch."""
        super().enter(place)
        # Prevents: a kill that costs more than `max_in_flight` saves, because written shares wait for their commit.
        self.done.add_done_callback(lambda _: self.leave())

    def let_go(self) -> None:
        """Give its memory back, except for a snapshot that is retained. May be repeated."""
        if self.feed is not None:
            self.feed.finish()
        if self.gradients is not None:
            self.gradients.free()
        self.updates = ()
        if self.snapshot is not None and not self.retained:
            self.snapshot.free()
        self.share = None
