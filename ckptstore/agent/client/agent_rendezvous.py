"""Lets the trainers of a job agree, once, on how their agents find each other, through their group's mailbox.

1. The ranks find each other (`write.ranks.rendezvous`). Each reports its machine, what keeps it from having an agent,
   and which step its earlier agent kept.
2. Rank 0 posts ``answer/<session>/<rank>``: the token of the job and whether all kept the same step, or an error.

From then on the agents use their own mailbox, which rank 0's agent serves and which outlives the trainers. The mailbox
of the process group ends with its host: rank 0's trainer, or its launcher.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptstore.agent.protocol.agent_address import AgentAddress, runtime_folder
from ckptstore.agent.protocol.rank_job import MAILBOX_ENDING, RankJob
from ckptstore.errors import AgentBusyError, CkptError, FailedRankError, MissingRankError, RankMismatchError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.write.ranks.messages.key_value_store import Group, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import pack, unpack
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rendezvous import gather_ranks, request_invitation, say_here

__all__ = ["AgentRendezvous", "KeptStep"]

KeptStep: TypeAlias = tuple[str, int, int]
"""Run, term and step of a state in an agent's memory."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What a rank reports of itself.

    Attributes:
        where: machine and runtime folder; agents find each other in that folder.
        size: size of its group.
        flaw: why it can have no agent; None: it can.
        kept: the state that its earlier agent kept; None: none.
    """

    where: str
    size: int
    flaw: str | None
    kept: KeptStep | None

    def packed(self) -> bytes:
        """Its form as a mailbox value."""
        return pack([self.where, self.size, self.flaw, self.kept])

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> _RankReport:
        """Read a report: the inverse of `packed`."""
        place, size, flaw, kept = unpack(letter, where)
        return cls(place, size, flaw, None if kept is None else tuple(kept))


@dataclass(frozen=True, slots=True)
class AgentRendezvous:
    """The ranks whose agents save together.

    Attributes:
        group: the group of the trainers.
        options: how the ranks save together.
    """

    group: Group
    options: RankOptions

    def job(
        self,
        url: str,
        name: str,
        place: AgentAddress,
        listening: contextlib.ExitStack,
        flaw: BaseException | None,
        kept: KeptStep | None,
    ) -> tuple[RankJob, bool]:
        """Agree with the other ranks -> the job for this rank's agent, and whether all kept the same step.

        Args:
            url, name: of the store and of the trainers; they give the agents' addresses.
            place: address of this rank's agent.
            listening: closes this process's copy of the listening socket that rank 0's agent inherits.
            flaw: why this rank can have no agent. It is sent to all ranks, and raised here.
            kept: the state that this rank's earlier agent kept; None: none.

        Raises:
            MissingRankError: a rank did not join in time.
            AgentBusyError, FailedRankError, RankMismatchError: a rank can have no agent, or is on another machine. No
                agent was started.
        """
        group, base = self.group, f"ckptstore/agents/{xxh3_128(f'{url}{chr(0)}{name}'.encode())}"
        said = _RankReport(_here(), group.size, None if flaw is None else f"{type(flaw).__name__}: {flaw}", kept)
        if group.rank:
            token, same = self._join(base, said, flaw)
            return RankJob(group.rank, group.size, self.options, token, url, name), same
        session = secrets.token_hex(16)
        try:
            others = self._gather_reports(base, session)
            if flaw is not None:
                raise flaw
            _check(said, others)
            listener = listening.enter_context(place.listen(MAILBOX_ENDING))
        except BaseException as error:
            self._answer(base, session, [None, False, f"rank 0: {type(error).__name__}: {error}"])
            raise
        token, same = RankJob.new_token(), kept is not None and all(one.kept == kept for one in others.values())
        self._answer(base, session, [token.hex(), same, None])
        return RankJob(0, group.size, self.options, token, url, name, listener.fileno()), same

    def _join(self, base: str, said: _RankReport, flaw: BaseException | None) -> tuple[bytes, bool]:
        """On a rank above 0: join rank 0 -> the token, and whether all kept the same step."""
        session, _ = unpack(self._await_letter(request_invitation(self.group, base), self.options.timeout), "invite")
        say_here(self.group, base, session, said.packed())
        if flaw is not None:
            raise flaw
        key = f"{base}/answer/{session}/{self.group.rank}"
        # Rank 0 waits for late ranks, at most for its own timeout.
        token, same, reason = unpack(self._await_letter(key, 2 * self.options.timeout), "answer")
        withdraw(self.group.mailbox, [key])
        if reason is not None:
            raise FailedRankError(f"no agents were started: {reason}")
        return bytes.fromhex(token), same

    def _await_letter(self, key: str, seconds: float) -> bytes:
        letter: bytes | None = None
        deadline = ReplyDeadline(seconds, self.group.ended, self.group.size)
        if deadline.wait(lambda: self.group.mailbox.has([key])):
            letter = fetch(self.group.mailbox, key)
        if letter is None:
            raise MissingRankError(f"rank 0 did not say within {seconds:g} s where its agent is; no agent was started")
        return letter

    def _gather_reports(self, base: str, session: str) -> dict[int, _RankReport]:
        """On rank 0: wait for the other ranks -> their reports."""
        told = "no agents were started", "this"
        letters = gather_ranks(self.group, base, session, self.options.timeout, told, lambda _rank, _size: None)
        return {rank: _RankReport.unpacked(letter, f"rank {rank}") for rank, letter in letters.items()}

    def _answer(self, base: str, session: str, answer: list[Any]) -> None:
        with contextlib.suppress(CkptError):  # a rank without an answer times out
            for rank in range(1, self.group.size):
                post(self.group.mailbox, f"{base}/answer/{session}/{rank}", pack(answer))


def _here() -> str:
    folder = runtime_folder().stat()
    return f"{_BOOT.read_text().strip()}/{folder.st_dev}/{folder.st_ino}"


def _check(own: _RankReport, others: Mapping[int, _RankReport]) -> None:
    """Raise an error if a rank can have no agent."""
    for rank, one in others.items():
        if one.flaw is not None:
            kind = AgentBusyError if one.flaw.startswith(AgentBusyError.__name__) else FailedRankError
            raise kind(f"rank {rank}: {one.flaw}")
        if one.size != own.size:
            raise RankMismatchError(f"rank {rank} is of a group of {one.size}, rank 0 of one of {own.size}")
        if one.where != own.where:
            raise RankMismatchError(
                f"rank {rank} is on another machine than rank 0, or has another runtime folder "
                "(CKPTSTORE_RUNTIME_DIR): agents of many ranks save together only on one machine; without an agent "
                "store.writer(group=...) works on several"
            )
