"""Hold the data of one save on one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ckptstore.backends.sharing import SaveSpace
from ckptstore.host.progress import Progress
from ckptstore.write.policy.orders import FULL_ORDER, Order
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.rank_agreement import Agreement
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.saves.ledger import Labels, Saves
from ckptstore.write.stage import Stage
from ckptstore.write.steps.step_encoding import EncodedStep

__all__ = ["RankSave"]


class RankSave(SaveJob):
    """A save as one rank sees it: a job that rank 0 orders and commits, and that no rank can cancel by itself.

    Attributes:
        exchange: its letters, for the thread that has the save now.
        asynchronous: its caller does not wait for it.
        progress: reports progress to its caller.
        agreement: which rank writes what.
        kept: the agreement is an earlier step's.
        stage: this rank's share of the state, and how it reaches the write thread; None: not known yet, or let go.
        tree: that of this rank's state. `digests`: of the replicas that are compared.
        explained: updates= described part of the state.
        flaw: why this rank cannot store it; the other ranks are told.
        order: how it is stored; None: rank 0 has sent no order.
        coded: the step diff; None: it is not a step diff, or there is a flaw.
        begun: segments that were begun for it. `dropped`: segments that its commit drops.
        segments: ids of the segments that have this rank's share, once it is written.
        space: its share of the medium, from its first byte to its commit.
        began: when writing began, on the monotonic clock. `time`: when the caller saved it, seconds since 1970.
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
        self.stage: Stage | None = None
        self.tree: Any = None
        self.digests: Mapping[str, int] | None = None
        self.explained = False
        self.flaw: BaseException | None = None
        self.order: Order | None = None
        self.coded: EncodedStep | None = None
        self.begun: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self.segments: tuple[str, ...] = ()
        self.space = SaveSpace()
        self.began = 0.0
        self.time = time.time()
        self._told = not asynchronous

    @property
    def how(self) -> Order:
        """How it is stored: a full, unless there is an order."""
        return self.order or FULL_ORDER

    @property
    def told(self) -> bool:
        """Whether the call that saved it raises its error."""
        stage = self.stage  # read first: `let_go` sets `_told` before it removes the stage
        return self._told or (stage is not None and stage.told)

    def enter(self, place: Place) -> None:
        """See `SaveJob.enter`. The save leaves when it is durable on all ranks, has failed, or waits for its batch."""
        super().enter(place)
        # Prevents: a kill that costs more than `max_in_flight` saves, because written shares wait for their commit.
        self.done.add_done_callback(lambda _: self.leave())

    def let_go(self, *, kept: bool = False) -> None:
        """Free the memory of its stage, except for a snapshot that is `kept`. May be repeated."""
        if (stage := self.stage) is None:
            return
        self._told = self.told
        # Prevents: memory that stays mapped, and registered with devices, until Python's collector finds this save.
        self.stage = None
        stage.let_go(kept=kept)
