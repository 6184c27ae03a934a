"""`AgentWriter`: a `Writer` whose work an agent does. The trainer's thread copies its state once, and goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Literal, Self

from ckptstore.agent.forms import Layout, labels_form, read_info
from ckptstore.agent.frames import Message
from ckptstore.agent.handing import Fill, FilledByOwner, HandingOver
from ckptstore.agent.inherited import Inherited
from ckptstore.agent.recipes import Recipe
from ckptstore.agent.replicating import AREAS, Replicated
from ckptstore.agent.starting import Started
from ckptstore.errors import CorruptionError, UsageError, WriterError
from ckptstore.formats.state import FlatState
from ckptstore.host import exiting
from ckptstore.host.caller_warnings import warn
from ckptstore.host.progress import Progress, Tally, told
from ckptstore.host.reentrance import refuse_within
from ckptstore.host.threads import run_all
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.log.refs import step_number
from ckptstore.write.filling import Filling
from ckptstore.write.layered import Begun, LayeredSave, Owner, checked_layers
from ckptstore.write.ledger import Labels, PendingSave
from ckptstore.write.snapshot import copy_jobs
from ckptstore.write.steps.updates import Updates

__all__ = ["AgentWriter"]


class AgentWriter(HandingOver):
    """A term of a store, kept by an agent, as `ckptstore.agent.writer` opens it. Use it in a ``with``.

    Its methods are those of `Writer`. Without ``with`` the interpreter's ordinary end does what leaving would.

    Attributes:
        url: the store's.
        term: the number of this term; another one after `rollback`, and after the agent had died.
        parent: the newest checkpoint when this writer was opened: load it before training; None for a new run.
        rank: which of the ranks this is that save one checkpoint together; None: this process alone saves.
        inherited: the state that the agent has kept of a trainer that died, which is `parent` or newer, until the first
            save; None: there is none. `load` takes it where it can. All ranks have that of one step, or none has one.
    """

    def attach(self, agent: Started, inherited: Inherited | None = None) -> None:
        """Go on with an agent that has answered."""
        self._agent = agent
        self.inherited = inherited
        self.parent = self._serve(agent.greeting)
        exiting.watch(self)

    # -- what is restored

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
                self.inherited = None
        if self.parent is None:
            return None
        return self._store.load(self.parent.ref, framework=framework, into=into, device=device, rank=self.rank)

    @property
    def step(self) -> int:
        """Optimizer steps done in what `load` gives; 0 for a new run."""
        if self.inherited is not None:
            return self.inherited.step
        return 0 if self.parent is None else self.parent.step

    @property
    def agent_pid(self) -> int:
        """The agent's process."""
        assert self._agent is not None  # `attach` comes first
        return self._agent.link.pid

    # -- saving

    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        progress: Progress | bool | None = None,
    ) -> CheckpointInfo:
        """See `Writer.save`. The state is copied first: it may change when this is interrupted."""
        refuse_within(self, _SAVING)
        flat = self._flattened(state)
        total = sum(source.nbytes for source in flat.tensors.values())
        pending = self._save(flat, step, Labels.of(metadata, tags), updates)
        info = pending.result()
        Tally(told(progress), total).advance(total)
        return info

    def save_async(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """See `Writer.save_async`. Waits while `max_in_flight` earlier saves are not durable, then copies.

        Raises:
            as `Writer.save_async`.
            AgentError: the agent had died, and no other can be started.
            AgentLostError: an earlier save was on its way when the agent died, and nobody has been told yet. It may or
                may not be in the store. The next call goes on.
        """
        refuse_within(self, _SAVING)
        return self._save(state, step, Labels.of(metadata, tags), updates)

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
        refuse_within(self, _SAVING)
        tensors, layout = self._laid_out
        if tensors is not flat.tensors:
            layout = Layout.of(flat.tensors)
            self._laid_out = flat.tensors, layout
        return self._save(flat, step, Labels.of(metadata, tags), None, FilledByOwner(fill, layout, began))

    def hold(
        self, flat: FlatState, step: int, *, metadata: Mapping[str, Any] | None = None, tags: str | Sequence[str] = ()
    ) -> None:
        """Hand a state over that the agent keeps in memory alone, until `Replicated.persist` has it written.

        Args:
            flat, step, metadata, tags: as for `save_filled`.

        Raises:
            AgentError, MemoryError, WriterError: it cannot.
        """
        refuse_within(self, _SAVING)
        labels = Labels.of(metadata, tags)
        self._failures.raise_unseen()
        agent = self._connected()
        lent = self._lending.lend(agent.link, Layout.of(flat.tensors))
        try:
            run_all(self._copiers, copy_jobs([(one, lent.place(name)) for name, one in flat.tensors.items()]))
            self.inherited = None  # its memory may be filled again from now on
            lent.save({"step": step, "tree": flat.tree, "persist": False, **labels_form(labels)}, lambda _: None)
        except BaseException:
            lent.give_back()
            raise

    def prepare_replica(self) -> None:
        """Say that `replicate` will come: the agent loads what it needs for that. Returns at once."""
        self._connected().link.ask("warm")

    def replicate(self, recipe: Recipe, areas: int = AREAS) -> Replicated:
        """Have the agent keep a replica of the state that was saved last: from now on it takes the steps itself.

        Args:
            recipe: whose steps, and what is sent beside them.
            areas: steps that may wait for the agent.

        Raises:
            AgentError: it cannot, or had died.
            MemoryError: there is no memory.
        """
        agent = self._connected()
        return Replicated.begun(agent.link, self._lending, recipe, areas, self._promised)

    def prepare(self, state: Any) -> None:
        """See `Writer.prepare`: the agent makes and touches its buffers. Returns at once."""
        agent = self._connected()
        flat = self._flattened(state)
        self._lending.prepare(agent.link, Layout.of(flat.tensors), 1 + self._options.max_in_flight)

    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool = False) -> LayeredSave:
        """See `Writer.begin`: the layers are copied to the agent's buffer. `direct` it cannot be."""
        refuse_within(self, _SAVING)
        if direct:
            raise UsageError("direct: an agent's writer copies into the agent's memory; leave it out")
        step = step_number(step)
        agent, flat = self._admit(state, step)
        try:
            checked_layers(flat, layers)
            lent = self._lend(agent, Layout.of(flat.tensors), step)
        except BaseException as error:
            self._saves.release(step, error)
            raise

        def give_up(error: BaseException | None = None) -> None:
            lent.give_back()
            self._saves.release(step, error)

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

        owner = Owner(hand_over, give_up, self._check_open)
        begun = LayeredSave(step, flat, layers, lent.snapshot(flat), self._copiers, owner)
        self._begun = Begun(begun)
        return begun

    # -- everything else

    def wait(self) -> None:
        """See `Writer.wait`."""
        self._call("wait")
        self._failures.raise_unseen()

    def poll(self) -> None:
        """See `Writer.poll`."""
        self._call("poll")

    def tag(self, name: str, ref: str | int | CheckpointInfo = "latest") -> CheckpointInfo:
        """See `Writer.tag`."""
        info = read_info(self._call("tag", name=name, ref=_text_of(ref))["info"])
        assert info is not None  # it has one
        return info

    def untag(self, name: str) -> None:
        """See `Writer.untag`."""
        self._call("untag", name=name)

    def rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """See `Writer.rollback`."""
        refuse_within(self, _SAVING)
        if ref is None:
            raise UsageError("rollback takes a checkpoint to go back to")
        self._call("wait")
        self._failures.raise_unseen()
        answer = self._call("rollback", ref=_text_of(ref))
        self.inherited = None
        self.parent = self._serve(answer)
        assert self.parent is not None  # it was gone back to
        return self.parent

    def _call(self, do: str, **fields: Any) -> dict[str, Any]:
        self._check_open()
        if self._begun is not None:
            self._begun.settle()
        self._beside.submit(lambda: None).result()  # what is being filled layer by layer is handed over first
        return self._connected().link.call(do, **fields)

    def close(self) -> None:
        """See `Writer.close`: the agent writes what waits, and ends.

        Of one of many ranks it may stay, for a while, where a state is in memory alone: until it knows which of these
        the other ranks have, whose trainers have not ended yet. Nobody waits for that here.
        """
        if self._process != os.getpid():
            return  # a fork: threads and connection are the parent's
        exiting.await_end(self, interrupted=self._interrupted)
        if self._begun is not None:
            self._begun.abandon()
        self._beside.shutdown()
        self._copiers.shutdown()
        self._meter.close()
        if self._agent is not None:
            if self._stays:
                self._agent.left()
            else:
                self._agent.gone()
        exiting.forget(self)
        self._failures.raise_unseen()

    def _end(self) -> Future[None]:
        """Take no save any more -> done when every earlier one is, and the term is closed (`host.exiting`, too)."""
        with self._lock:
            if self._ended is None:
                ended: Future[None] = Future()
                self._beside.submit(self._finish, ended)
                self._ended = ended
            return self._ended

    def _finish(self, ended: Future[None]) -> None:
        def answered(answer: Future[Message]) -> None:
            error = answer.exception()  # that the agent is lost its saves say
            if error is None:
                message = answer.result()
                self._stays = bool(message.body.get("stays"))
                message.close()
            elif isinstance(error, WriterError):
                self._over = error
            ended.set_result(None)

        if self._agent is None:
            ended.set_result(None)
            return
        try:
            # No thread of a pool waits for the answer: the interpreter, ending, would wait for it.
            self._agent.link.ask("close").add_done_callback(answered)
        except BaseException as error:  # noqa: BLE001  # whoever waits for the end need not
            ended.set_exception(error)

    def _unfinished(self) -> list[int]:
        """The steps that are on their way, ascending (`host.exiting`)."""
        return self._saves.pending()

    def _unseen(self) -> list[tuple[int, BaseException]]:
        """The steps that failed and nobody has asked for (`host.exiting`)."""
        return sorted(self._failures.take(), key=lambda one: one[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who ends a run wonders what it waits for.
        self._interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            self.close()
        except BaseException:
            if error is None:
                raise
            # The body's own error is on its way; a lost save must not hide it.


def _text_of(ref: str | int | CheckpointInfo) -> str:
    if isinstance(ref, CheckpointInfo):
        return ref.ref
    return ref if isinstance(ref, str) else str(step_number(ref))


_SAVING: Final = frozenset(
    method.__code__
    for method in (
        AgentWriter.save,
        AgentWriter.save_async,
        AgentWriter.save_filled,
        AgentWriter.hold,
        AgentWriter.begin,
    )
)
"""Calls that wait for others while they hold something that those may need."""
