"""One step on its way, as one rank sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ckptstore.formats.state import FlatState
from ckptstore.host.progress import Progress
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.feeding import Feed
from ckptstore.write.ledger import Labels
from ckptstore.write.metrics import Measured
from ckptstore.write.orders import FULL_ORDER, Order
from ckptstore.write.places import Place
from ckptstore.write.ranks.agreeing import Agreement
from ckptstore.write.ranks.arriving import ArrivingShare
from ckptstore.write.ranks.exchange import Exchange
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.encoding import EncodedStep
from ckptstore.write.steps.updates import Update

__all__ = ["Adopted", "RankSave"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that somebody else has copied, to memory that is not written to until it is given back.

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


@dataclass(slots=True)
class RankSave:
    """A step that was given, and what has become of it so far.

    Attributes:
        exchange: its letters, of the thread that has it now.
        done: answers with what was committed.
        asynchronous: its caller goes on meanwhile.
        agreement: who writes what.
        kept: the agreement is an earlier step's.
        share: what this rank stores. `tree`: of this rank's state. `digests`: of what others have alike.
        place: among the saves in flight; None: it takes none.
        snapshot: what owns the share's memory; None: it is training's.
        adopted: the state that the share is a part of, where it was adopted.
        feed: what the share is copied through as it is written or coded; None: it is where it stays.
        updates: what optimizers did to the share. `explained`: updates= said something of the state.
        gradients: what owns the memory of those of `updates`.
        flaw: why this rank cannot store it; the others are told.
        order: how it is stored; None: rank 0 has not said so.
        coded: the step diff; None: it is none, or there is a flaw.
        begun: segments that were begun for it. `dropped`: those that its commit drops.
        began: when it began to be written, on the monotonic clock. `time`: when it was given, seconds since 1970.
        retained: the snapshot stays in memory.
    """

    step: int
    exchange: Exchange
    labels: Labels
    progress: Progress | None
    asynchronous: bool
    done: Future[CheckpointInfo] = field(default_factory=Future)
    agreement: Agreement | None = None
    kept: bool = False
    share: FlatState | None = None
    tree: Any = None
    digests: Mapping[str, int] | None = None
    adopted: Adopted | None = None
    place: Place | None = None
    snapshot: Snapshot | None = None
    feed: Feed | ArrivingShare | None = None
    updates: Sequence[Update] = ()
    explained: bool = False
    gradients: Snapshot | None = None
    flaw: BaseException | None = None
    order: Order | None = None
    coded: EncodedStep | None = None
    begun: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    began: float = 0.0
    time: float = field(default_factory=time.time)
    retained: bool = False
    measured: Measured | None = None

    @property
    def how(self) -> Order:
        """How it is stored, where nobody has to say so: a full."""
        return self.order or FULL_ORDER

    @property
    def told(self) -> bool:
        """Whether the call that gave it raises what stops it."""
        return self.feed is not None and (self.feed.told or self.feed.spoiled)

    def take_place(self, place: Place) -> None:
        """It has a place in flight, which it leaves when it is durable on all ranks or has failed, or in a batch."""
        # Prevents: a kill that costs more than `max_in_flight` saves, because written shares wait for their commit.
        self.place = place
        self.done.add_done_callback(lambda _: place.leave())

    def leave_place(self) -> None:
        """It waits for its batch, which has a bound of its own."""
        if self.place is not None:
            self.place.leave()

    def let_go(self) -> None:
        """Nobody reads it any more: give its memory back, but what stays. May be repeated."""
        if self.feed is not None:
            self.feed.finish()
        if self.gradients is not None:
            self.gradients.free()
        self.updates = ()
        if self.snapshot is not None and not self.retained:
            self.snapshot.free()
        self.share = None
