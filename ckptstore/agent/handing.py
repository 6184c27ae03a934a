"""States handed over to an agent: a buffer is borrowed, filled, and given to it. What becomes of it `tenure` hears."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptstore.agent.changes import Packed, updates_form
from ckptstore.agent.forms import Layout, labels_form
from ckptstore.agent.lending import Lent
from ckptstore.agent.replicating import Failed
from ckptstore.agent.starting import Started
from ckptstore.agent.tenure import AgentRestartWarning, Tenure
from ckptstore.errors import AgentLostError
from ckptstore.formats.checkpoint_ref import step_number
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.batched_copies import run_shared
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads, run_all, started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.filling import Filling
from ckptstore.write.layered import Begun, LayeredSave, Owner, checked_layers
from ckptstore.write.ledger import Labels, PendingSave
from ckptstore.write.metrics import Measured, Meter
from ckptstore.write.options import WriterOptions
from ckptstore.write.snapshot import copy_jobs
from ckptstore.write.steps.updates import Explaining, Update, Updates

__all__ = ["AgentRestartWarning", "Fill", "FilledByOwner", "HandingOver"]

Fill: TypeAlias = Callable[[Bytes, Sequence[int]], Sequence[Update]]
"""Copies a state to memory, each tensor to where it begins there (in their order) -> what the optimizers did."""


@dataclass(frozen=True, slots=True)
class FilledByOwner:
    """How a state is copied by its owner: what copies it, its layout, since when training has waited."""

    fill: Fill
    layout: Layout
    began: float | None


class HandingOver:
    """Brings states to the agent of a tenure, for the thread that trains."""

    def __init__(self, tenure: Tenure, options: WriterOptions) -> None:
        self._tenure = tenure
        self._options = options
        self._copiers = started_pool(default_threads(), "ckptstore-copy")
        self._meter = Meter(options.on_metrics)
        self._begun: Begun | None = None
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._laid_out: tuple[Mapping[str, TensorSource], Layout] = ({}, Layout(()))

    # -- whole states

    def save(
        self,
        state: Any,
        step: int,
        labels: Labels,
        updates: Updates | None,
        filling: FilledByOwner | None = None,
    ) -> PendingSave:
        """Copy a state and hand it over, to be written.

        Args:
            filling: how its owner copies it; None: it is copied here.

        Raises:
            as `AgentWriter.save_async`, and what `filling` raises.
        """
        if filling is None:
            self._laid_out = {}, Layout(())  # who has planned no more lets go of its tensors
        step = step_number(step)
        began = time.monotonic() if filling is None or filling.began is None else filling.began
        agent, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        done: Future[CheckpointInfo] = Future()
        try:
            layout = Layout.of(flat.tensors) if filling is None else filling.layout
            lent = self._lend(agent, layout, step)
            measured.waited = lent.waited
            try:
                # Prevents: a kill that costs more than `max_in_flight` saves; see `write.places`.
                self._tenure.failures.raise_unseen()
                if filling is not None:
                    updates = filling.fill(lent.memory, lent.offsets) or None
                else:
                    self._copy(flat, lent)
                changes, beside = self._changes(lent, updates, flat)
                try:
                    self._send(lent, flat.tree, (step, labels, done), changes)
                except BaseException:
                    if beside is not None:
                        beside.give_back()
                    raise
            except BaseException:
                lent.give_back()
                raise
            return self._pending_save(step, done, measured)
        except BaseException as error:
            self._tenure.saves.release(step, error)
            measured.failed(error)
            raise
        finally:
            measured.returned()

    def layout_of(self, flat: FlatState) -> Layout:
        """Of a state that its owner copies; the same dict of tensors has the layout that it had."""
        tensors, layout = self._laid_out
        if tensors is not flat.tensors:
            layout = Layout.of(flat.tensors)
            self._laid_out = flat.tensors, layout
        return layout

    def hold(self, flat: FlatState, step: int, labels: Labels) -> None:
        """Copy a state and hand it over, to be kept in memory alone. Raises as `AgentWriter.hold`."""
        tenure = self._tenure
        tenure.failures.raise_unseen()
        agent = tenure.connected()
        lent = tenure.lending.lend(agent.link, Layout.of(flat.tensors))
        try:
            self._copy(flat, lent)
            tenure.inherited = None  # its memory may be filled again from now on
            lent.save({"step": step, "tree": flat.tree, "persist": False, **labels_form(labels)}, lambda _: None)
        except BaseException:
            lent.give_back()
            raise

    def prepare(self, state: Any) -> None:
        """Have as many buffers made and touched as may be filled at once."""
        agent = self._tenure.connected()
        flat = self.flattened(state)
        self._tenure.lending.prepare(agent.link, Layout.of(flat.tensors), 1 + self._options.max_in_flight)

    def promise(self, flat: FlatState, step: int, began: float) -> tuple[PendingSave, Failed]:
        """A step that the agent is to write of its own memory -> its save, and who is told if that becomes nothing."""
        tenure = self._tenure
        tenure.check_open()
        tenure.failures.raise_unseen()
        tenure.saves.check(step)
        tenure.saves.take(step)
        measured = self._meter.begin(flat, step, began)
        done: Future[CheckpointInfo] = Future()
        refused = tenure.await_word(step, done)
        pending = self._pending_save(step, done, measured)
        measured.returned()
        return pending, refused

    def flattened(self, state: Any) -> FlatState:
        """A state, taken apart."""
        return state if isinstance(state, FlatState) else bridge.flattened(state, sharded=self._tenure.rank is not None)

    def _admit(self, state: Any, step: int) -> tuple[Started, FlatState]:
        """Everything that can be refused is refused here."""
        tenure = self._tenure
        tenure.check_open()
        self.settle()
        tenure.failures.raise_unseen()
        agent = tenure.connected()
        tenure.saves.check(step)
        flat = self.flattened(state)
        tenure.saves.take(step)
        return agent, flat

    def _lend(self, agent: Started, layout: Layout, step: int) -> Lent:
        tenure = self._tenure
        try:
            return tenure.lending.lend(agent.link, layout)
        except AgentLostError:
            # It died after it had been found alive: nothing is lost but this call's time.
            agent = tenure.connected()
            tenure.saves.check(step)
            tenure.saves.take(step)
            return tenure.lending.lend(agent.link, layout)

    def _copy(self, flat: FlatState, lent: Lent) -> None:
        run_all(self._copiers, copy_jobs([(one, lent.place(name)) for name, one in flat.tensors.items()]))

    def _send(
        self, lent: Lent, tree: Any, save: tuple[int, Labels, Future[CheckpointInfo]], changes: dict[str, Any]
    ) -> None:
        """Say that a buffer is filled, and what with: from now on it is the newest state."""
        step, labels, done = save
        refused = self._tenure.await_word(step, done)
        self._tenure.inherited = None  # its memory may be filled again from now on
        try:
            lent.save({"step": step, "tree": tree, **labels_form(labels), **changes}, refused)
        except BaseException:
            self._tenure.await_none(step)
            raise

    def _pending_save(self, step: int, done: Future[CheckpointInfo], measured: Measured) -> PendingSave:
        measured.ends_with(done)
        return self._tenure.pending_save(step, done)

    # -- what the optimizers did

    def _changes(self, lent: Lent, updates: Updates | None, flat: FlatState) -> tuple[dict[str, Any], Lent | None]:
        """What the optimizers did, as a message says it, and the buffer with copies of the gradients."""
        found = self._explaining.found(updates, flat)
        if not found:
            return {}, None
        packed = Packed()
        form = updates_form(found, lent.layout, packed)
        if not packed.nbytes:
            return {"updates": form}, None
        beside = self._tenure.lending.lend_beside(lent.link, packed.nbytes)
        try:
            run_shared(self._copiers, copy_jobs(packed.copies(beside.memory)), packed.nbytes)
        except BaseException:
            beside.give_back()
            raise
        return {"updates": form, "gradients": beside.number}, beside

    # -- layer by layer

    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]]) -> LayeredSave:
        """Begin a save whose layers are copied to the agent's buffer. Raises as `AgentWriter.begin`."""
        step = step_number(step)
        agent, flat = self._admit(state, step)
        try:
            checked_layers(flat, layers)
            lent = self._lend(agent, Layout.of(flat.tensors), step)
            try:
                self._tenure.failures.raise_unseen()
            except BaseException:
                lent.give_back()
                raise
        except BaseException as error:
            self._tenure.saves.release(step, error)
            raise

        def give_up(error: BaseException | None = None) -> None:
            lent.give_back()
            self._tenure.saves.release(step, error)

        def hand_over(now: FlatState, labels: Labels, updates: Updates | None, filling: Filling) -> PendingSave:
            self._begun = None
            measured = self._meter.begin(now, step, time.monotonic())
            try:
                return self._layered(lent, now, (step, labels, updates), (filling, measured))
            except BaseException as error:
                filling.stop()
                give_up(error)
                measured.failed(error)
                raise
            finally:
                measured.returned()

        owner = Owner(hand_over, give_up, self._tenure.check_open)
        begun = LayeredSave(step, flat, layers, lent.snapshot(flat), self._copiers, owner)
        self._begun = Begun(begun)
        return begun

    def settle(self) -> None:
        """Something else begins. Raises `UsageError`: a layer-wise save is not over."""
        if self._begun is not None:
            self._begun.settle()

    def _layered(
        self,
        lent: Lent,
        now: FlatState,
        save: tuple[int, Labels, Updates | None],
        copying: tuple[Filling, Measured],
    ) -> PendingSave:
        """Hand a layer-wise save over once its last layer is copied, which a thread waits for."""
        step, labels, updates = save
        filling, measured = copying
        done: Future[CheckpointInfo] = Future()
        changes, beside = self._changes(lent, updates, now)
        saves = self._tenure.saves

        def work() -> None:
            try:
                filling.check()
                self._send(lent, now.tree, (step, labels, done), changes)
            except BaseException as error:  # noqa: BLE001  # its saver hears of it
                filling.stop()
                for one in (lent, beside):
                    if one is not None:
                        one.give_back()
                if not done.done():
                    saves.fail(step, error, done)

        try:
            self._tenure.check_open()
            pending = self._pending_save(step, done, measured)
            self._tenure.beside.submit(work)
        except BaseException:
            if beside is not None:
                beside.give_back()
            raise
        return pending

    # -- the end

    def abandon(self) -> None:
        """No save begins any more: give up what was begun layer by layer."""
        if self._begun is not None:
            self._begun.abandon()

    def close(self) -> None:
        """Let go of threads, and tell of every save."""
        self._copiers.shutdown()
        self._meter.close()
