"""`AgentWriter`: a `Writer` whose work an agent does. The training thread only copies its state once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from ckptstore.agent.client.agent_launch import RunningAgent
from ckptstore.agent.client.agent_term import AgentTerm, Begin
from ckptstore.agent.client.buffer_client import BorrowedBuffer
from ckptstore.agent.client.inherited_state import Inherited
from ckptstore.agent.client.replica_client import AREAS, ReplicaClient
from ckptstore.agent.client.state_transfer import Fill, FilledByOwner, StateTransfer
from ckptstore.agent.protocol.message_fields import read_info
from ckptstore.agent.protocol.replica_recipe import Recipe
from ckptstore.errors import CorruptionError, UsageError
from ckptstore.formats.history.checkpoint_ref import text_of
from ckptstore.formats.states.state import FlatState
from ckptstore.host import interpreter_exit
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import warn, warns_last
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.signal_reentry import codes_of, refuse_within
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.write.capture.layerwise_save import LayeredSave
from ckptstore.write.saves.ledger import Labels, PendingSave
from ckptstore.write.steps.updates import Updates
from ckptstore.write.writer import Writer
from ckptstore.write.writer_options import WriterOptions

__all__ = ["AgentWriter"]


class AgentWriter(Writer):
    """A term of a store that an agent writes, as `ckptstore.agent.writer` opens it. Use it in a ``with``.

    `save_async` also raises `AgentError` (the agent died, and no other can be started) and `AgentLostError` (the agent
    died during an earlier save, which may or may not be in the store, and no call has raised that yet). The next call
    works again.

    Attributes:
        term: the number of this term. It changes with `rollback`, and when another agent replaces a dead one.
        rank: the rank of this process, if several save one checkpoint together; None: this process saves alone.
        inherited: the state that the agent kept of a trainer that died: `parent`, or newer. None: there is none, or a
            save was made. `load` returns it. Either all ranks have the state of one step, or no rank has one.
    """

    takes_copies = True

    def __init__(self, store: Store, options: WriterOptions, begin: Begin, rank: int | None = None) -> None:
        """Use `ckptstore.agent.writer`, which calls `attach` as well.

        Args:
            begin: starts another agent when one has died.
            rank: see `AgentWriter`.
        """
        self._store = store
        self._agent_term = AgentTerm(store.url, begin, rank)
        self._transfer = StateTransfer(self._agent_term, options)

    def attach(self, agent: RunningAgent, inherited: Inherited | None = None) -> None:
        """Use an agent that has answered."""
        self._agent_term.attach(agent, inherited)
        interpreter_exit.watch(self)

    def told(self, body: dict[str, Any]) -> None:
        """Handle an event of the agent. The thread that receives calls this."""
        self._agent_term.told(body)

    def lost(self, error: BaseException) -> None:
        """The agent is gone. The thread that receives calls this."""
        self._agent_term.lost(error)

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._agent_term.url

    @property
    def term(self) -> int:
        """The number of this term."""
        return self._agent_term.term

    @property
    def parent(self) -> CheckpointInfo | None:
        """The newest checkpoint when this writer was opened."""
        return self._agent_term.parent

    @property
    def rank(self) -> int | None:
        """The rank of this process; None: it saves alone."""
        return self._agent_term.rank

    @property
    def inherited(self) -> Inherited | None:
        """The state that the agent kept of an earlier trainer, until the first save."""
        return self._agent_term.inherited

    @property
    def agent_pid(self) -> int:
        """The agent's process id."""
        return self._agent_term.agent.link.pid

    # -- restore

    @warns_last
    def load(self, *, framework: Literal["torch", "numpy"] | None = None, into: Any = None, device: Any = None) -> Any:
        """Load the state to continue from: the one that the agent kept, or `parent` from the store. None: a new run.

        If the state that the agent kept is damaged, this warns and loads `parent`. With several ranks it was checked
        before, when they agreed on it.

        Args:
            framework, into, device: as for `Store.load`.

        Raises:
            as `Store.load`.
        """
        if self.inherited is not None:
            try:
                return self.inherited.load(framework=framework, into=into, device=device)
            except CorruptionError as error:
                if self.rank is not None:
                    raise  # the other ranks continue from that step
                warn(f"{error}: continuing from {self.parent and self.parent.ref}", UserWarning)
                self._agent_term.inherited = None
        if self.parent is None:
            return None
        return self._store.load(self.parent.ref, framework=framework, into=into, device=device, rank=self.rank)

    @property
    def step(self) -> int:
        """Optimizer steps done in the state that `load` returns; 0 for a new run."""
        if self.inherited is not None:
            return self.inherited.step
        return 0 if self.parent is None else self.parent.step

    # -- saving

    def _check_open(self) -> None:
        self._agent_term.check_open()

    def _save(
        self, state: Any, step: int | None, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `Writer.save`. The state is copied first, so it may change if this is interrupted."""
        flat = self._transfer.flattened(state)
        info = self._transfer.save(flat, step, labels, updates).result()
        Tally(progress, flat.nbytes).advance(flat.nbytes)
        return info

    def _save_async(self, state: Any, step: int | None, labels: Labels, updates: Updates | None) -> PendingSave:
        """See `Writer.save_async`. Waits while `max_in_flight` earlier saves are not durable, then copies."""
        return self._transfer.save(state, step, labels, updates)

    @warns_last
    def save_filled(
        self,
        flat: FlatState,
        step: int,
        fill: Fill,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        began: float | None = None,
    ) -> PendingSave:
        """As `save_async`, of a state that the caller copies itself, straight to the agent's buffer.

        Args:
            flat: the state. The same dict of tensors as before means the same names, dtypes and shapes.
            fill: copies the state.
            step, metadata, tags: as for `save_async`.
            began: when training began to wait (``time.monotonic()``), for `on_metrics`; None: now.

        Raises:
            as `save_async`, and what `fill` raises.
        """
        refuse_within(self, self._WAIT)
        layout = self._transfer.layout_of(flat)
        return self._transfer.save(flat, step, Labels.of(metadata, tags), None, FilledByOwner(fill, layout, began))

    @warns_last
    def hold(
        self, flat: FlatState, step: int, *, metadata: Mapping[str, Any] | None = None, tags: str | Sequence[str] = ()
    ) -> None:
        """Give the agent a state that it keeps only in memory until `ReplicaClient.persist`.

        Args:
            flat, step, metadata, tags: as for `save_filled`.

        Raises:
            AgentError, MemoryError, WriterError: the agent cannot take it.
        """
        refuse_within(self, self._WAIT)
        self._transfer.hold(flat, step, Labels.of(metadata, tags))

    def prepare_replica(self) -> None:
        """Announce `replicate`, so that the agent loads what it needs. Returns at once."""
        self._agent_term.connected().link.ask("warm")

    def replicate(self, recipe: Recipe, areas: int = AREAS) -> ReplicaClient:
        """Make the agent keep a replica of the state saved last: from now on it repeats the optimizers' steps itself.

        Args:
            recipe: which steps it repeats, and which tensors are sent.
            areas: how many steps may wait for the agent.

        Raises:
            AgentError: the agent cannot, or died.
            MemoryError: there is not enough memory.
        """
        self._transfer.handed_over()
        agent, transfer = self._agent_term.connected(), self._transfer
        replica = ReplicaClient.begun(
            agent.link, self._agent_term.buffers, recipe, areas, (transfer.promise, transfer.in_turn), transfer.replica
        )
        self._transfer.replica = replica
        return replica

    def lend_beside(self, nbytes: int) -> BorrowedBuffer:
        """A buffer for tensors that a step sends whole (`WholeTensors`).

        Raises:
            AgentError: the agent lends no more, or died.
            MemoryError: there is not enough memory.
        """
        return self._agent_term.buffers.lend_beside(self._agent_term.connected().link, nbytes)

    def register(self, memory: Bytes, device: Any) -> None:
        """Register memory of the agent with a device, in the background, so that copies to it are only queued."""
        self._transfer.register(memory, device)

    def prepare(self, state: Any) -> None:
        """See `Writer.prepare`: the agent allocates and touches its buffers. Returns at once."""
        self._transfer.prepare(state)

    def _begin_layers(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool) -> LayeredSave:
        """See `Writer.begin`: the layers are copied to the agent's buffer. `direct` is not available."""
        if direct:
            raise UsageError("direct: an agent's writer copies into the agent's memory; leave it out")
        return self._transfer.begin(state, step, layers)

    # -- tags, rollback, waiting

    @property
    def _needs_caller(self) -> bool:
        return False

    def _wait(self) -> None:
        """See `Writer.wait`."""
        self._call("wait")
        self._agent_term.failures.raise_unseen()

    def _poll(self) -> None:
        """See `Writer.poll`."""
        self._call("poll")

    def _tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `Writer.tag`."""
        info = read_info(self._call("tag", name=name, ref=ref)["info"])
        assert info is not None  # it has one
        return info

    def _untag(self, name: str) -> None:
        """See `Writer.untag`."""
        self._call("untag", name=name)

    def _rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `Writer.rollback`."""
        self._call("wait")
        self._agent_term.failures.raise_unseen()
        return self._agent_term.go_back(self._call("rollback", ref=text_of(ref)))

    def _call(self, do: str, **fields: Any) -> dict[str, Any]:
        self._agent_term.check_open()
        self._agent_term.check_may_wait()
        self._transfer.settle()
        self._agent_term.beside.submit(lambda: None).result()  # layers that are being copied are handed over first
        return self._agent_term.connected().link.call(do, **fields)

    @warns_last
    def close(self) -> None:
        """See `Writer.close`: the agent writes pending saves and ends.

        With many ranks the agent may stay for a while if it has a state only in memory: it waits until it knows which
        of these states the ranks have whose trainers still run. This call does not wait for that.
        """
        if self._agent_term.is_forked:
            return  # a fork: threads and connection are the parent's
        if self._interrupted or isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
            steps = self._unfinished()
            self._agent_term.give_up()  # one Ctrl-C is enough if the agent is stopped
            if lost := [step for step in steps if step not in self._unfinished()]:
                interpreter_exit.interrupted(self, lost)
        interpreter_exit.await_end(self, interrupted=self._interrupted)
        self._transfer.abandon()
        self._agent_term.beside.shutdown()
        self._transfer.close()
        self._agent_term.gone()
        self._agent_term.buffers.forget()
        interpreter_exit.forget(self)
        self._agent_term.failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Accept no more saves -> done when every earlier save is, and the term is closed."""
        return self._agent_term.end()

    def _unfinished(self) -> list[int]:
        """The steps that are pending, ascending (`host.interpreter_exit`)."""
        return self._agent_term.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps that failed and that no call has raised yet (`host.interpreter_exit`)."""
        return sorted(self._agent_term.failures.take(), key=lambda one: one[0])

    def _settle(self) -> None:
        """Nothing to do: the agent handles SIGTERM itself."""


AgentWriter._WAIT = Writer._WAIT | codes_of(AgentWriter.save_filled, AgentWriter.hold)
