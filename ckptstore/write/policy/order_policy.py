"""Decides how the next checkpoint is stored, from the checkpoints stored before and their sizes.

It does no I/O and has no threads. A writer of one process uses its own policy. With many ranks, rank 0 uses its policy
and sends the `Order` to the other ranks; their policies learn from the same orders, but make no decisions.

Fulls and deltas follow `delta_interval.Schedule`. Step diffs follow `DiffOptions`: a full after a number of steps, and
batches limited in steps and bytes. Retention rules that keep a checkpoint permanently can require a full
(`retention_forecast`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.history.retention_forecast import Chains
from ckptstore.write.policy.orders import FULL_ORDER, Order

if TYPE_CHECKING:
    from ckptstore.write.policy.delta_interval import Decision, Schedule
    from ckptstore.write.policy.delta_options import DeltaOptions
    from ckptstore.write.policy.diff_options import DiffOptions

__all__ = ["OrderPolicy"]


class OrderPolicy:
    """Decides for one term. One thread at a time calls it; any thread may call `bases`."""

    def __init__(
        self,
        deltas: DeltaOptions | None = None,
        diffs: DiffOptions | None = None,
        chains: Chains | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            deltas: None: no checkpoint is a delta.
            diffs: None: no checkpoint is a step diff.
            chains: decides which checkpoint must be a full because rules keep it; None: there are no rules.
            clock: in seconds; measures how long training has run between two fulls.
        """
        self._chains = Chains(tuple) if chains is None else chains
        self._schedule: Schedule | None = None
        if deltas is not None:
            from ckptstore.write.policy.delta_interval import Schedule  # not for plain fulls

            self._schedule = Schedule(deltas.interval, deltas.form, deltas.bound)
        self._numbers: dict[CheckpointId, int] = {}  # the schedule's numbers of the bases
        self._given = diffs
        self._last: CheckpointId | None = None  # the step that the next step diff is compressed against
        self._depth = 0  # step diffs since the last full or delta
        self._size = 0.0  # size of the last step diff, as a fraction of a full
        self._clock = clock
        self._begun = clock()

    @property
    def _diffs(self) -> DiffOptions:
        """The options of step diffs; without any, the default ones."""
        if self._given is None:
            from ckptstore.write.policy.diff_options import DiffOptions

            self._given = DiffOptions()
        return self._given

    def begin_term(self) -> None:
        """Begin another term: the next checkpoint is a full. The learned sizes stay."""
        self.forget_bases()
        self.end_steps()
        self._size = 0.0
        self._begun = self._clock()

    # -- fulls and deltas

    def state_order(self, step: int, restorable: Callable[[CheckpointId], bool]) -> Order:
        """Decide how the checkpoint of `step` is stored: as a full or a delta.

        Args:
            restorable: whether the catalog can restore a checkpoint, so that a delta may build on it.
        """
        if self._schedule is None:
            return FULL_ORDER
        order = self._order(self._schedule.decide())
        if order.base is None:
            return order
        size = self._schedule.expected(order.gap)
        if restorable(order.base) and not self._chains.wants_full(step, order.base.step, size):
            return order
        # A request retired the base and dropped its segments, so a delta against it could never be committed. Or rules
        # keep this checkpoint, and a delta would keep the chain below it stored.
        self.forget_bases()
        return self._order(self._schedule.decide())

    def _order(self, decision: Decision) -> Order:
        ids = {number: identity for identity, number in self._numbers.items()}
        base = None if decision.base is None else ids[decision.base]
        forget = tuple(ids[number] for number in decision.forget if number in ids)
        return Order(base, decision.gap, decision.keep, forget)

    def took(self, stored: int, seconds: float) -> None:
        """Learn how fast this medium is: `stored` bytes were written in `seconds`.

        Decoding is about as fast as encoding and writing, so this rate is good enough to bound a restore in seconds.
        """
        if self._schedule is not None:
            self._schedule.rate = stored / max(seconds, 1e-6)

    def committed(self, order: Order, identity: CheckpointId, stored: int, nbytes: int) -> None:
        """Note that a full or a delta is committed.

        Args:
            stored: bytes that it takes. `nbytes`: logical bytes of its state.
        """
        below = None if order.base is None else order.base.step
        self._chains.stored(identity.step, below, stored / nbytes if nbytes else 1.0)
        if self._schedule is None:
            return
        from ckptstore.write.policy.delta_interval import Decision

        base = None if order.base is None else self._numbers.get(order.base)
        if order.base is not None and base is None:
            # Prevents: a delta against a checkpoint whose own base was dropped while it was written.
            return
        forget = tuple(self._numbers[one] for one in order.forget if one in self._numbers)
        number = self._schedule.written(Decision(base, order.gap, order.keep, forget), stored)
        if base is None:
            self._numbers.clear()
        for one in order.forget:
            self._numbers.pop(one, None)
        if order.keep:
            self._numbers[identity] = number

    def bases(self) -> list[CheckpointId]:
        """The checkpoints that the next deltas may build on."""
        return list(self._numbers)

    def forget_bases(self) -> None:
        """Drop all bases: the next checkpoint is not a delta. The learned sizes stay."""
        self._numbers.clear()
        if self._schedule is not None:
            self._schedule.restart()

    # -- step diffs

    @property
    def full_every(self) -> int:
        """Checkpoints from one full to the next, at present."""
        controller = self._diffs.controller
        return self._diffs.full_every if controller is None else controller.configuration.interval

    @property
    def batch(self) -> int:
        """Steps in a batch, at present."""
        controller = self._diffs.controller
        return self._diffs.batch if controller is None else controller.configuration.batch

    def step_order(
        self, step: int, restorable: Callable[[CheckpointId], bool], *, waiting: int, waits: bool = True
    ) -> Order | None:
        """Decide how `step` is stored as a step diff; None: it is stored as `state_order` decides.

        Args:
            restorable: as for `state_order`.
            waiting: number of steps that wait for their batch.
            waits: whether this step may wait, too; if not, its batch ends with it.
        """
        last = self._last
        if last is None or self._depth + 1 >= self.full_every:
            return None
        if self._chains.wants_full(step, last.step, self._size):
            return None
        # A request may have retired the base of the step. Waiting steps already build on it, and keep it.
        if not waiting and not restorable(last):
            return None
        return Order(after=last.step, last=not waits or waiting + 1 >= self.batch)

    def too_large(self, stored: int) -> bool:
        """Whether a batch of `stored` compressed bytes must be written."""
        return stored > self._diffs.batch_bytes

    def count_step(self) -> None:
        """Note that a step has joined its batch, alone (`compressed` is called before or after) or in a sum."""
        self._depth += 1

    def compressed(self, identity: CheckpointId, base: int, stored: int, nbytes: int) -> None:
        """Note that a step diff was compressed: the next one is compressed against it.

        Args:
            identity: its identity, with the state hash if that is known already; if not, `batch_committed` sets it.
            base: the step that it is compressed against.
            stored: bytes of its payloads. `nbytes`: logical bytes of the state.
        """
        self._size = stored / nbytes if nbytes else 1.0
        self._chains.stored(identity.step, base, self._size)
        self.batch_committed(identity)

    def batch_committed(self, identity: CheckpointId) -> None:
        """Note that a batch is committed whose last checkpoint is `identity`."""
        # Prevents: a sum without a failed step, because the steps that waited before it were written meanwhile.
        if self._last is not None:
            self._last = identity

    def begin_steps(self, identity: CheckpointId, stored: int, seconds: float) -> None:
        """Note that a full or a delta is durable: the next step diff is compressed against it.

        Args:
            stored: bytes that it takes. `seconds`: how long it took.

        Raises:
            any error of the controller; then nothing has changed.
        """
        controller = self._diffs.controller
        if controller is not None:
            before, self._begun = self._begun, self._clock()
            controller.ran(self._begun - before)
            controller.wrote(max(stored, 1), max(seconds, 1e-6))
            controller.adapt()
        self._last = identity
        self._depth = 0

    def end_steps(self) -> None:
        """End the chain of step diffs: the next checkpoint is not a step diff."""
        self._last = None

    def lost(self) -> None:
        """Note that a step was not saved and is in no batch. If gradients are summed, the next checkpoint is a full."""
        # Prevents: a sum that lacks a step.
        if self._diffs.accumulate == "sum":
            self.end_steps()
