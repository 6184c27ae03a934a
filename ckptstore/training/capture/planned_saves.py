"""Saves a state by plan: check that the plan still fits, copy once, pass the copy to the writer.

Without a plan that fits (`capture_plan`) the state is flattened tensor by tensor, and a new plan is made from it. If a
script changes the form of its state in every step, no plan fits: after a few failures none is made for a while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from ckptstore.errors import AgentError
from ckptstore.formats.sources import Bytes
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import aligned
from ckptstore.host.prefault import Prefault
from ckptstore.host.threads import WORTH_THREADS, SleepingPool, default_threads
from ckptstore.training.capture.capture_plan import PlannedState, StateCopy, StatePlan
from ckptstore.training.capture.predicted_updates import PredictedUpdates
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.optimizers.optimizer_tracker import CollectedSteps
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.local_writer import LocalWriter
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.steps.updates import Explaining, Update
from ckptstore.write.writer import Writer

if TYPE_CHECKING:
    from ckptstore.agent.client.agent_writer import AgentWriter

__all__ = ["PlannedSaves", "SaveLabels", "plannable"]

_LOG: Final = logging.getLogger("ckptstore.training")
_MOST_MISFITS: Final = 3
"""Consecutive plans that did not fit a single later step, before a pause."""
_PAUSE: Final = 200
"""Saves until the next plan is tried."""
_MANY: Final = 128
"""Number of tensors from which a compiled copy loop is faster, although it takes half a second to load."""


def plannable(writer: Writer) -> TypeGuard[LocalWriter | AgentWriter]:
    """Whether a writer accepts states that the caller has copied, to its own memory or to the agent's."""
    return writer.takes_copies


@dataclass(frozen=True, slots=True)
class SaveLabels:
    """Metadata and tags of a checkpoint."""

    metadata: Mapping[str, Any] | None
    tags: str | Sequence[str]


