"""Where checkpoints build on others: rank 0 decides how each step is stored, and the other ranks wait to hear it."""

from __future__ import annotations

from ckptstore.errors import MissingRankError, RankMismatchError
from ckptstore.host.crash_points import crash_point
from ckptstore.write.order_policy import OrderPolicy
from ckptstore.write.orders import FULL_ORDER, Order
from ckptstore.write.ranks.agreeing import check_kept
from ckptstore.write.ranks.batches import Batches
from ckptstore.write.ranks.diffs import RankDiffs
from ckptstore.write.ranks.mailbox import Deadline, fetch
from ckptstore.write.ranks.means import Means
from ckptstore.write.ranks.parts import Verdict, pack_order, unpack_order
from ckptstore.write.ranks.saving import RankSave
from ckptstore.write.ranks.tenure import Tenure
from ckptstore.write.resident_bases import ResidentBases

__all__ = ["Ordering"]


class _HurryError(Exception):
    """Somebody waits for a step that waits for its batch."""


class Ordering:
    """How steps are stored. The thread that writes calls it."""

    def __init__(
        self,
        means: Means,
        tenure: Tenure,
        policy: OrderPolicy,
        bases: ResidentBases | None,
        diffs: RankDiffs | None,
        batches: Batches | None,
    ) -> None:
        """
        Args:
            policy: decides on rank 0.
            bases: of deltas; None: there are no deltas.
            diffs, batches: of step diffs; None: there are none.
        """
        self._means = means
        self._tenure = tenure
        self._policy = policy
        self._bases = bases
        self._diffs = diffs
        self._batches = batches

    def order(self, one: RankSave) -> Order:
        """How a step is stored; what waits for its batch is written before, unless this step joins it.

        Raises:
            RankError: rank 0 does not store it, or does not say how. Nothing has changed.
        """
        if self._tenure.committer is not None:
            order = self._decided(one)
            one.exchange.post("order", pack_order(order))
            crash_point("ranks.ordered")
            return order
        order = self._told(one)
        if self._batches is not None and self._batches.waiting and order.after is None:
            self._batches.flush()  # rank 0 has given it up
        if not one.kept:
            self._forget_bases()
        return order

    def _forget_bases(self) -> None:
        """The ranks divide their tensors otherwise from now on: no base has these shares."""
        self._policy.forget_bases()
        if self._bases is not None:
            self._bases.clear()

    def _decided(self, one: RankSave) -> Order:
        committer = self._tenure.committer
        assert committer is not None
        if self._diffs is not None and self._batches is not None:
            if one.kept:
                try:
                    self._wait_for_all(one)
                except BaseException:
                    self._policy.lost()
                    raise
            else:
                self._batches.flush()
                self._diffs.restart()
            if self._batches.waiting and self._batches.waiting[-1].step > one.step:
                self._batches.flush()  # the steps of a segment ascend
            waiting = len(self._batches.waiting)
            self._batches.coding = True
            asked = self._means.settling.submit(
                lambda: self._policy.step_order(
                    one.step, committer.log.catalog.restorable, waiting=waiting, waits=one.asynchronous
                )
            ).result()
            if asked is not None:
                return asked
            self._batches.coding = False
            self._batches.flush()
            if self._tenure.stopped is not None:
                raise self._tenure.stopped
        bases = self._bases
        if bases is None:
            return FULL_ORDER
        if not one.kept:
            self._forget_bases()
        self._tenure.building = one.step
        order = self._means.settling.submit(
            lambda: self._policy.state_order(one.step, committer.log.catalog.restorable)
        ).result()
        if not self._policy.bases():
            bases.forget()
        if order.base is None:
            self._tenure.built(one.step)
        return order

    def _wait_for_all(self, one: RankSave) -> None:
        """Rank 0: wait until every rank has begun the step. One that cannot store it has then said so; the step fails
        without its batch."""
        assert self._batches is not None
        assert one.agreement is not None
        batches = self._batches

        def look() -> None:
            self._means.group.ended()
            if batches.hurried():
                raise _HurryError

        while True:
            try:
                check_kept(one.exchange, one.agreement, Deadline(self._means.ranks.timeout, look))
            except _HurryError:
                batches.flush()
                continue
            if (error := one.exchange.failed()) is not None:
                raise error
            return

    def _told(self, one: RankSave) -> Order:
        """Another rank: what rank 0 has decided. Meanwhile it may end the batch."""
        exchange = one.exchange
        deadline = Deadline(2 * self._means.ranks.timeout)
        while True:
            ends = None if self._batches is None else self._batches.letter_key()
            keys = [exchange.key("order"), exchange.key("verdict"), *([] if ends is None else [ends])]
            letter = exchange.first(keys, deadline)
            if letter is None:
                raise MissingRankError(
                    f"step {one.step} was not saved: rank 0 did not say how within {deadline.seconds:g} s"
                )
            # Asked for anew: another one may have come since `letter` was there.
            if (order := fetch(exchange.mailbox, keys[0])) is not None:
                return unpack_order(order, "order")
            if (verdict := fetch(exchange.mailbox, keys[1])) is not None:
                error = Verdict.unpacked(verdict, "verdict").error
                raise error or RankMismatchError("rank 0 went on without this rank")
            assert self._batches is not None
            self._batches.flush()
