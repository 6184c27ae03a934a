"""Saves the states of one rank: runs the rank's writer in a thread, and agrees with the other ranks' agents.

Every trainer process has its own agent. The agents exchange messages through a mailbox that rank 0's agent serves, so
that trainers may die. Rank 0's agent commits. If the agent of a rank dies, all agents end and tell their trainers: a
term of many ranks cannot continue without one of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self

from ckptstore.agent.protocol.agent_address import AgentAddress
from ckptstore.agent.protocol.rank_job import MAILBOX_ENDING, RankJob, place_name
from ckptstore.agent.server.agent_snapshot import ALONE, DURABLE, Durability
from ckptstore.agent.server.shutdown_wait import ShutdownWait, shutdown_wait_of
from ckptstore.agent.server.socket_mailbox import RemoteMailbox, ServedMailbox
from ckptstore.errors import (
    AgentLostError,
    CkptError,
    CommitUnknownError,
    MailboxError,
    MissingRankError,
    UnmadeStateError,
)
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.ranks.messages.key_value_store import Group, fetch, post
from ckptstore.write.ranks.messages.rank_messages import pack, unpack
from ckptstore.write.ranks.rank_writer import RankWriter
from ckptstore.write.ranks.rank_writer_factory import open_rank_writer
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.stage import Copies
from ckptstore.write.steps.updates import Update
from ckptstore.write.writer_options import WriterOptions

__all__ = ["RankSaves"]

_FAREWELL: Final = 10.0
"""Seconds that rank 0's agent waits for the others to close, before it closes the mailbox."""
_LAST_WORD: Final = 5.0
"""Least seconds for the second message of `agreed`: every agent is about to send it."""
_PAUSE: Final = 0.01


