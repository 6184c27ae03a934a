"""The open term of an `AgentWriter`: its agent, a new agent when that dies, and the events that the agent sends.

This knows the result of each save that an agent has; `state_transfer` brings states to the agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from ckptstore.agent.client.agent_launch import RunningAgent
from ckptstore.agent.client.agent_save import AgentSave
from ckptstore.agent.client.buffer_client import BufferClient
from ckptstore.agent.client.inherited_state import Inherited
from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import read_error, read_info, read_warning
from ckptstore.errors import (
    AgentError,
    AgentLostError,
    AgentSilentError,
    CommitUnknownError,
    FencedError,
    StoreReplacedError,
    UnmadeStateError,
    WriterClosedError,
    WriterError,
)
from ckptstore.host import interpreter_exit
from ckptstore.host.caller_warnings import warn
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.saves.ledger import Failures, Labels, PendingSave, Saves

__all__ = ["AgentRestartWarning", "AgentTerm", "Begin"]

Begin = Callable[[int, Callable[[dict[str, Any]], None], Callable[[BaseException], None]], RunningAgent]
"""Starts another agent when one died. Arguments: the term that must be the newest, callbacks for events and loss."""


class AgentRestartWarning(UserWarning):
    """The agent died. Another one was started; its first checkpoint is a full."""


class AgentTerm:
    """The term that an agent writes for this process; another one after `rollback`, and after an agent died.

    Attributes:
        url, term, parent, rank, inherited: see `AgentWriter`.
        saves: the steps of the term.
        failures: failures that no call has raised yet, in this term and in those before.
        buffers: the agent's buffers.
        beside: a thread for calls that wait.
    """

    def __init__(self, url: str, begin: Begin, rank: int | None) -> None:
        """Begin without an agent and a term; `attach` sets them."""
        self.url = url
        self.term = -1
        self.parent: CheckpointInfo | None = None
        self.rank = rank
        self.inherited: Inherited | None = None
        self.failures = Failures()
        self.saves = Saves(-1, None, self.failures)
        self.buffers = BufferClient()
        self.beside = started_pool(1, "ckptstore-agent-beside")
        self._begin = begin
        self._agent: RunningAgent | None = None
        self._over: WriterError | None = None
        self._jobs: dict[int, AgentSave] = {}
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ended: Future[None] | None = None
        self._stays = False  # the agent stays, and waits for the agents of other ranks

    # -- the agent

    def attach(self, agent: RunningAgent, inherited: Inherited | None) -> None:
        """Use an agent that has answered, and the state that it kept."""
        self._agent = agent
        agent.link.quiet, agent.link.late = self.silent, self.buffers.late
        self.inherited = inherited
        self.parent = self._serve(agent.greeting)

    def go_back(self, answer: Mapping[str, Any]) -> CheckpointInfo:
        """Continue in the term that the agent has opened at an earlier checkpoint -> that checkpoint."""
        self.inherited = None
        self.parent = self._serve(answer)
        assert self.parent is not None  # the checkpoint that `rollback` named
        return self.parent

    def _serve(self, greeting: Mapping[str, Any]) -> CheckpointInfo | None:
        latest = read_info(greeting["latest"])
        self.term = greeting["term"]
        self.saves = Saves(self.term, latest, self.failures)
        return latest

    @property
    def agent(self) -> RunningAgent:
        """The agent that answered last, dead or alive."""
        assert self._agent is not None  # `attach` comes first
        return self._agent

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked process: threads and connection are its parent's."""
        return self._process != os.getpid()

    def connected(self) -> RunningAgent:
        """Return the agent. If it died, start another one, with a new term that begins with a full.

        Raises:
            WriterClosedError: the writer is closed, or the agent of one of many ranks died.
            AgentError: no other agent can be started.
            FencedError, StoreReplacedError: another writer has opened a term, or another store is there.
        """
        self.check_open()
        agent = self.agent
        if agent.link.lost is None:
            return agent
        if self.rank is not None:
            self._over = WriterClosedError(
                f"term {self.term} is over on every rank, because {agent.link.lost}: open another writer on all of "
                "them, as when training is started again"
            )
            raise self._over
        agent.await_exit()
        try:
            following = self._begin(self.term, self.told, self.lost)
        except (FencedError, StoreReplacedError) as error:
            self._over = error
            raise
        lost, before = agent.link.lost, self.term
        self._agent = agent = following
        agent.link.quiet, agent.link.late = self.silent, self.buffers.late
        self.inherited = None
        self._serve(following.greeting)
        told = "".join(f"; {text}" for _, text in following.warnings())
        warn(
            f"{self.url}: {lost}; term {before} is over, and an agent continues with term {self.term} and a full{told}",
            AgentRestartWarning,
        )
        return agent

    def check_open(self) -> None:
        """Raise what ended the term, or `WriterClosedError` if the writer is closed or this is a fork."""
        if self.is_forked:
            raise WriterClosedError(
                f"the writer of term {self.term} belongs to process {self._process}, not to its fork"
            )
        if self._over is not None:
            raise self._over
        if self._ended is not None:
            why = (
                f" because the interpreter is ending: {interpreter_exit.ADVICE}" if interpreter_exit.under_way() else ""
            )
            raise WriterClosedError(f"the writer of term {self.term} is closed{why}")

    # -- saves that the agent has

    def begin_save(self, step: int | None, labels: Labels) -> AgentSave:
        """Begin a save of a step that no other save may have. Raises `StepOrderError`."""
        self.saves.check(step)
        return AgentSave(self.saves, self.saves.take(step), labels, self._cancel)

    def expect(self, save: AgentSave) -> Callable[[BaseException], None]:
        """Expect an event with the result of a save -> a callback for the agent's refusal of the save."""
        self._jobs[save.step] = save
        return partial(self._failed, save.step)

    def forget(self, save: AgentSave) -> None:
        """Expect no event: the agent was not given the save."""
        self._jobs.pop(save.step, None)

    def pending(self, save: AgentSave) -> PendingSave:
        """The `PendingSave` for the caller."""
        return save.pending(partial(self._hurry, save.step), None)

    def _hurry(self, step: int) -> None:
        with contextlib.suppress(AgentError, RuntimeError):  # a loss is reported where the save is awaited
            self.beside.submit(self._ask_quietly, "hurry", step)

    def _ask_quietly(self, do: str, step: int) -> bool:
        agent = self._agent
        try:
            return bool(agent is not None and agent.link.call(do, step=step).get("cancelled"))
        except AgentError:
            return False

    def check_may_wait(self) -> None:
        """Raise `UsageError` in the thread that receives the answers (`AgentLink.check_may_wait`).

        Prevents: a call that waits for the thread beside it, which waits for an answer that nobody receives meanwhile.
        """
        if self._agent is not None:
            self._agent.link.check_may_wait()

    def _cancel(self, step: int) -> bool:
        self.check_may_wait()
        with contextlib.suppress(RuntimeError):  # closed: it was handed over
            self.beside.submit(lambda: None).result()  # the agent knows the step once it is handed over
        return self._ask_quietly("cancel", step)

    # -- events

    def told(self, body: dict[str, Any]) -> None:
        """Handle an event of the agent. The thread that receives calls this."""
        step = body.get("step", -1)
        if body.get("event") == "saved":
            save = self._jobs.pop(step, None)
            info = read_info(body["info"])
            if save is not None and info is not None and not save.done.done() and save.take():
                save.done.set_result(info)
        elif body.get("event") == "failed":
            self._failed(step, read_error(body["error"]))
        elif body.get("event") == "warning":
            category, text = read_warning(body["warning"])
            warn(text, category)

    def _failed(self, step: int, error: BaseException) -> None:
        save = self._jobs.pop(step, None)
        if isinstance(error, FencedError | CommitUnknownError | StoreReplacedError):
            self._over = error
        if save is None:
            return
        if isinstance(error, CancelledError | UnmadeStateError):  # asked for, or training continues without it
            save.give_up(error)
            return
        if isinstance(error, AgentLostError):
            error = AgentLostError(f"step {step} may or may not be in the store: {error}")
        elif isinstance(error, AgentSilentError):
            error = AgentSilentError(f"step {step} may or may not be in the store: {error}")
        save.fail(error)

    def lost(self, error: BaseException) -> None:
        """The agent is gone: all pending saves fail. The thread that receives calls this."""
        self.buffers.forget()
        for step in sorted(self._jobs.copy()):
            self._failed(step, error)

    def silent(self, error: AgentSilentError) -> None:
        """The agent has been stopped for too long: all pending saves fail."""
        for step in sorted(self._jobs.copy()):
            self._failed(step, error)

    def give_up(self) -> None:
        """Ctrl-C: requests to a stopped agent fail now."""
        if self._agent is not None:
            self._agent.link.give_up()

    # -- the end

    def end(self) -> Future[None]:
        """Accept no more saves -> done when every earlier save is, and the term is closed."""
        with self._lock:
            if self._ended is None:
                ended: Future[None] = Future()
                self.beside.submit(self._finish, ended)
                self._ended = ended
            return self._ended

    def _finish(self, ended: Future[None]) -> None:
        def answered(answer: Future[Message]) -> None:
            error = answer.exception()  # if the agent is lost, its saves report that
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
            # No pool thread waits for the answer: the ending interpreter would wait for that thread.
            self._agent.link.ask("close").add_done_callback(answered)
        except BaseException as error:  # noqa: BLE001  # `ended` carries it
            ended.set_exception(error)

    def gone(self) -> None:
        """Wait a while until the agent has ended; not for one that waits for agents of other ranks."""
        if self._agent is not None:
            if self._stays:
                self._agent.let_go()
            else:
                self._agent.await_exit()
