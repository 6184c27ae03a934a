"""Send the orders of rank 0: if checkpoints build on others, it decides how a step is stored, and tells all ranks."""

from __future__ import annotations

from ckptstore.errors import MissingRankError, RankMismatchError
from ckptstore.host.crash_points import crash_point
from ckptstore.write.policy.order_policy import OrderPolicy
from ckptstore.write.policy.orders import FULL_ORDER, Order
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline, fetch
from ckptstore.write.ranks.messages.rank_messages import CommitVerdict, pack_order, unpack_order
from ckptstore.write.ranks.rank_agreement import check_kept
from ckptstore.write.ranks.rank_batches import RankBatches
from ckptstore.write.ranks.rank_diffs import RankDiffs
from ckptstore.write.ranks.rank_resources import RankResources
from ckptstore.write.ranks.rank_save import RankSave
from ckptstore.write.ranks.rank_term import RankTerm
from ckptstore.write.resident_bases import ResidentBases

__all__ = ["RankOrders"]


class _HurryError(Exception):
    """Raised when a caller waits for a step that waits for its batch."""


class RankOrders:
    """Sends or receives the order for each step. The write thread calls it."""

    def __init__(
        self,
        resources: RankResources,
        rank_term: RankTerm,
        policy: OrderPolicy,
        bases: ResidentBases | None,
        diffs: RankDiffs | None,
        batches: RankBatches | None,
    ) -> None:
        """
        Args:
            policy: decides on rank 0.
            bases: the bases of deltas; None: there are no deltas.
            diffs, batches: for step diffs; None: there are none.
        """
        self._resources = resources
        self._rank_term = rank_term
        self._policy = policy
        self._bases = bases
        self._diffs = diffs
        self._batches = batches

    def order(self, one: RankSave) -> Order:
        """Return how a step is stored. The waiting batch is written before, unless this step joins it.

        Raises:
            RankError: rank 0 does not store the step, or sends no order. Nothing has changed.
        """
        if self._rank_term.committer is not None:
            order = self._decide(one)
            one.exchange.post("order", pack_order(order))
            crash_point("ranks.ordered")
            return order
        order = self._await_order(one)
        if self._batches is not None and self._batches.waiting and order.after is None:
            self._batches.flush()  # rank 0 has given it up
        if not one.kept:
            self._forget_bases()
        return order

    def _forget_bases(self) -> None:
        """Forget the bases, because the ranks divide their tensors differently from now on."""
        self._policy.forget_bases()
        if self._bases is not None:
            self._bases.clear()

    def _decide(self, one: RankSave) -> Order:
        """Rank 0: decide how a step is stored. Writes the waiting batch first, unless the step joins it."""
        committer = self._rank_term.committer
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
            asked = self._resources.commit_thread.submit(
                lambda: self._policy.step_order(
                    one.step, committer.log.catalog.restorable, waiting=waiting, waits=one.asynchronous
                )
            ).result()
            if asked is not None:
                return asked
            self._batches.coding = False
            self._batches.flush()
            if self._rank_term.stopped is not None:
                raise self._rank_term.stopped
        bases = self._bases
        if bases is None:
            return FULL_ORDER
        if not one.kept:
            self._forget_bases()
        self._rank_term.building = one.step
        order = self._resources.commit_thread.submit(
            lambda: self._policy.state_order(one.step, committer.log.catalog.restorable)
        ).result()
        if not self._policy.bases():
            bases.forget()
        if order.base is None:
            self._rank_term.built(one.step)
        return order

    def _wait_for_all(self, one: RankSave) -> None:
        """Rank 0: wait until every rank has begun the step.

        A rank that cannot store it has posted that by then, and the step fails without its batch.
        """
        assert self._batches is not None
        assert one.agreement is not None
        batches = self._batches

        def look() -> None:
            self._resources.group.ended()
            if batches.hurried():
                raise _HurryError

        while True:
            try:
                deadline = ReplyDeadline(self._resources.ranks.timeout, look, one.exchange.size)
                check_kept(one.exchange, one.agreement, deadline)
            except _HurryError:
                batches.flush()
                continue
            if (error := one.exchange.failed()) is not None:
                raise error
            return

    def _await_order(self, one: RankSave) -> Order:
        """Another rank: wait for the order of rank 0, which may end the batch meanwhile."""
        exchange = one.exchange
        deadline = ReplyDeadline(2 * self._resources.ranks.timeout, ranks=exchange.size)
        while True:
            ends = None if self._batches is None else self._batches.letter_key()
            keys = [exchange.key("order"), exchange.key("verdict"), *([] if ends is None else [ends])]
            letter = exchange.first(keys, deadline)
            if letter is None:
                raise MissingRankError(
                    f"step {one.step} was not saved: rank 0 did not say how within {deadline.seconds:g} s"
                )
            # Fetch it again: another message may have come after `letter`.
            if (order := fetch(exchange.mailbox, keys[0])) is not None:
                return unpack_order(order, "order")
            if (verdict := fetch(exchange.mailbox, keys[1])) is not None:
                error = CommitVerdict.unpacked(verdict, "verdict").error
                raise error or RankMismatchError("rank 0 continued without this rank")
            assert self._batches is not None
            self._batches.flush()
