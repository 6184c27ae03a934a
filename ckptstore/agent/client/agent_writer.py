"""`AgentWriter`: a `Writer` whose work an agent does. The trainer's thread copies its state once, and goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from ckptstore.agent.client.agent_launch import RunningAgent
from ckptstore.agent.client.agent_term import AgentTerm, Begin
from ckptstore.agent.client.inherited_state import Inherited
from ckptstore.agent.client.replica_client import AREAS, ReplicaClient
from ckptstore.agent.client.state_transfer import Fill, FilledByOwner, StateTransfer
from ckptstore.agent.protocol.message_fields import read_info
from ckptstore.agent.protocol.replica_recipe import Recipe
from ckptstore.errors import CorruptionError, UsageError
from ckptstore.formats.checkpoint_ref import text_of
from ckptstore.formats.state import FlatState
from ckptstore.host import interpreter_exit
from ckptstore.host.caller_warnings import warn, warns_last
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.signal_reentry import codes_of, refuse_within
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.write.layered import LayeredSave
from ckptstore.write.ledger import Labels, PendingSave
from ckptstore.write.options import WriterOptions
from ckptstore.write.steps.updates import Updates
from ckptstore.write.writer import Writer

__all__ = ["AgentWriter"]


class AgentWriter(Writer):
    """A term of a store, kept by an agent, as `ckptstore.agent.writer` opens it. Use it in a ``with``.

    `save_async` raises `AgentError` besides: the agent had died, and no other can be started; and `AgentLostError`: an
    earlier save was on its way when the agent died, which may or may not be in the store, and nobody has been told yet.
    The next call continues.

    Attributes:
        term: the number of this term; another one after `rollback`, and after the agent had died.
        rank: which of the ranks this is that save one checkpoint together; None: this process alone saves.
        inherited: the state that the agent has kept of a trainer that died, which is `parent` or newer, until the first
            save; None: there is none. `load` takes it where it can. All ranks have that of one step, or none has one.
    """

    takes_copies = True

    def __init__(self, store: Store, options: WriterOptions, begin: Begin, rank: int | None = None) -> None:
        """Use `ckptstore.agent.writer`, which calls `attach` as well.

        Args:
            begin: starts another agent where one has died.
            rank: which of the ranks this is that save together; None: this process alone saves.
        """
        self._store = store
        self._agent_term = AgentTerm(store.url, begin, rank)
        self._transfer = StateTransfer(self._agent_term, options)

    def attach(self, agent: RunningAgent, inherited: Inherited | None = None) -> None:
        """Go on with an agent that has answered."""
        self._agent_term.attach(agent, inherited)
        interpreter_exit.watch(self)

    def told(self, body: dict[str, Any]) -> None:
        """An event of the agent's; called by the thread that hears."""
        self._agent_term.told(body)

    def lost(self, error: BaseException) -> None:
        """The agent is gone; called by the thread that hears."""
        self._agent_term.lost(error)

    @property
    def url(self) -> str:
        """The store's."""
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
        """Which of the ranks this is; None: there are no others."""
        return self._agent_term.rank

    @property
    def inherited(self) -> Inherited | None:
        """The state that the agent has kept, until the first save."""
        return self._agent_term.inherited

    @property
    def agent_pid(self) -> int:
        """The agent's process."""
        return self._agent_term.agent.link.pid

    # -- what is restored

    @warns_last
    def load(self, *, framework: Literal["torch", "numpy"] | None = None, into: Any = None, device: Any = None) -> Any:
        """The state to go on from: what the agent has kept, or else `parent` from the store. None: a new run.

        What the agent has kept and is damaged is warned of, and `parent` taken in its place; of one rank of many it was
        checked already, when all of them agreed on it.

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
                    raise  # the other ranks go on from that step
                warn(f"{error}: going on from {self.parent and self.parent.ref}", UserWarning)
                self._agent_term.inherited = None
        if self.parent is None:
            return None
        return self._store.load(self.parent.ref, framework=framework, into=into, device=device, rank=self.rank)

    @property
    def step(self) -> int:
        """Optimizer steps done in what `load` gives; 0 for a new run."""
        if self.inherited is not None:
            return self.inherited.step
        return 0 if self.parent is None else self.parent.step

    # -- saving

    def _save(
        self, state: Any, step: int, labels: Labels, updates: Updates | None, progress: Progress | None
    ) -> CheckpointInfo:
        """See `Writer.save`. The state is copied first: it may change when this is interrupted."""
        flat = self._transfer.flattened(state)
        info = self._transfer.save(flat, step, labels, updates).result()
        Tally(progress, flat.nbytes).advance(flat.nbytes)
        return info

    def _save_async(self, state: Any, step: int, labels: Labels, updates: Updates | None) -> PendingSave:
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
        """`save_async` of a state that its owner copies, to where its segments will have it: without another copy.

        Args:
            flat: the state; the same dict of tensors says that they are of the same names, types and shapes as before.
            fill: copies it.
            step, metadata, tags: as for `save_async`.
            began: since when training has waited (``time.monotonic()``), for `on_metrics`.

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
        """Hand a state over that the agent keeps in memory alone, until `ReplicaClient.persist` has it written.

        Args:
            flat, step, metadata, tags: as for `save_filled`.

        Raises:
            AgentError, MemoryError, WriterError: it cannot.
        """
        refuse_within(self, self._WAIT)
        self._transfer.hold(flat, step, Labels.of(metadata, tags))

    def prepare_replica(self) -> None:
        """Say that `replicate` will come: the agent loads what it needs for that. Returns at once."""
        self._agent_term.connected().link.ask("warm")

    def replicate(self, recipe: Recipe, areas: int = AREAS) -> ReplicaClient:
        """Have the agent keep a replica of the state that was saved last: from now on it takes the steps itself.

        Args:
            recipe: whose steps, and what is sent beside them.
            areas: steps that may wait for the agent.

        Raises:
            AgentError: it cannot, or had died.
            MemoryError: there is no memory.
        """
        agent = self._agent_term.connected()
        return ReplicaClient.begun(agent.link, self._agent_term.buffers, recipe, areas, self._transfer.promise)

    def prepare(self, state: Any) -> None:
        """See `Writer.prepare`: the agent makes and touches its buffers. Returns at once."""
        self._transfer.prepare(state)

    def _begin_layers(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool) -> LayeredSave:
        """See `Writer.begin`: the layers are copied to the agent's buffer. `direct` it cannot be."""
        if direct:
            raise UsageError("direct: an agent's writer copies into the agent's memory; leave it out")
        return self._transfer.begin(state, step, layers)

    # -- everything else

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
        self._transfer.settle()
        self._agent_term.beside.submit(lambda: None).result()  # layers that are being copied are handed over first
        return self._agent_term.connected().link.call(do, **fields)

    @warns_last
    def close(self) -> None:
        """See `Writer.close`: the agent writes what waits, and ends.

        Of one of many ranks it may stay, for a while, where a state is in memory alone: until it knows which of these
        the other ranks have, whose trainers have not ended yet. Nobody waits for that here.
        """
        if self._agent_term.is_forked:
            return  # a fork: threads and connection are the parent's
        if self._interrupted or isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
            steps = self._unfinished()
            self._agent_term.give_up()  # one Ctrl-C is enough where nobody would answer
            if lost := [step for step in steps if step not in self._unfinished()]:
                interpreter_exit.interrupted(self, lost)
        interpreter_exit.await_end(self, interrupted=self._interrupted)
        self._transfer.abandon()
        self._agent_term.beside.shutdown()
        self._transfer.close()
        self._agent_term.gone()
        interpreter_exit.forget(self)
        self._agent_term.failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Take no more saves -> done when every earlier one is, and the term is closed."""
        return self._agent_term.end()

    def _unfinished(self) -> list[int]:
        """The steps that are on their way, ascending (`host.interpreter_exit`)."""
        return self._agent_term.saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps that failed and nobody has asked for (`host.interpreter_exit`)."""
        return sorted(self._agent_term.failures.take(), key=lambda one: one[0])

    def _settle(self) -> None:
        """The agent does that by itself."""


AgentWriter._WAIT = Writer._WAIT | codes_of(AgentWriter.save_filled, AgentWriter.hold)
