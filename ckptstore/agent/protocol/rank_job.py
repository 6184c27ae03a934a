"""What the agent of one rank has to know of the agents of the others; its trainer agrees on that with theirs."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ckptstore.agent.protocol.message_fields import texts, whole_number
from ckptstore.errors import AgentError
from ckptstore.write.ranks.options import RankOptions

__all__ = ["MAILBOX_ENDING", "RankJob", "place_name"]

MAILBOX_ENDING: Final = "box"
"""Of the mailbox's socket, in the place of rank 0's agent."""
_TOKEN: Final = 32


def place_name(name: str, rank: int) -> str:
    """Where the agent of a rank is found: as that of a trainer of this name."""
    return f"{name}\0rank {rank}"


@dataclass(frozen=True, slots=True)
class RankJob:
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