class PlannedSaves:
    """Copies a script's state by plan, and passes the copy to a writer."""

    def __init__(
        self, captured: ScriptState, writer: LocalWriter | AgentWriter, limit: int, *, predict: bool, kept: int
    ) -> None:
        """
        Args:
            limit: how many saves may be in flight.
            predict: steps are stored as step diffs.
            kept: how many states the writer keeps beside those in flight.
        """
        self._captured = captured
        self._writer = writer
        self._predict = predict
        self._most = limit + kept
        self._slots = threading.BoundedSemaphore(limit)
        self._pool = SleepingPool(default_threads(), "ckptstore-copy")
        self._explaining = Explaining(wanted=predict)
        self._plan: StatePlan | None = None
        self._predicted: PredictedUpdates | None = None
        self._former: PredictedUpdates | None = None  # of the plan before
        self._free: list[StateCopy] = []
        self._made = 0
        self._offsets: Sequence[int] = ()  # of the tensors in the memory that an agent lends
        self._lock = threading.Lock()
        self._misfits = 0
        self._pause = 0
        self._foresee_ran = False  # `foresee` has run
        self._touching: dict[int, Prefault] = {}

    def save(self, step: int, ranks: int, collected: CollectedSteps, labels: SaveLabels) -> PendingSave | None:
        """Copy the state of `step`, and pass it to the writer -> its save. None: no plan fits, and nothing was done.

        Raises:
            as `Writer.save_async`.
        """
        began = time.monotonic()
        plan, light = self._plan_and_state(step, ranks)
        if plan is None or light is None:
            return None
        if not plan.on_host:  # the writer queues the copies of its devices
            state = plan.whole(light)
            updates = collected.updates if self._predict else None
            return self._writer.save_async(state, step, metadata=labels.metadata, tags=labels.tags, updates=updates)
        if isinstance(self._writer, LocalWriter):
            return self._save_in_process(self._writer, (plan, light), step, collected, labels, began)
        return self._save_with_agent(self._writer, (plan, light), step, collected, labels, began)

    def foresee(self, step: int, ranks: int) -> None:
        """After a step that is not saved: prepare memory for the first save in the background, at most once.

        Raises nothing: the first save raises the error, if it still occurs.
        """
        if self._foresee_ran or self._plan is not None:
            return
        self._foresee_ran = True
        try:
            plan, light = self._plan_and_state(step, ranks)
            if plan is None or light is None or not plan.on_host:
                return
            if isinstance(self._writer, LocalWriter):
                self._pool.submit(self._make_ready, plan)
            else:
                self._writer.prepare(PlannedState(light.tree, plan.tensors, (), plan.nbytes))
        except Exception as error:  # noqa: BLE001  # no step is to be saved now
            _LOG.info("nothing is made ready for the first save: %s", error)

    def _save_in_process(
        self,
        writer: LocalWriter,
        planned: tuple[StatePlan, FlatState],
        step: int,
        collected: CollectedSteps,
        labels: SaveLabels,
        began: float,
    ) -> PendingSave:
        """Save with a writer of this process."""
        plan, light = planned
        self._slots.acquire()
        waited = time.monotonic() - began
        try:
            place = self._place(plan)
        except BaseException:
            self._slots.release()
            raise
        snapshot = None
        try:
            state = place.filled(light, self._pool)
            snapshot = Snapshot(state, self._slots.release, lambda: self._give(place))
            updates = self._updates(plan, collected, place)
            return writer.adopt(
                snapshot, step, metadata=labels.metadata, tags=labels.tags, updates=updates, began=began, waited=waited
            )
        except BaseException:
            if snapshot is None:
                self._slots.release()
                self._give(place)
            else:
                snapshot.land()
                snapshot.free()
            raise

    def _save_with_agent(
        self,
        writer: AgentWriter,
        planned: tuple[StatePlan, FlatState],
        step: int,
        collected: CollectedSteps,
        labels: SaveLabels,
        began: float,
    ) -> PendingSave:
        """Save with an agent, which lends its memory."""
        plan, light = planned

        def fill(memory: Bytes, offsets: Sequence[int]) -> Sequence[Update]:
            place = self._lent(plan, memory, offsets)
            place.filled(light, self._pool)
            return self._updates(plan, collected, place)

        state = PlannedState(light.tree, plan.tensors, (), plan.nbytes)
        return writer.save_filled(state, step, fill, metadata=labels.metadata, tags=labels.tags, began=began)

    def _plan_and_state(self, step: int, ranks: int) -> tuple[StatePlan | None, FlatState | None]:
        """The plan of the state, and the state as it is now; None: no plan fits it."""
        if self._plan is not None:
            light = self._plan.taken(step, ranks)
            if light is not None:
                self._misfits = 0
                return self._plan, light
            self._forget()
        if self._pause:
            self._pause -= 1
            return None, None
        self._misfits += 1
        state = self._captured.state(step, ranks)
        plan = StatePlan.made(self._captured, state, bridge.flattened(state), step, ranks)
        light = None if plan is None else plan.taken(step, ranks)
        if plan is None or light is None or self._misfits > _MOST_MISFITS:
            self._misfits, self._pause = 0, _PAUSE
            return None, None
        if plan.on_host and (plan.nbytes >= WORTH_THREADS or len(plan.tensors) >= _MANY):
            self._pool.wake()
        self._plan = plan
        _LOG.info("%r", plan)
        return plan, light

    def _updates(self, plan: StatePlan, collected: CollectedSteps, place: StateCopy) -> Sequence[Update]:
        """The predicted updates of this step."""
        if not self._predict:
            return ()
        noted = collected.noted
        if self._predicted is None or (noted is not None and not self._predicted.fits(noted)):
            self._predicted = PredictedUpdates(self._captured.optimizers, plan, self._predicted or self._former)
            self._former = None
        predicted = self._predicted.updates(noted, place.memory)
        if noted is not None:
            return predicted
        return self._explaining.found(collected.updates, FlatState(None, plan.tensors))

    # -- memory

    def _place(self, plan: StatePlan) -> StateCopy:
        with self._lock:
            while self._free:
                place = self._free.pop()
                touching = self._touching.pop(id(place), None)
                if place.plan is plan:
                    if touching is not None:
                        touching.use()
                    return place
            first, self._made = not self._made, self._made + 1
        place = StateCopy(plan, aligned(plan.size))
        if first:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._pool.submit(self._make_ready, plan)
        return place

    def _lent(self, plan: StatePlan, memory: Bytes, offsets: Sequence[int]) -> StateCopy:
        """The `StateCopy` in memory that the agent lends; the agent lends the same memory many times."""
        if offsets is not self._offsets:
            if list(offsets) != [plan.offsets[name] for name in plan.tensors]:
                raise AgentError(
                    "the agent lays tensors out in another order than this process: they are of two releases"
                )
            self._offsets = offsets
            self._free.clear()  # they are in memory that an earlier agent lent, or for an earlier plan
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._pool.submit(self._make_ready, plan, memory=False)
        for place in self._free:
            if place.memory is memory and place.plan is plan:
                return place
        self._free.append(StateCopy(plan, memory))
        return self._free[-1]

    def _make_ready(self, plan: StatePlan, *, memory: bool = True) -> None:
        """Allocate and touch memory for the next saves in the background: the first touch costs more than the copy."""
        while memory:
            with self._lock:
                if plan is not self._plan or self._made >= self._most:
                    return
                self._made += 1
            try:
                room = aligned(plan.size)
            except MemoryError:
                return  # a save that needs the memory raises the error
            touching, place = Prefault(room), StateCopy(plan, room)
            with self._lock:
                if plan is not self._plan:
                    return
                # A save may use it before it is touched, which is faster than another allocation. It is used last.
                self._free.insert(0, place)
                self._touching[id(place)] = touching
            touching.run()

    def _give(self, place: StateCopy) -> None:
        with self._lock:
            if place.plan is self._plan:
                self._free.append(place)

    def _forget(self) -> None:
        with self._lock:
            self._former, self._plan, self._predicted = self._predicted or self._former, None, None
            self._free.clear()
            for touching in self._touching.values():
                touching.stop()
            self._touching.clear()
            self._offsets = ()
            self._made = 0

    def close(self) -> None:
        """Release memory and threads. Call it when the writer is closed."""
        self._pool.shutdown(cancel_futures=True)
        self._forget()
        self._former = None
