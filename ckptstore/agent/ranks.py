"""The agent of one rank of many: it writes its rank's part of each step, and the agents' mailbox brings them together.

Every trainer process has an agent of its own. Rank 0's commits, and has the mailbox, so that trainers may die. When the
agent of a rank dies, all of them end, and tell their trainers: a term of many ranks cannot go on without one of them.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ckptstore.agent.forms import texts, whole_number
from ckptstore.agent.kept import ALONE, DURABLE, Standing
from ckptstore.agent.mailboxes import RemoteMailbox, ServedMailbox
from ckptstore.agent.parting import RESTARTED, Parting
from ckptstore.agent.place import Place
from ckptstore.errors import (
    AgentError,
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
from ckptstore.write.ranks.messages.key_value_store import Group, fetch, post
from ckptstore.write.ranks.messages.rank_messages import pack, unpack
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rank_save import Adopted
from ckptstore.write.ranks.rank_writer import RankWriter
from ckptstore.write.ranks.rank_writer_factory import open_rank_writer
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.updates import Update

__all__ = ["ENDING", "Job", "RankSaves", "parting_of", "place_name"]

ENDING: Final = "box"
"""Of the mailbox's socket, in the place of rank 0's agent."""
_TOKEN: Final = 32
_FAREWELL: Final = 10.0
"""Seconds that rank 0's agent, closing, waits for the others to close."""
_LAST_WORD: Final = 5.0
"""Seconds at least for the second letter of `agreed`: all agents are at work on it."""
_PAUSE: Final = 0.01


def place_name(name: str, rank: int) -> str:
    """Where the agent of a rank is found: as that of a trainer of this name."""
    return f"{name}\0rank {rank}"


@dataclass(frozen=True, slots=True)
class Job:
    """What an agent has to know of the others.

    Attributes:
        rank, size: which one it is, and of how many.
        options: how the ranks save together.
        token: what all of them know, and nobody else.
        url, name: of the store and of the trainers, without their ranks: where the agents are found.
        listener: rank 0: the descriptor of the mailbox's listening socket.
    """

    rank: int
    size: int
    options: RankOptions
    token: bytes
    url: str
    name: str
    listener: int | None = None

    @staticmethod
    def new_token() -> bytes:
        """One that nobody knows."""
        return secrets.token_bytes(_TOKEN)

    def form(self) -> dict[str, Any]:
        """As JSON."""
        options = asdict(self.options) | {"per_rank": list(self.options.globs)}
        return {
            "rank": self.rank,
            "size": self.size,
            "options": options,
            "token": self.token.hex(),
            "url": self.url,
            "name": self.name,
            "listener": self.listener,
        }

    @classmethod
    def read(cls, form: Any) -> Self:
        """The inverse of `form`. Raises `AgentError` and what reading does."""
        rank, size = whole_number(form["rank"]), whole_number(form["size"])
        token, url, name = texts([form["token"], form["url"], form["name"]])
        listener = form["listener"]
        if rank >= size or (listener is None) != (rank > 0) or len(token) != 2 * _TOKEN:
            raise AgentError(f"rank {rank} of {size}")
        given = form["options"]
        options = RankOptions(given["timeout"], given["diverged"], tuple(texts(given["per_rank"])))
        return cls(rank, size, options, bytes.fromhex(token), url, name, None if rank else whole_number(listener))


def parting_of(job: Job, linger: float = 0.0, told: Callable[[], bool] = lambda: False) -> Parting:
    """How long the agent of a job waits for the others when it is given no more.

    Args:
        linger: seconds that it waits for a successor.
        told: whether it was told to end.
    """
    restarted = min(job.options.timeout / 2, RESTARTED)  # whose other ranks wait for that successor
    return Parting(max(linger, restarted), restarted, told)


