"""The trainers of a job agree, once, where their agents meet: through the mailbox of their process group.

1. They find each other (`write.ranks.rendezvous`), and each says where it is, what stands in its way, and which step it
   has of a trainer that died.
2. Rank 0 posts ``answer/<session>/<rank>``: the token of the job, and whether all have the same step; or why not.

From then on the agents talk through a mailbox of their own, which rank 0's agent has and which does not die with the
trainers. That of the process group does, with its host: rank 0's trainer, or who has started it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptstore.agent.place import Place, runtime_folder
from ckptstore.agent.ranks import ENDING, Job
from ckptstore.errors import AgentBusyError, CkptError, FailedRankError, MissingRankError, RankMismatchError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.write.ranks.messages.key_value_store import Group, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import pack, unpack
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rendezvous import gathered, joined, say_here

__all__ = ["Kept", "Together"]

Kept: TypeAlias = tuple[str, int, int]
"""Run, term and step of a state in the memory of an agent."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says of itself.

    Attributes:
        where: machine and runtime folder: agents find each other in the folder.
        size: of its group.
        flaw: why it can have no agent; None: it can.
        kept: what the agent has kept that was left to it: run, term and step; None: nothing.
    """

    where: str
    size: int
    flaw: str | None
    kept: Kept | None

    def packed(self) -> bytes:
        """As a letter."""
        return pack([self.where, self.size, self.flaw, self.kept])

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> _Said:
        """The inverse of `packed`."""
        place, size, flaw, kept = unpack(letter, where)
        return cls(place, size, flaw, None if kept is None else tuple(kept))


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks whose agents save together.

    Attributes:
        group: the trainers' own, which dies with them.
        options: how they save together.
    """

    group: Group
    options: RankOptions

    def job(
        self,
        url: str,
        name: str,
        place: Place,
        listening: contextlib.ExitStack,
        flaw: BaseException | None,
        kept: Kept | None,
    ) -> tuple[Job, bool]:
        """What this rank's agent has to know, once every rank is there -> and whether all have kept the same step.

        Args:
            url, name: of the store and the trainers, by which their agents are found.
            place: of this rank's agent.
            listening: closes this process's copy of the socket that rank 0's agent takes over.
            flaw: why this rank can have no agent: all ranks are told, and here it is raised.
            kept: what it has of a trainer that died.

        Raises:
            MissingRankError: a rank did not come in time.
            AgentBusyError, FailedRankError, RankMismatchError: a rank can have no agent, or is on another machine. No
                agent was begun.
        """
        group, base = self.group, f"ckptstore/agents/{xxh3_128(f'{url}{chr(0)}{name}'.encode())}"
        said = _Said(_here(), group.size, None if flaw is None else f"{type(flaw).__name__}: {flaw}", kept)
        if group.rank:
            token, same = self._joined(base, said, flaw)
            return Job(group.rank, group.size, self.options, token, url, name), same
        session = secrets.token_hex(16)
        try:
            others = self._gathered(base, session)
            if flaw is not None:
                raise flaw
            _check(said, others)
            listener = listening.enter_context(place.listen(ENDING))
        except BaseException as error:
            self._answer(base, session, [None, False, f"rank 0: {type(error).__name__}: {error}"])
            raise
        token, same = Job.new_token(), kept is not None and all(one.kept == kept for one in others.values())
        self._answer(base, session, [token.hex(), same, None])
        return Job(0, group.size, self.options, token, url, name, listener.fileno()), same

    def _joined(self, base: str, said: _Said, flaw: BaseException | None) -> tuple[bytes, bool]:
        """Another rank's side -> the token, and whether all have kept the same step."""
        session, _ = unpack(self._awaited(joined(self.group, base), self.options.timeout), "invite")
        say_here(self.group, base, session, said.packed())
        if flaw is not None:
            raise flaw
        key = f"{base}/answer/{session}/{self.group.rank}"
        # Others may come late, until rank 0 gives up: that is the longest this can take.
        token, same, reason = unpack(self._awaited(key, 2 * self.options.timeout), "answer")
        withdraw(self.group.mailbox, [key])
        if reason is not None:
            raise FailedRankError(f"no agents were begun: {reason}")
        return bytes.fromhex(token), same

    def _awaited(self, key: str, seconds: float) -> bytes:
        letter: bytes | None = None
        if ReplyDeadline(seconds, self.group.ended).wait(lambda: self.group.mailbox.has([key])):
            letter = fetch(self.group.mailbox, key)
        if letter is None:
            raise MissingRankError(f"rank 0 did not say within {seconds:g} s where its agent is; no agent was begun")
        return letter

    def _gathered(self, base: str, session: str) -> dict[int, _Said]:
        """Rank 0's side, until every other rank is there -> what they say."""
        told = "no agents were begun", "this"
        letters = gathered(self.group, base, session, self.options.timeout, told, lambda _rank, _size: None)
        return {rank: _Said.unpacked(letter, f"rank {rank}") for rank, letter in letters.items()}

    def _answer(self, base: str, session: str, answer: list[Any]) -> None:
        with contextlib.suppress(CkptError):  # who hears nothing gives up in time
            for rank in range(1, self.group.size):
                post(self.group.mailbox, f"{base}/answer/{session}/{rank}", pack(answer))


def _here() -> str:
    folder = runtime_folder().stat()
    return f"{_BOOT.read_text().strip()}/{folder.st_dev}/{folder.st_ino}"


def _check(own: _Said, others: Mapping[int, _Said]) -> None:
    """Raise what keeps the ranks from having agents."""
    for rank, one in others.items():
        if one.flaw is not None:
            kind = AgentBusyError if one.flaw.startswith(AgentBusyError.__name__) else FailedRankError
            raise kind(f"rank {rank}: {one.flaw}")
        if one.size != own.size:
            raise RankMismatchError(f"rank {rank} is of a group of {one.size}, rank 0 of one of {own.size}")
        if one.where != own.where:
            raise RankMismatchError(
                f"rank {rank} is on another machine than rank 0, or has another runtime folder "
                "(CKPTSTORE_RUNTIME_DIR): agents of many ranks save together on one machine alone; without an agent "
                "store.writer(group=...) does on several"
            )
