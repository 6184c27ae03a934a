"""Copies states into an agent's buffers, and passes them to the agent. `agent_term` receives the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from ckptstore.formats.history.checkpoint_ref import step_number
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.batched_copies import run_shared
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads, run_all, started_pool
from ckptstore.write.capture.layerwise_save import LayeredSave, OpenSave, checked_layers
from ckptstore.write.capture.snapshot import copy_jobs
from ckptstore.write.saves.ledger import Labels, PendingSave
from ckptstore.write.saves.save_metrics import Meter
from ckptstore.write.stage import Copies
from ckptstore.write.steps.updates import Explaining, Update, Updates
from ckptstore.write.writer_options import WriterOptions

__all__ = ["Fill", "FilledByOwner", "StateTransfer"]

Fill: TypeAlias = Callable[[Bytes, Sequence[int]], Sequence[Update]]
"""Copies a state to memory, given the position of each tensor there, in order -> what the optimizers did."""


@dataclass(frozen=True, slots=True)
class FilledByOwner:
    """A state that its owner copies: the function, the layout, and when training began to wait (None: now)."""

    fill: Fill
    layout: StateLayout
    began: float | None


class StateTransfer:
    """Copies states to the agent of a term, in the training thread."""

    def __init__(self, agent_term: AgentTerm, options: WriterOptions) -> None:
        self._agent_term = agent_term
        self._options = options
        self._copiers = started_pool(default_threads(), "ckptstore-copy")
        self._meter = Meter(options.on_metrics)
        self._begun: OpenSave | None = None
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._planned_layout: tuple[Mapping[str, TensorSource], StateLayout] = ({}, StateLayout(()))

    # -- whole states

    def save(
        self,
        state: Any,
        step: int,
        labels: Labels,
        updates: Updates | None,
        filling: FilledByOwner | None = None,
    ) -> PendingSave:
        """Copy a state, and give it to the agent to write.

        Args:
            filling: how the owner of the state copies it; None: it is copied here.

        Raises:
            as `AgentWriter.save_async`, and what `filling` raises.
        """
        if filling is None:
            self._planned_layout = {}, StateLayout(())  # keeps no tensors of a planned state alive
        step = step_number(step)
        began = time.monotonic() if filling is None or filling.began is None else filling.began
        agent, save, flat = self._admit(state, step, labels)
        save.begin(self._meter.begin(flat, step, began))
        try:
            layout = StateLayout.of(flat.tensors) if filling is None else filling.layout
            lent = self._lend(agent, layout, save)
            save.measured.waited = lent.waited
            try:
                # Prevents: a kill that costs more than `max_in_flight` saves; see `write.saves.in_flight`.
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
        """The layout of a state that its owner copies. The same dict of tensors has the same layout."""
        tensors, layout = self._planned_layout
        if tensors is not flat.tensors:
            layout = StateLayout.of(flat.tensors)
            self._planned_layout = flat.tensors, layout
        return layout

    def hold(self, flat: FlatState, step: int, labels: Labels) -> None:
        """Copy a state, and give it to the agent to keep only in memory. Raises as `AgentWriter.hold`."""
        agent_term = self._agent_term
        agent_term.failures.raise_unseen()
        agent = agent_term.connected()
        lent = agent_term.buffers.lend(agent.link, StateLayout.of(flat.tensors))
        try:
            self._copy(flat, lent)
            agent_term.inherited = None  # the agent may overwrite its memory from now on
            lent.save({"step": step, "tree": flat.tree, "persist": False, **labels_form(labels)}, lambda _: None)
        except BaseException:
            lent.give_back()
            raise

    def prepare(self, state: Any) -> None:
        """Make the agent allocate and touch as many buffers as may be filled at once."""
        agent = self._agent_term.connected()
        flat = self.flattened(state)
        self._agent_term.buffers.prepare(agent.link, StateLayout.of(flat.tensors), 1 + self._options.max_in_flight)

    def promise(self, flat: FlatState, step: int, began: float) -> tuple[PendingSave, Failed]:
        """A save of a state in the agent's own memory -> the save, and a callback for its failure."""
        agent_term = self._agent_term
        agent_term.check_open()
        agent_term.failures.raise_unseen()
        save = agent_term.begin_save(step, Labels())
        save.begin(self._meter.begin(flat, step, began))
        refused = agent_term.expect(save)
        save.measured.returned()
        return agent_term.pending(save), refused

    def flattened(self, state: Any) -> FlatState:
        """Flatten a state."""
        return (
            state
            if isinstance(state, FlatState)
            else bridge.flattened(state, sharded=self._agent_term.rank is not None)
        )

    def _admit(self, state: Any, step: int, labels: Labels) -> tuple[RunningAgent, AgentSave, FlatState]:
        """Check everything that can be refused -> the agent, the save, the flattened state."""
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
            # The agent died after `connected` found it alive. It had received nothing of this save yet.
            agent = agent_term.connected()
            save.move(agent_term.saves)
            return agent_term.buffers.lend(agent.link, layout)

    def _copy(self, flat: FlatState, lent: BorrowedBuffer) -> None:
        run_all(self._copiers, copy_jobs([(one, lent.place(name)) for name, one in flat.tensors.items()]))

    def _send(self, lent: BorrowedBuffer, tree: Any, save: AgentSave, changes: dict[str, Any]) -> None:
        """Tell the agent what a buffer holds: from now on that is the newest state."""
        refused = self._agent_term.expect(save)
        self._agent_term.inherited = None  # the agent may overwrite its memory from now on
        try:
            lent.save({"step": save.step, "tree": tree, **labels_form(save.labels), **changes}, refused)
        except BaseException:
            self._agent_term.forget(save)
            raise

    # -- what the optimizers did

    def _changes(
        self, lent: BorrowedBuffer, updates: Updates | None, flat: FlatState
    ) -> tuple[dict[str, Any], BorrowedBuffer | None]:
        """What the optimizers did, as members of a message, and the buffer with copies of the gradients."""
        found = self._explaining.found(updates, flat)
        if not found:
            return {}, None
        packed = Packed()
        form = updates_form(found, lent.layout, packed)
        if not packed.nbytes:
            return {"updates": form}, None
        beside = self._agent_term.buffers.lend_beside(lent.link, packed.nbytes)
        try:
            run_shared(self._copiers, copy_jobs(packed.copies(beside.memory)), packed.nbytes)
        except BaseException:
            beside.give_back()
            raise
        return {"updates": form, "gradients": beside.number}, beside

    # -- layer by layer

    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]]) -> LayeredSave:
        """Begin a save whose layers are copied to the agent's buffer. Raises as `Writer.begin`."""
        agent, save, flat = self._admit(state, step_number(step), Labels())
        try:
            checked_layers(flat, layers)
            lent = self._lend(agent, StateLayout.of(flat.tensors), save)
            copies = Copies(lent.snapshot(flat))
            copies.belongs_to(save)
            self._agent_term.failures.raise_unseen()
        except BaseException as error:
            save.give_up(error)
            raise

        def submit(now: FlatState, labels: Labels, updates: Updates | None) -> PendingSave:
            self._begun = None
            save.labels = labels
            save.begin(self._meter.begin(now, save.step, time.monotonic()))
            try:
                return self._layered(lent, now, save, updates, copies)
            except BaseException as error:
                save.give_up(error)
                raise
            finally:
                save.measured.returned()

        check_open = self._agent_term.check_open
        begun = LayeredSave(save, flat, layers, copies.state, self._copiers, submit=submit, check_open=check_open)
        self._begun = begun.opened
        return begun

    def settle(self) -> None:
        """Check that no layer-wise save is unfinished. Raises `UsageError`."""
        if self._begun is not None:
            self._begun.settle()

    def _layered(
        self, lent: BorrowedBuffer, now: FlatState, save: AgentSave, updates: Updates | None, copies: Copies
    ) -> PendingSave:
        """Give a layer-wise save to the agent, in a thread, once its last layer is copied."""
        changes, beside = self._changes(lent, updates, now)

        def work() -> None:
            try:
                copies.arrive()
                self._send(lent, now.tree, save, changes)
            except BaseException as error:  # noqa: BLE001  # the save reports it
                if beside is not None:
                    beside.give_back()
                save.fail(error)
            finally:
                copies.let_go()  # gives the buffer back, unless the agent has it now
                save.finish()

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
        """Accept no more saves: abandon an unfinished layer-wise save."""
        if self._begun is not None:
            self._begun.abandon()

    def close(self) -> None:
        """End the threads, and report the metrics of every save."""
        self._copiers.shutdown()
        self._meter.close()
