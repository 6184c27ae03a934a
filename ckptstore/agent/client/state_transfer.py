"""Copies states into an agent's buffers and hands them over. `agent_term` is told what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptstore.agent.client.agent_launch import RunningAgent
from ckptstore.agent.client.agent_save import AgentSave
from ckptstore.agent.client.agent_term import AgentTerm
from ckptstore.agent.client.buffer_client import BorrowedBuffer
from ckptstore.agent.client.replica_client import Failed
from ckptstore.agent.protocol.message_fields import StateLayout, labels_form
from ckptstore.agent.protocol.update_fields import Packed, updates_form
from ckptstore.errors import AgentLostError
from ckptstore.formats.checkpoint_ref import step_number
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.batched_copies import shared_out
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads, run_all, started_pool
from ckptstore.write.filling import Filling
from ckptstore.write.layered import Begun, LayeredSave, Owner, checked_layers
from ckptstore.write.ledger import Labels, PendingSave
from ckptstore.write.metrics import Meter
from ckptstore.write.options import WriterOptions
from ckptstore.write.snapshot import copy_jobs
from ckptstore.write.steps.updates import Explaining, Update, Updates

__all__ = ["Fill", "FilledByOwner", "StateTransfer"]

Fill: TypeAlias = Callable[[Bytes, Sequence[int]], Sequence[Update]]
"""Copies a state to memory, each tensor to where it begins there (in their order) -> what the optimizers did."""


@dataclass(frozen=True, slots=True)
class FilledByOwner:
    """How a state is copied by its owner: what copies it, its layout, since when training has waited."""

    fill: Fill
    layout: StateLayout
    began: float | None


class StateTransfer:
    """Brings states to the agent of a agent_term, for the thread that trains."""

    def __init__(self, agent_term: AgentTerm, options: WriterOptions) -> None:
        self._agent_term = agent_term
        self._options = options
        self._copiers = started_pool(default_threads(), "ckptstore-copy")
        self._meter = Meter(options.on_metrics)
        self._begun: Begun | None = None
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._laid_out: tuple[Mapping[str, TensorSource], StateLayout] = ({}, StateLayout(()))

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
            self._laid_out = {}, StateLayout(())  # who has planned no more lets go of its tensors
        step = step_number(step)
        began = time.monotonic() if filling is None or filling.began is None else filling.began
        agent, save, flat = self._admit(state, step, labels)
        save.begin(self._meter.begin(flat, step, began))
        try:
            layout = StateLayout.of(flat.tensors) if filling is None else filling.layout
            lent = self._lend(agent, layout, save)
            save.measured.waited = lent.waited
            try:
                # Prevents: a kill that costs more than `max_in_flight` saves; see `write.places`.
                self._agent_term.failures.raise_unseen()
                if filling is not None:
                    updates = filling.fill(lent.memory, lent.offsets) or None
                else:
                    self._copy(flat, lent)
                changes, beside = self._changes(lent, updates, flat)
                try:
                    self._send(lent, flat.tree, save, changes)
                except BaseException:
                    if beside is not None:
                        beside.give_back()
                    raise
            except BaseException:
                lent.give_back()
                raise
            return self._agent_term.pending(save)
        except BaseException as error:
            save.give_up(error)
            raise
        finally:
            save.measured.returned()

    def layout_of(self, flat: FlatState) -> StateLayout:
        """Of a state that its owner copies; the same dict of tensors has the layout that it had."""
        tensors, layout = self._laid_out
        if tensors is not flat.tensors:
            layout = StateLayout.of(flat.tensors)
            self._laid_out = flat.tensors, layout
        return layout

    def hold(self, flat: FlatState, step: int, labels: Labels) -> None:
        """Copy a state and hand it over, to be kept in memory alone. Raises as `AgentWriter.hold`."""
        agent_term = self._agent_term
        agent_term.failures.raise_unseen()
        agent = agent_term.connected()
        lent = agent_term.buffers.lend(agent.link, StateLayout.of(flat.tensors))
        try:
            self._copy(flat, lent)
            agent_term.inherited = None  # its memory may be filled again from now on
            lent.save({"step": step, "tree": flat.tree, "persist": False, **labels_form(labels)}, lambda _: None)
        except BaseException:
            lent.give_back()
            raise

    def prepare(self, state: Any) -> None:
        """Have as many buffers made and touched as may be filled at once."""
        agent = self._agent_term.connected()
        flat = self.flattened(state)
        self._agent_term.buffers.prepare(agent.link, StateLayout.of(flat.tensors), 1 + self._options.max_in_flight)

    def promise(self, flat: FlatState, step: int, began: float) -> tuple[PendingSave, Failed]:
        """A step that the agent is to write of its own memory -> its save, and who is told if that becomes nothing."""
        agent_term = self._agent_term
        agent_term.check_open()
        agent_term.failures.raise_unseen()
        save = agent_term.begin_save(step, Labels())
        save.begin(self._meter.begin(flat, step, began))
        refused = agent_term.expect(save)
        save.measured.returned()
        return agent_term.pending(save), refused

    def flattened(self, state: Any) -> FlatState:
        """A state, taken apart."""
        return (
            state
            if isinstance(state, FlatState)
            else bridge.flattened(state, sharded=self._agent_term.rank is not None)
        )

    def _admit(self, state: Any, step: int, labels: Labels) -> tuple[RunningAgent, AgentSave, FlatState]:
        """Everything that can be refused is refused here."""
        agent_term = self._agent_term
        agent_term.check_open()
        self.settle()
        agent_term.failures.raise_unseen()
        agent = agent_term.connected()
        agent_term.saves.check(step)
        flat = self.flattened(state)
        return agent, agent_term.begin_save(step, labels), flat

    def _lend(self, agent: RunningAgent, layout: StateLayout, save: AgentSave) -> BorrowedBuffer:
        agent_term = self._agent_term
        try:
            return agent_term.buffers.lend(agent.link, layout)
        except AgentLostError:
            # It died after it had been found alive: nothing is lost but this call's time.
            agent = agent_term.connected()
            save.move(agent_term.saves)
            return agent_term.buffers.lend(agent.link, layout)

    def _copy(self, flat: FlatState, lent: BorrowedBuffer) -> None:
        run_all(self._copiers, copy_jobs([(one, lent.place(name)) for name, one in flat.tensors.items()]))

    def _send(self, lent: BorrowedBuffer, tree: Any, save: AgentSave, changes: dict[str, Any]) -> None:
        """Say that a buffer is filled, and what with: from now on it is the newest state."""
        refused = self._agent_term.expect(save)
        self._agent_term.inherited = None  # its memory may be filled again from now on
        try:
            lent.save({"step": save.step, "tree": tree, **labels_form(save.labels), **changes}, refused)
        except BaseException:
            self._agent_term.forget(save)
            raise

    # -- what the optimizers did

    def _changes(
        self, lent: BorrowedBuffer, updates: Updates | None, flat: FlatState
    ) -> tuple[dict[str, Any], BorrowedBuffer | None]:
        """What the optimizers did, as a message says it, and the buffer with copies of the gradients."""
        found = self._explaining.found(updates, flat)
        if not found:
            return {}, None
        packed = Packed()
        form = updates_form(found, lent.layout, packed)
        if not packed.nbytes:
            return {"updates": form}, None
        beside = self._agent_term.buffers.lend_beside(lent.link, packed.nbytes)
        try:
            shared_out(self._copiers, copy_jobs(packed.copies(beside.memory)), packed.nbytes)
        except BaseException:
            beside.give_back()
            raise
        return {"updates": form, "gradients": beside.number}, beside

    # -- layer by layer

    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]]) -> LayeredSave:
        """Begin a save whose layers are copied to the agent's buffer. Raises as `AgentWriter.begin`."""
        agent, save, flat = self._admit(state, step_number(step), Labels())
        try:
            checked_layers(flat, layers)
            lent = self._lend(agent, StateLayout.of(flat.tensors), save)
            try:
                self._agent_term.failures.raise_unseen()
            except BaseException:
                lent.give_back()
                raise
        except BaseException as error:
            save.give_up(error)
            raise

        def give_up() -> None:
            lent.give_back()
            save.give_up(CancelledError(f"the layer-wise save of step {save.step} was abandoned"))

        def hand_over(now: FlatState, labels: Labels, updates: Updates | None, filling: Filling) -> PendingSave:
            self._begun = None
            save.labels = labels
            save.begin(self._meter.begin(now, save.step, time.monotonic()))
            try:
                return self._layered(lent, now, save, updates, filling)
            except BaseException as error:
                filling.stop()
                lent.give_back()
                save.give_up(error)
                raise
            finally:
                save.measured.returned()

        owner = Owner(hand_over, give_up, self._agent_term.check_open)
        begun = LayeredSave(save.step, flat, layers, lent.snapshot(flat), self._copiers, owner)
        self._begun = Begun(begun)
        return begun

    def settle(self) -> None:
        """Something else begins. Raises `UsageError`: a layer-wise save is not over."""
        if self._begun is not None:
            self._begun.settle()

    def _layered(
        self, lent: BorrowedBuffer, now: FlatState, save: AgentSave, updates: Updates | None, filling: Filling
    ) -> PendingSave:
        """Hand a layer-wise save over once its last layer is copied, which a thread waits for."""
        changes, beside = self._changes(lent, updates, now)

        def work() -> None:
            try:
                filling.check()
                self._send(lent, now.tree, save, changes)
            except BaseException as error:  # noqa: BLE001  # its saver hears of it
                filling.stop()
                for one in (lent, beside):
                    if one is not None:
                        one.give_back()
                save.fail(error)

        try:
            self._agent_term.check_open()
            self._agent_term.beside.submit(work)
        except BaseException:
            if beside is not None:
                beside.give_back()
            raise
        return self._agent_term.pending(save)

    # -- the end

    def abandon(self) -> None:
        """No save begins any more: give up what was begun layer by layer."""
        if self._begun is not None:
            self._begun.abandon()

    def close(self) -> None:
        """Let go of threads, and tell of every save."""
        self._copiers.shutdown()
        self._meter.close()