class RankSaves:
    """The writer of a rank, for a keeper that must not wait for other ranks (`rank_keeper`).

    Attributes:
        writer: the rank's writer. Call `drain` before a call that depends on states given earlier.
        shutdown_wait: how long to wait for the other agents once no more states come.
        last: the highest step given.
    """

    def __init__(
        self, writer: RankWriter, mailbox: ServedMailbox | RemoteMailbox, group: Group, *, shutdown_wait: ShutdownWait
    ) -> None:
        """
        Args:
            group: the group of the agents.
        """
        self.writer = writer
        self._mailbox = mailbox
        self._group = group
        self.shutdown_wait = shutdown_wait
        self.last = -1
        # A save may wait for other ranks; the thread that serves the trainer must not.
        self._thread = started_pool(1, "ckptstore-agent-rank")

    @classmethod
    def opened(
        cls,
        store: Store,
        parent: Any,
        options: WriterOptions,
        job: RankJob,
        environment: Mapping[str, Any],
        lost: Callable[[str], None],
        alive: Callable[[], bool],
        shutdown_wait: ShutdownWait | None = None,
    ) -> Self:
        """Connect to the other ranks' agents, and open the term with them.

        Args:
            parent: as for `Store.writer`; the value of rank 0 counts.
            lost: called by a thread with the reason, if an agent is lost.
            alive: whether the trainer still wants the term; otherwise no term begins.
            shutdown_wait: see `__init__`; None: `shutdown_wait_of` without a successor.

        Raises:
            as `open_rank_writer`; `AgentLostError`, `MailboxError`: another agent is gone.
        """
        mailbox: ServedMailbox | RemoteMailbox
        checks: list[Callable[[], None]] = [lambda: _check_trainer(alive)]

        def ended() -> None:
            for check in checks:
                check()

        if job.listener is not None:
            mailbox = served = ServedMailbox(socket.socket(fileno=job.listener), job.token, job.size, lost)
            checks.append(served.check)
            group = Group(0, job.size, served.box, ended)
        else:
            place = AgentAddress(job.url, place_name(job.name, 0))
            connection = place.connect(MAILBOX_ENDING)
            place.close()
            if connection is None:
                raise AgentLostError("the agent of rank 0 is gone: its mailbox is not there")
            mailbox = remote = RemoteMailbox(connection, job.token, job.rank, lost)
            group = Group(job.rank, job.size, remote, ended)
        writer = open_rank_writer(store.journal, parent, group, options, job.options, environment=environment)
        del checks[0]  # from here on, states given are written even if the trainer is gone
        if shutdown_wait is None:
            shutdown_wait = shutdown_wait_of(job.options.timeout)
        return cls(writer, mailbox, group, shutdown_wait=shutdown_wait)

    def adopt(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
    ) -> PendingSave:
        """Save a state in a buffer, as `LocalWriter.adopt` does. Errors come from the result."""
        done: Future[CheckpointInfo] = Future()
        begun: list[PendingSave] = []
        wanted = threading.Event()
        late = threading.Event()

        def land() -> None:
            # Prevents: a trainer gets the place of a failed step before it is told of the failure.
            if begun and begun[0].done() and not done.done():
                late.set()  # `ended` does
            else:
                snapshot.land()

        given = Copies(Snapshot(snapshot.flat, land, snapshot.free), updates, gradients)

        def hand_over() -> None:
            try:
                pending = self.writer.take_over(given, step, metadata=metadata, tags=tags)
            except BaseException as error:  # noqa: BLE001  # the result raises it
                done.set_exception(_translated(error))
                given.let_go()
                snapshot.land()
                return
            begun.append(pending)
            if wanted.is_set():
                pending.hurry()
            pending.when_done(lambda _: ended(pending))

        def ended(pending: PendingSave) -> None:
            if (error := pending.exception()) is None:
                done.set_result(pending.result())
            else:
                done.set_exception(_translated(error))
            if late.is_set():
                snapshot.land()

        def hurry() -> None:
            wanted.set()  # of two calls at once, at least one sees what the other has set
            for pending in begun:
                pending.hurry()

        self.last = max(self.last, step)
        self._thread.submit(hand_over)
        return PendingSave(step, done, lambda: None, hurry)

    def forgo(self, step: int, why: BaseException) -> None:
        """This agent has no state of a step that other ranks may save: the step fails at once, on all ranks."""

        def say() -> None:
            with contextlib.suppress(CkptError, RuntimeError):  # a finished writer raises in the next call
                self.writer.forgo(step, UnmadeStateError(str(why)))

        self.last = max(self.last, step)
        self._thread.submit(say)

    def conclude(self) -> None:
        """The trainer is gone: tell the other ranks, so that they do not wait for more steps of this one."""
        self.writer.conclude(self.last)

    def agreed(
        self, held: Mapping[int, Durability], *, waits: bool, held_up: Callable[[], None]
    ) -> tuple[int, bool] | None:
        """Agree on the newest step whose state all agents hold, once no trainer gives more. All ranks get the same.

        1. Each agent posts ``held/<rank>``: the steps that it holds, and whether they are durable.
        2. If the newest common step is to be written, each agent announces that step, and posts ``ready``.

        Args:
            held: the steps held here, whose saves have ended.
            waits: wait for the other agents. False: only tell them.
            held_up: called once if the wait takes so long that the trainer should not wait.

        Returns:
            the step, and whether all ranks have to write it now. None: there is no common step, or `waits` is False.

        Raises:
            MissingRankError: another trainer still runs, or its agent does not answer.
            AgentLostError, MailboxError: another agent is gone.
        """
        self.shutdown_wait.held_up = held_up
        keys = self._say("held", pack(sorted(held.items())))
        if not waits:
            return None
        every = [dict(unpack(letter, "held")) for letter in self._letters(keys)]
        self.shutdown_wait.held_up = None  # all have answered: the rest takes no longer than a write
        common = set(held).intersection(*every)
        if not common:
            return None
        durability = {step: {one[step] for one in every} for step in common}
        # A step that failed on one rank is not a checkpoint on any; the state before it may become one.
        of_use = [step for step in common if DURABLE in durability[step] or durability[step] == {ALONE}]
        step = max(of_use or common)
        if durability[step] != {ALONE}:
            return step, False
        self.last = max(self.last, step)
        self.conclude()
        try:
            self._letters(self._say("ready", pack(step)), _LAST_WORD)
        except CkptError:
            # Prevents: another rank, which has every answer, waits for this rank's part.
            self.writer.conclude(step - 1)
            raise
        return step, True

    def _say(self, what: str, letter: bytes) -> list[str]:
        """Post this rank's message -> the keys of all ranks' messages."""
        keys = [f"ckptstore/{what}/{self.writer.term}/{rank}" for rank in range(self._group.size)]
        post(self._group.mailbox, keys[self._group.rank], letter)
        return keys

    def _letters(self, keys: list[str], at_least: float = 0.0) -> list[bytes]:
        """Wait for the messages of all ranks, at least `at_least` seconds."""
        box = self._group.mailbox
        if not self.shutdown_wait.wait(lambda: box.has(keys), self._group.ended, at_least=at_least):
            missing = [str(rank) for rank, key in enumerate(keys) if not box.has([key])]
            raise MissingRankError(
                f"rank {', '.join(missing[:8])} has not ended, or its agent has not said so, in time"
            )
        return [fetch(box, key) or b"" for key in keys]

    def drain(self) -> None:
        """Return when the writer has every state given so far."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """See `RankWriter.close`."""
        self.conclude()
        self._thread.shutdown()
        self.writer.close()

    def leave(self, *, farewell: bool) -> None:
        """Disconnect from the other agents, after `close`.

        Args:
            farewell: the trainer has closed its writer. False: the other agents end, too.
        """
        if isinstance(self._mailbox, RemoteMailbox):
            self._mailbox.close(farewell=farewell)
            return
        until = time.monotonic() + _FAREWELL
        while farewell and self._mailbox.here and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._mailbox.close()


def _check_trainer(alive: Callable[[], bool]) -> None:
    """Prevents: an agent without a trainer waits minutes for other ranks, and keeps its rank's address locked."""
    if not alive():
        raise AgentLostError("the trainer ended, or the agent was told to, while the agent was beginning")


def _translated(error: BaseException) -> BaseException:
    """Translate an error: between agents, a lost mailbox means a lost agent.

    A commit that is in doubt for another reason (rank 0's slot was sent and the medium did not answer) stays as it is.
    All agents live then, and the trainers have to learn that their writers are finished.
    """
    gone = error.__cause__ if isinstance(error, CommitUnknownError) else error
    return AgentLostError(str(error)) if isinstance(gone, MailboxError) else error