class RankSaves:
    """A rank's writer, for who keeps states and waits for nothing (`keeper.Ranked`).

    Attributes:
        parting: how long it waits for the other agents when it is given no more.
    """

    def __init__(
        self, writer: RankWriter, mailbox: ServedMailbox | RemoteMailbox, group: Group, *, parting: Parting
    ) -> None:
        """
        Args:
            group: of the agents.
        """
        self._writer = writer
        self._mailbox = mailbox
        self._group = group
        self.parting = parting
        self._last = -1
        # Who agrees with other ranks waits for them; the agent's trainer must not.
        self._thread = started_pool(1, "ckptstore-agent-rank")

    @classmethod
    def opened(
        cls,
        store: Store,
        parent: Any,
        options: WriterOptions,
        job: Job,
        environment: Mapping[str, Any],
        lost: Callable[[str], None],
        alive: Callable[[], bool],
        parting: Parting | None = None,
    ) -> Self:
        """Meet the other ranks' agents, and open the term with them.

        Args:
            parent: as for `Store.writer`; rank 0's counts.
            lost: is told why the agents are not complete any more, by a thread.
            alive: whether somebody is there who wants the term: else none is begun.
            parting: see `__init__`; None: `parting_of` the job.

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
            place = Place(job.url, place_name(job.name, 0))
            connection = place.connect(ENDING)
            place.close()
            if connection is None:
                raise AgentLostError("the agent of rank 0 is gone: its mailbox is not there")
            mailbox = remote = RemoteMailbox(connection, job.token, job.rank, lost)
            group = Group(job.rank, job.size, remote, ended)
        writer = open_rank_writer(store.journal, parent, group, options, job.options, environment=environment)
        del checks[0]  # from here on what a trainer has given is written, also when it is gone
        if parting is None:
            parting = parting_of(job)
        return cls(writer, mailbox, group, parting=parting)

    @property
    def term(self) -> int:
        """The term's number."""
        return self._writer.term

    @property
    def parent(self) -> CheckpointInfo | None:
        """What it continues from."""
        return self._writer.parent

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
                pending = self._writer.take_over(given, step, metadata=metadata, tags=tags, updates=updates)
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

        self._last = max(self._last, step)
        self._thread.submit(hand_over)
        return PendingSave(step, done, lambda: None, hurry)

    def forgo(self, step: int, why: BaseException) -> None:
        """A step that the other ranks may be given has no state here: it fails at once, on all of them."""

        def say() -> None:
            with contextlib.suppress(CkptError, RuntimeError):  # a writer that is over says so to whoever asks next
                self._writer.forgo(step, UnmadeStateError(str(why)))

        self._last = max(self._last, step)
        self._thread.submit(say)

    def conclude(self) -> None:
        """The trainer is gone: say so to the other ranks, which need not wait for more of this one."""
        self._writer.conclude(self._last)

    def agreed(
        self, held: Mapping[int, Standing], *, waits: bool, held_up: Callable[[], None]
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
        self.parting.held_up = held_up
        keys = self._say("held", pack(sorted(held.items())))
        if not waits:
            return None
        every = [dict(unpack(letter, "held")) for letter in self._letters(keys)]
        self.parting.held_up = None  # all have come: what follows takes no longer than writing
        common = set(held).intersection(*every)
        if not common:
            return None
        standing = {step: {one[step] for one in every} for step in common}
        # What was lost on one rank is a checkpoint of none; the state before it may become one.
        of_use = [step for step in common if DURABLE in standing[step] or standing[step] == {ALONE}]
        step = max(of_use or common)
        if standing[step] != {ALONE}:
            return step, False
        self._last = max(self._last, step)
        self.conclude()
        try:
            self._letters(self._say("ready", pack(step)), _LAST_WORD)
        except CkptError:
            # Prevents: another rank, which has heard of all, waits for this one's part.
            self._writer.conclude(step - 1)
            raise
        return step, True

    def _say(self, what: str, letter: bytes) -> list[str]:
        """Post this rank's letter -> where those of all ranks will be."""
        keys = [f"ckptstore/{what}/{self.term}/{rank}" for rank in range(self._group.size)]
        post(self._group.mailbox, keys[self._group.rank], letter)
        return keys

    def _letters(self, keys: list[str], at_least: float = 0.0) -> list[bytes]:
        """The letters of all ranks, for which there are so many seconds at least."""
        box = self._group.mailbox
        if not self.parting.wait(lambda: box.has(keys), self._group.ended, at_least=at_least):
            missing = [str(rank) for rank, key in enumerate(keys) if not box.has([key])]
            raise MissingRankError(
                f"rank {', '.join(missing[:8])} has not ended, or its agent has not said so, in time"
            )
        return [fetch(box, key) or b"" for key in keys]

    def wait(self) -> None:
        """See `Writer.wait`."""
        self._thread.submit(lambda: None).result()
        self._writer.wait()

    def poll(self) -> None:
        """See `Writer.poll`."""
        self._writer.poll()

    def tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `RankWriter.tag`."""
        self._thread.submit(lambda: None).result()
        return self._writer.tag(name, ref)

    def untag(self, name: str) -> None:
        """See `RankWriter.untag`."""
        self._thread.submit(lambda: None).result()
        self._writer.untag(name)

    def rollback(self, ref: str) -> CheckpointInfo:
        """See `RankWriter.rollback`."""
        self._thread.submit(lambda: None).result()
        parent = self._writer.rollback(ref)
        self._last = parent.step
        return parent

    def close(self) -> None:
        """See `RankWriter.close`."""
        self.conclude()
        self._thread.shutdown()
        self._writer.close()

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
