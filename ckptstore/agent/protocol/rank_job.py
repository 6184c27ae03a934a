"""What the agent of one rank needs to know of the other ranks' agents. The trainers agree on it."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ckptstore.agent.protocol.message_fields import texts, whole_number
from ckptstore.errors import AgentError
from ckptstore.write.ranks.rank_options import RankOptions

__all__ = ["MAILBOX_ENDING", "RankJob", "place_name"]

MAILBOX_ENDING: Final = "box"
"""Ending of the mailbox's socket, at the address of rank 0's agent."""
_TOKEN: Final = 32


def place_name(name: str, rank: int) -> str:
    """The trainer name under which the agent of a rank is found."""
    return f"{name}\0rank {rank}"


@dataclass(frozen=True, slots=True)
class RankJob:
    """The job that an agent of one of many ranks belongs to.

    Attributes:
        rank, size: the agent's rank, and the number of ranks.
        options: how the ranks save together.
        token: a secret that the agents of the job share.
        url, name: of the store and of the trainers, without their ranks; they give the agents' addresses.
        listener: on rank 0 the descriptor of the mailbox's listening socket; None on the others.
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
        """A new random token."""
        return secrets.token_bytes(_TOKEN)

    def form(self) -> dict[str, Any]:
        """Its form as JSON."""
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
        """Read a job: the inverse of `form`. Raises `AgentError`, or what `read` turns into one."""
        rank, size = whole_number(form["rank"]), whole_number(form["size"])
        token, url, name = texts([form["token"], form["url"], form["name"]])
        listener = form["listener"]
        if rank >= size or (listener is None) != (rank > 0) or len(token) != 2 * _TOKEN:
            raise AgentError(f"rank {rank} of {size}")
        given = form["options"]
        options = RankOptions(given["timeout"], given["diverged"], tuple(texts(given["per_rank"])))
        return cls(rank, size, options, bytes.fromhex(token), url, name, None if rank else whole_number(listener))
