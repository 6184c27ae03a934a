"""Copies states into an agent's buffers, and passes them to the agent. `agent_term` receives the results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ckptstore.agent.client.agent_launch import RunningAgent
from ckptstore.agent.client.agent_save import AgentSave
from ckptstore.agent.client.agent_term import AgentTerm
from ckptstore.agent.client.buffer_client import BorrowedBuffer
from ckptstore.agent.client.replica_client import Failed, ReplicaClient
from ckptstore.agent.protocol.message_fields import StateLayout, labels_form
from ckptstore.agent.protocol.update_fields import Packed, updates_form
from ckptstore.errors import AgentLostError
from ckptstore.formats.history.checkpoint_ref import step_number
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.batched_copies import run_shared
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import SleepingPool, default_threads, run_all, started_pool
from ckptstore.write.capture.layerwise_save import LayeredSave, OpenSave, checked_layers
from ckptstore.write.capture.snapshot import copy_queued
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


class _Given:
    """A save on its way to the agent.

    Attributes:
        tree: the state's tree.
        save: the save; None: the agent keeps the state only in memory.
        lent: the buffer that the state is copied to.
        changes: what the optimizers did, as members of the message.
        beside: the buffer that their gradients are copied to; None: there are none.
    """

    def __init__(self, tree: Any, save: AgentSave | None, lent: BorrowedBuffer) -> None:
        self.tree = tree
        self.save = save
        self.lent = lent
        self.changes: dict[str, Any] = {}
        self.beside: BorrowedBuffer | None = None
        self._arriving: list[Callable[[], None]] = []

    def copied(self, arrive: Callable[[], None] | None) -> None:
        """Note that tensors were copied. `arrive` waits for devices, or threads, that still copy them."""
        if arrive is not None:
            self._arriving.append(arrive)

    @property
    def arrived(self) -> bool:
        """Whether no device, and no other thread, copies any more."""
        return not self._arriving

    def arrive(self) -> None:
        """Wait for the copies of devices and other threads. Raises the error of a copy."""
        for arrive in self._arriving:
            arrive()
        self._arriving.clear()

    def give_back(self) -> None:
        """Return its buffers unfilled. Does nothing if they were saved; raises nothing."""
        # Prevents: an agent that lends a buffer again while a device still copies to it.
        for arrive in self._arriving:
            with contextlib.suppress(Exception):  # a failed device copies no more; the save reports its error
                arrive()
        for one in (self.lent, self.beside):
            if one is not None:
                one.give_back()


class StateTransfer:
    """Copies states to the agent of a term, in the training thread.

    Attributes:
        replica: the newest replica that the agent keeps.
    """

    def __init__(self, agent_term: AgentTerm, options: WriterOptions) -> None:
        self._agent_term = agent_term
        self._options = options
        self._copiers = started_pool(default_threads(), "ckptstore-copy")
        self._registers = SleepingPool(1, "ckptstore-register")
        self._last: Future[None] | None = None  # of the saves that a thread sends
        self.replica: ReplicaClient | None = None
        self._meter = Meter(options.on_metrics)
        self._begun: OpenSave | None = None
        self._explaining = Explaining(wanted=options.diffs is not None)
        self._planned_layout: tuple[Mapping[str, TensorSource], StateLayout] = ({}, StateLayout(()))

    # -- whole states

    def save(
        self,
        state: Any,
        step: int | None,
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
        step = None if step is None else step_number(step)
        began = time.monotonic() if filling is None or filling.began is None else filling.began
        agent, save, flat = self._admit(state, step, labels)
        save.begin(self._meter.begin(flat, save.step, began))
        try:
            layout = StateLayout.of(flat.tensors) if filling is None else filling.layout
            lent = self._lend(agent, layout, save)
            save.measured.waited = lent.waited
            given = _Given(flat.tree, save, lent)
            try:
                # Prevents: a kill that costs more than `max_in_flight` saves; see `write.saves.in_flight`.
                self._agent_term.failures.raise_unseen()
                if filling is not None:
                    updates = filling.fill(lent.memory, lent.offsets) or None
                else:
                    self._copy(flat, given)
                self._copy_changes(given, updates, flat)
                self._hand_over(given)
            except BaseException:
                given.give_back()
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
        labels.check_known()
        agent_term = self._agent_term
        agent_term.failures.raise_unseen()
        agent = agent_term.connected()
        lent = agent_term.buffers.lend(agent.link, StateLayout.of(flat.tensors))
        given = _Given(flat.tree, None, lent)

        def send() -> None:
            lent.save({"step": step, "tree": flat.tree, "persist": False, **labels_form(labels)}, lambda _: None)

        try:
            self._copy(flat, given)
            agent_term.inherited = None  # the agent may overwrite its memory from now on
            # If a device fails, the agent refuses the next step, because it lacks this one.
            self.in_turn(None if given.arrived else given.arrive, send, lambda _: given.give_back())
        except BaseException:
            given.give_back()
            raise

    def prepare(self, state: Any) -> None:
        """Make the agent allocate and touch as many buffers as may be filled at once."""
        agent = self._agent_term.connected()
        flat = self.flattened(state)
        self._agent_term.buffers.prepare(agent.link, StateLayout.of(flat.tensors), 1 + self._options.max_in_flight)

    def promise(self, flat: FlatState, step: int, began: float) -> tuple[PendingSave, Failed]:
        """Begin the save of a state in the agent's own memory -> the save, and a callback for its failure."""
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
        return bridge.flattened(state, sharded=self._agent_term.rank is not None)

    def _admit(self, state: Any, step: int | None, labels: Labels) -> tuple[RunningAgent, AgentSave, FlatState]:
        """Check everything that can be refused -> the agent, the save, the flattened state."""
        agent_term = self._agent_term
        agent_term.check_open()
        labels.check_known()
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

    # -- copies, by threads and devices

    def _copy(self, flat: FlatState, given: _Given) -> None:
        """Copy a state to its buffer. The copies of devices may only be queued."""
        copies = {name: (one, given.lent.place(name)) for name, one in flat.tensors.items()}
        given.copied(self._copied(copies, given.lent, partial(run_all, self._copiers)))

    def _copied(
        self,
        copies: Mapping[str, tuple[TensorSource, Bytes]],
        lent: BorrowedBuffer,
        run: Callable[[list[Callable[[], None]]], None],
    ) -> Callable[[], None] | None:
        return copy_queued(copies, lent.memory, run, partial(self.register, lent.memory))

    def register(self, memory: Bytes, device: Any) -> None:
        """Register memory of the agent with a device, in the background."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile, or no thread can be started
            self._registers.wake()
            self._registers.submit(bridge.register, memory, device)

    # -- to the agent, in the order of the steps

    def _hand_over(self, given: _Given) -> None:
        """Give a save to the agent: at once, or in a thread once devices and other threads have copied it."""
        self._agent_term.check_open()
        self._agent_term.inherited = None  # the agent may overwrite its memory from now on
        # Prevents: a step that the agent refuses, because a later one overtook it.
        if given.arrived and (self._last is None or self._last.done()):
            self._send(given)
            return

        def work() -> None:
            try:
                given.arrive()  # Prevents: an agent that reads a buffer while a device still copies to it.
                self._send(given)
            except BaseException as error:  # noqa: BLE001  # the save reports it
                given.give_back()
                assert given.save is not None
                given.save.fail(error)
            finally:
                assert given.save is not None
                given.save.finish()

        self._last = self._agent_term.beside.submit(work)

    def in_turn(
        self, arrive: Callable[[], None] | None, send: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Send a request after all before it: at once, or in a thread once devices have copied what it names.

        Args:
            arrive: waits for the devices; None: everything is copied.
            failed: called with the error if that thread cannot send it.

        Raises:
            what `send` raises, if it is called at once.
        """
        if arrive is None and (self._last is None or self._last.done()):
            send()
            return

        def work() -> None:
            try:
                if arrive is not None:
                    arrive()  # Prevents: an agent that reads gradients while a device still copies them.
                send()
            except BaseException as error:  # noqa: BLE001  # the save reports it
                failed(error)

        self._last = self._agent_term.beside.submit(work)

    def handed_over(self) -> None:
        """Return when the agent was given every earlier save."""
        if self._last is not None:
            self._last.result()

    def _send(self, given: _Given) -> None:
        """Tell the agent what a buffer holds: from now on that is the newest state."""
        save = given.save
        assert save is not None
        refused = self._agent_term.expect(save)
        try:
            body = {"step": save.step, "tree": given.tree, **labels_form(save.labels), **given.changes}
            given.lent.save(body, refused)
        except BaseException:
            self._agent_term.forget(save)
            raise

    # -- what the optimizers did

    def _copy_changes(self, given: _Given, updates: Updates | None, flat: FlatState) -> None:
        """Add to a save what the optimizers did, and copy the gradients to a buffer of their own."""
        found = self._explaining.found(updates, flat)
        if not found:
            return
        packed = Packed()
        given.changes = {"updates": updates_form(found, given.lent.layout, packed)}
        if not packed.nbytes:
            return
        beside = given.beside = self._agent_term.buffers.lend_beside(given.lent.link, packed.nbytes)
        given.changes["gradients"] = beside.number
        copies = {str(number): one for number, one in enumerate(packed.copies(beside.memory))}
        shared = partial(run_shared, self._copiers, nbytes=packed.nbytes)
        given.copied(self._copied(copies, beside, shared))

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
            given = _Given(now.tree, save, lent)
            try:
                labels.check_known()
                given.copied(copies.state.arrive)
                self._copy_changes(given, updates, now)
                self._hand_over(given)
                return self._agent_term.pending(save)
            except BaseException as error:
                save.give_up(error)
                given.give_back()
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

    # -- the end

    def abandon(self) -> None:
        """Accept no more saves: abandon an unfinished layer-wise save."""
        if self._begun is not None:
            self._begun.abandon()

    def close(self) -> None:
        """End the threads, and report the metrics of every save."""
        self.replica = None  # its areas are unmapped now, and no device has them registered any more
        self._copiers.shutdown()
        self._registers.shutdown()
        self._meter.close()
