"""The agent of one rank of many: it writes its rank's part of each step, and the agents' mailbox brings them together.

Every trainer process has an agent of its own. Rank 0's commits, and has the mailbox, so that trainers may die. When the
agent of a rank dies, all of them end, and tell their trainers: a term of many ranks cannot go on without one of them.
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
from ckptstore.write.ledger import PendingSave
from ckptstore.write.options import WriterOptions
from ckptstore.write.ranks.mailbox import Group, fetch, post
from ckptstore.write.ranks.opening import open_rank_writer
from ckptstore.write.ranks.parts import pack, unpack
from ckptstore.write.ranks.saving import Adopted
from ckptstore.write.ranks.writer import RankWriter
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.updates import Update

__all__ = ["RankSaves"]

_FAREWELL: Final = 10.0
"""Seconds that rank 0's agent, closing, waits for the others to close."""
_LAST_WORD: Final = 5.0
"""Seconds at least for the second letter of `agreed`: all agents are at work on it."""
_PAUSE: Final = 0.01


class RankSaves:
    """A rank's writer, for who keeps states and waits for nothing (`rank_keeper`).

    Attributes:
        writer: it. `drain` before a call that is about the states that were given.
        shutdown_wait: how long it waits for the other agents when it is given no more.
        last: the highest step that was given.
    """

    def __init__(
        self, writer: RankWriter, mailbox: ServedMailbox | RemoteMailbox, group: Group, *, shutdown_wait: ShutdownWait
    ) -> None:
        """
        Args:
            group: of the agents.
        """
        self.writer = writer
        self._mailbox = mailbox
        self._group = group
        self.shutdown_wait = shutdown_wait
        self.last = -1
        # Who agrees with other ranks waits for them; the agent's trainer must not.
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
        """Meet the other ranks' agents, and open the term with them.

        Args:
            parent: as for `Store.writer`; rank 0's counts.
            lost: is told why the agents are not complete any more, by a thread.
            alive: whether somebody is there who wants the term: else none is begun.
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
        del checks[0]  # from here on what a trainer has given is written, also when it is gone
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
        """See `Writer.adopt`; what that raises comes from the result."""
        done: Future[CheckpointInfo] = Future()
        begun: list[PendingSave] = []
        wanted = threading.Event()
        late = threading.Event()

        def land() -> None:
            # Prevents: a trainer that is lent the place of a step that failed before it is told so.
            if begun and begun[0].done() and not done.done():
                late.set()  # `ended` does
            else:
                snapshot.land()

        given = Adopted(Snapshot(snapshot.flat, land, snapshot.free), gradients)

        def hand_over() -> None:
            try:
                pending = self.writer.take_over(given, step, metadata=metadata, tags=tags, updates=updates)
            except BaseException as error:  # noqa: BLE001  # whoever waits for the step is told
                done.set_exception(_told(error))
                given.give_back()
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
                done.set_exception(_told(error))
            if late.is_set():
                snapshot.land()

        def hurry() -> None:
            wanted.set()  # of two that come at once, at least one sees what the other has set
            for pending in begun:
                pending.hurry()

        self.last = max(self.last, step)
        self._thread.submit(hand_over)
        return PendingSave(step, done, lambda: None, hurry)

    def forgo(self, step: int, why: BaseException) -> None:
        """A step that the other ranks may be given has no state here: it fails at once, on all of them."""

        def say() -> None:
            with contextlib.suppress(CkptError, RuntimeError):  # a writer that is over says so to whoever asks next
                self.writer.forgo(step, UnmadeStateError(str(why)))

        self.last = max(self.last, step)
        self._thread.submit(say)

    def conclude(self) -> None:
        """The trainer is gone: say so to the other ranks, which need not wait for more of this one."""
        self.writer.conclude(self.last)

    def agreed(
        self, held: Mapping[int, Durability], *, waits: bool, held_up: Callable[[], None]
    ) -> tuple[int, bool] | None:
        """The newest step whose state the agents of all ranks hold, once no trainer gives more; the same on each.

        1. Each posts ``held/<rank>``: what it holds, and what became of that.
        2. Where the newest that all hold is to be written, each says that it will give that step, and posts ``ready``.

        Args:
            held: the steps that are here, whose saves have ended.
            waits: wait for the others; else they are only told.
            held_up: called once if others let this agent wait so long that its own trainer need not.

        Returns:
            the step, and whether all ranks are to write it now; None: there is none, or nothing was waited for.

        Raises:
            MissingRankError: another trainer is not gone, or its agent says nothing.
            AgentLostError, MailboxError: another agent is gone.
        """
        self.shutdown_wait.held_up = held_up
        keys = self._say("held", pack(sorted(held.items())))
        if not waits:
            return None
        every = [dict(unpack(letter, "held")) for letter in self._letters(keys)]
        self.shutdown_wait.held_up = None  # all have come: what follows takes no longer than writing
        common = set(held).intersection(*every)
        if not common:
            return None
        standing = {step: {one[step] for one in every} for step in common}
        # What was lost on one rank is a checkpoint of none; the state before it may become one.
        of_use = [step for step in common if DURABLE in standing[step] or standing[step] == {ALONE}]
        step = max(of_use or common)
        if standing[step] != {ALONE}:
            return step, False
        self.last = max(self.last, step)
        self.conclude()
        try:
            self._letters(self._say("ready", pack(step)), _LAST_WORD)
        except CkptError:
            # Prevents: another rank, which has heard of all, waits for this one's part.
            self.writer.conclude(step - 1)
            raise
        return step, True

    def _say(self, what: str, letter: bytes) -> list[str]:
        """Post this rank's letter -> where those of all ranks will be."""
        keys = [f"ckptstore/{what}/{self.writer.term}/{rank}" for rank in range(self._group.size)]
        post(self._group.mailbox, keys[self._group.rank], letter)
        return keys

    def _letters(self, keys: list[str], at_least: float = 0.0) -> list[bytes]:
        """The letters of all ranks, for which there are so many seconds at least."""
        box = self._group.mailbox
        if not self.shutdown_wait.wait(lambda: box.has(keys), self._group.ended, at_least=at_least):
            missing = [str(rank) for rank, key in enumerate(keys) if not box.has([key])]
            raise MissingRankError(
                f"rank {', '.join(missing[:8])} has not ended, or its agent has not said so, in time"
            )
        return [fetch(box, key) or b"" for key in keys]

    def drain(self) -> None:
        """Return when the writer has everything that was given so far."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """See `RankWriter.close`."""
        self.conclude()
        self._thread.shutdown()
        self.writer.close()

    def leave(self, *, farewell: bool) -> None:
        """Leave the other agents, after `close`.

        Args:
            farewell: the trainer has closed its writer; else the other agents end, too.
        """
        if isinstance(self._mailbox, RemoteMailbox):
            self._mailbox.close(farewell=farewell)
            return
        until = time.monotonic() + _FAREWELL
        while farewell and self._mailbox.here and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._mailbox.close()


def _check_trainer(alive: Callable[[], bool]) -> None:
    """Prevents: a rank's place that is taken for minutes by an agent that waits for others, and has nobody to serve."""
    if not alive():
        raise AgentLostError("the trainer ended, or the agent was told to, while the agent was beginning")


def _told(error: BaseException) -> BaseException:
    """Between agents, a mailbox that is gone is an agent that is.

    A step that is in doubt for another reason, as where rank 0's slot was sent and nobody answered, is left as it is:
    all agents live then, and the trainers have to hear that their writers are finished.
    """
    gone = error.__cause__ if isinstance(error, CommitUnknownError) else error
    return AgentLostError(str(error)) if isinstance(gone, MailboxError) else error
