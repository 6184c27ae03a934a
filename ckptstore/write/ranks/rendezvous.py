"""Let ranks find each other in a mailbox that may hold messages of dead processes.

1. Every rank except 0 posts ``join/<rank>`` with its own nonce. The message stays until it is answered.
2. Rank 0 answers each with ``invite/<nonce>``, which holds the session's nonce. A restarted rank has a new nonce.
3. Each invited rank posts ``here/<session>/<rank>``, with its message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ckptstore.errors import MissingRankError
from ckptstore.write.ranks.messages.key_value_store import Group, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import pack, unpack

__all__ = ["gather_ranks", "request_invitation", "say_here"]


def gather_ranks(
    group: Group,
    base: str,
    session: str,
    timeout: float,
    told: tuple[str, str],
    refusal: Callable[[int, int], str | None],
) -> dict[int, bytes]:
    """On rank 0: wait until every other rank has joined -> the message of each.

    Args:
        base: prefix of all keys.
        session: the nonce of this rendezvous.
        told: for the error if a rank is missing: what was not done, and what every rank has to call.
        refusal: returns why a rank with a group of that size is not invited; None: it is invited.

    Raises:
        MissingRankError: not all ranks came in time.
    """
    box, others = group.mailbox, range(1, group.size)
    here = {rank: f"{base}/here/{session}/{rank}" for rank in others}
    invited: dict[int, tuple[bytes, str]] = {}

    def met() -> bool:
        for rank in others:
            asked = fetch(box, f"{base}/join/{rank}")
            if asked is not None and (rank not in invited or invited[rank][0] != asked):
                nonce, size = unpack(asked, "join")
                invited[rank] = asked, f"{base}/invite/{nonce}"
                post(box, invited[rank][1], pack([session, refusal(rank, size)]))
        return box.has(list(here.values()))

    if not ReplyDeadline(timeout, group.ended, group.size).wait(met):
        missing = [str(rank) for rank, key in here.items() if not box.has([key])]
        raise MissingRankError(
            f"{told[0]}: rank {', '.join(missing[:8])} of {group.size} did not join within {timeout:g} s; every rank "
            f"of the group has to call {told[1]}"
        )
    found = {rank: fetch(box, key) or b"" for rank, key in here.items()}
    withdraw(box, [f"{base}/join/{rank}" for rank in others])
    withdraw(box, [invitation for _, invitation in invited.values()])
    withdraw(box, here.values())
    return found


def request_invitation(group: Group, base: str) -> str:
    """On every rank except 0: ask for an invitation -> the key under which rank 0 will post the answer.

    The answer holds the session's nonce, and the reason if the rank is refused.
    """
    nonce = secrets.token_hex(16)
    post(group.mailbox, f"{base}/join/{group.rank}", pack([nonce, group.size]))
    return f"{base}/invite/{nonce}"


def say_here(group: Group, base: str, session: str, letter: bytes) -> None:
    """On every rank except 0, once it is invited: post that it is here, with its message."""
    post(group.mailbox, f"{base}/here/{session}/{group.rank}", letter)
