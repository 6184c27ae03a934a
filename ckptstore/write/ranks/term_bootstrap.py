"""Begin a term with many ranks: they find each other, rank 0 opens the term, the others join it.

1. The ranks find each other (`rendezvous`). When all are there, rank 0 opens the term. Until then no writer is fenced.
2. Rank 0 posts ``opened/<session>``. The others check that their store shows that OPEN record, and post the result.
3. Rank 0 posts ``agreed/<session>/<rank>``: either all ranks use the term, or none does.

A term that rolls back to an earlier checkpoint is opened in the same way; in 1 every rank names the checkpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from ckptstore.errors import (
    CkptError,
    FailedRankError,
    KeyNotFoundError,
    MissingRankError,
    RankMismatchError,
    StoreNotFoundError,
)
from ckptstore.host.crash_points import crash_point
from ckptstore.log.journal import Journal
from ckptstore.log.partial_objects import slot_bytes
from ckptstore.write.ranks.messages.key_value_store import Group, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import OpenedTerm, pack, unpack
from ckptstore.write.ranks.rendezvous import gather_ranks, request_invitation, say_here

__all__ = ["join", "lead"]

_BASE = "ckptstore/open"


def lead(group: Group, timeout: float, begin: Callable[[], OpenedTerm], asked: str | None = None) -> OpenedTerm:
    """Rank 0's side.

    Args:
        begin: opens the term -> what the others are told.
        asked: what the term continues from, if all ranks have to name the same checkpoint.

    Raises:
        MissingRankError: not every rank came in time. No term was opened.
        FailedRankError: a rank cannot use the store: the term is open and empty. Or a rank had an error and refused.
        RankMismatchError: the ranks ask for different checkpoints. No term was opened.
        and what `begin` raises; every other rank is told.
    """
    box, session = group.mailbox, secrets.token_hex(16)

    def refusal(rank: int, size: int) -> str | None:
        return None if size == group.size else f"rank {rank} is of a group of {size}, rank 0 of one of {group.size}"

    here = gather_ranks(group, _BASE, session, timeout, ("no term was opened", "store.writer(group=...)"), refusal)
    try:
        _check_same_ref(here, asked)
        opening = begin()
    except BaseException as error:
        post(box, f"{_BASE}/opened/{session}", pack(f"{type(error).__name__}: {error}"))
        raise
    crash_point("ranks.opened")
    post(box, f"{_BASE}/opened/{session}", opening.packed())
    try:
        _hear_all(group, session, timeout)
    except BaseException as error:
        _agree(group, session, f"{type(error).__name__}: {error}")
        raise
    crash_point("ranks.heard")
    _agree(group, session, None)
    return opening


def _agree(group: Group, session: str, reason: str | None) -> None:
    for rank in range(1, group.size):
        post(group.mailbox, f"{_BASE}/agreed/{session}/{rank}", pack(reason))


def _check_same_ref(here: Mapping[int, bytes], asked: str | None) -> None:
    """Check that all ranks go back to the same REF. Raises the error of a rank that cannot."""
    for rank, letter in here.items():
        text, reason = unpack(letter, "here")
        if reason is not None:
            raise FailedRankError(f"rank {rank}: {reason}")
        if text != asked:
            raise RankMismatchError(f"rank {rank} goes back to {text!r}, rank 0 to {asked!r}")


def _hear_all(group: Group, session: str, timeout: float) -> None:
    keys = [f"{_BASE}/sees/{session}/{rank}" for rank in range(1, group.size)]
    heard = ReplyDeadline(timeout, group.ended, group.size).wait(lambda: group.mailbox.has(keys))
    for rank, key in enumerate(keys, 1):
        letter = fetch(group.mailbox, key)
        if letter is None:
            raise MissingRankError(f"rank {rank} did not join the term within {timeout:g} s")
        if (reason := unpack(letter, key)) is not None:
            raise FailedRankError(f"rank {rank}: {reason}")
    assert heard or not keys
    withdraw(group.mailbox, keys)
    withdraw(group.mailbox, [f"{_BASE}/opened/{session}"])


def join(
    group: Group,
    journal: Journal,
    timeout: float,
    coding: str,
    asked: str | None = None,
    flaw: BaseException | None = None,
) -> OpenedTerm:
    """On every other rank: join -> the term that rank 0 has opened.

    Args:
        coding: what this rank's options store besides fulls; has to equal rank 0's (`OpenedTerm.coding`).
        asked: as for `lead`.
        flaw: an error for which this rank refuses the term: all ranks are told, and it is raised here.

    Raises:
        MissingRankError: rank 0 did not answer in time.
        FailedRankError: rank 0 could not open a term.
        RankMismatchError: this store is not rank 0's, or does not show what rank 0 writes; or the ranks do not belong
            to one group.
    """
    box, invitation = group.mailbox, request_invitation(group, _BASE)
    crash_point("ranks.joined")
    deadline = ReplyDeadline(timeout, group.ended, group.size)
    session, refused = unpack(_await_letter(group, invitation, deadline), "invite")
    if refused is not None:
        raise RankMismatchError(f"the ranks are not of one group: {refused}")
    reason: str | None = None if flaw is None else f"{type(flaw).__name__}: {flaw}"
    say_here(group, _BASE, session, pack([asked, reason]))
    if flaw is not None:
        raise flaw
    # Other ranks may come late, until rank 0 gives up: this wait takes 2 * timeout at most.
    patient = ReplyDeadline(2 * timeout, group.ended, group.size)
    told = unpack(_await_letter(group, f"{_BASE}/opened/{session}", patient), "opened")
    if isinstance(told, str):
        raise FailedRankError(f"rank 0 could not open a term: {told}")
    opening = OpenedTerm.unpacked(pack(told), "opened")
    try:
        _check_store(journal, opening)
        if opening.coding != coding:
            raise RankMismatchError(
                f"rank 0 was opened with {opening.coding or 'neither deltas= nor diffs='}, rank {group.rank} with "
                f"{coding or 'neither'}: all ranks need the same"
            )
    except CkptError as error:
        reason = str(error)
        raise
    finally:
        post(box, f"{_BASE}/sees/{session}/{group.rank}", pack(reason))
    key = f"{_BASE}/agreed/{session}/{group.rank}"
    answer = _await_letter(group, key, ReplyDeadline(2 * timeout, group.ended, group.size))
    withdraw(box, [key])
    if (why := unpack(answer, "agreed")) is not None:
        raise FailedRankError(f"rank 0 could not begin the term with all ranks: {why}")
    return opening


def _await_letter(group: Group, key: str, deadline: ReplyDeadline) -> bytes:
    if not deadline.wait(lambda: group.mailbox.has([key])):
        raise MissingRankError(f"rank 0 did not open a term within {deadline.seconds:g} s")
    letter = fetch(group.mailbox, key)
    if letter is None:
        raise MissingRankError("rank 0 opened a term and continued without this rank")
    return letter


def _check_store(journal: Journal, opening: OpenedTerm) -> None:
    advice = "all ranks need one store (a shared file system, or an object store)"
    try:
        if journal.run != opening.run:
            raise RankMismatchError(f"{journal.url}: another store than {opening.url} of rank 0; {advice}")
        text = slot_bytes(journal.backend, opening.run, opening.slot)
    except (StoreNotFoundError, KeyNotFoundError) as error:
        raise RankMismatchError(
            f"{journal.url}: the term that rank 0 opened in {opening.url} is not there; {advice}"
        ) from error
    if opening.nonce.encode() not in text:
        raise RankMismatchError(f"{journal.url}: slot {opening.slot} is not the one that rank 0 wrote; {advice}")
