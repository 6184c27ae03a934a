"""Agree which rank writes what: once, and again whenever a rank's tensors change.

A rank whose tensors have not changed posts ``=`` and the agreement's id as its ``items``, and continues without
waiting. So if the tensors of only some ranks have changed, the others learn it when they have written. Nothing is
committed then, and the ranks agree again about all tensors: at once if their callers still wait, and can be asked for
the state again (`agreeing_anew`: of a blocking save); otherwise all ranks raise `RankMismatchError`, and agree at their
next save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptstore.errors import CkptError, MissingRankError, RankMismatchError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.write.ranks.division import Division, Rows, decode_items, decode_rows, divide, encode_rows
from ckptstore.write.ranks.messages.key_value_store import ReplyDeadline
from ckptstore.write.ranks.messages.rank_messages import CommitVerdict, pack, unpack
from ckptstore.write.ranks.messages.step_messages import Exchange
from ckptstore.write.ranks.shares import Holding

__all__ = ["Agreement", "agree", "agreeing_anew", "check_kept"]

_T = TypeVar("_T")
_KEPT = b"="


@dataclass(frozen=True, slots=True)
class Agreement:
    """What one rank writes.

    Attributes:
        id: id of the agreement; the same on all ranks.
        holding: the `Holding.id` that it is for.
        writes: name -> rows.
        compared: tensors whose digests the rank reports.
        division: the division of all ranks; only rank 0 has it.
    """

    id: str
    holding: str
    writes: dict[str, Rows]
    compared: frozenset[str]
    division: Division | None = None


def agree(
    exchange: Exchange, holding: Holding, known: Agreement | None, deadline: ReplyDeadline, *, replicas_apart: bool
) -> Agreement:
    """Agree what this rank writes of `holding`.

    Args:
        known: the earlier agreement.
        deadline: for the other ranks, if they have to agree.

    Raises:
        RankMismatchError: the ranks' tensors do not make one state, or the tensors of only some ranks have changed.
        MissingRankError, FailedRankError: a rank did not report what it has.
    """
    if known is not None and known.holding == holding.id:
        exchange.post("items", _KEPT + known.id.encode(), exchange.rank)
        return known
    exchange.post("items", holding.letter, exchange.rank)
    if exchange.rank == 0:
        return _divide(exchange, holding, deadline, replicas_apart)
    letter = exchange.first([exchange.key("division", exchange.rank), exchange.key("verdict")], deadline, patient=False)
    if letter is None:
        raise MissingRankError(
            f"step {exchange.step} was not saved: rank 0 did not say who writes what within {deadline.seconds:g} s"
        )
    found = unpack(letter, exchange.key("division", exchange.rank))
    if "id" not in found:
        raise CommitVerdict.unpacked(letter, "division").error or RankMismatchError(
            "rank 0 continued without this rank"
        )
    return Agreement(found["id"], holding.id, decode_rows(found["writes"]), frozenset(found["compared"]))


def agreeing_anew(attempt: Callable[[], _T]) -> _T:
    """Call `attempt`, and once more if it failed only because the tensors of some ranks have changed.

    Every rank has that error, and none has an agreement any more: so all of them call it once more, and agree.
    """
    try:
        return attempt()
    except RankMismatchError as error:
        if not error.agree_anew:
            raise
    return attempt()


def _divide(exchange: Exchange, holding: Holding, deadline: ReplyDeadline, replicas_apart: bool) -> Agreement:
    """Rank 0: gather what all ranks have, divide it, and tell each rank what it writes."""
    try:
        letters = exchange.every("items", deadline, "say what it has")
        check_changed(exchange, letters)
        identity = xxh3_128(b"".join(xxh3_128(letter).encode() for letter in letters))
        told = [decode_items(letter, exchange.key("items", rank)) for rank, letter in enumerate(letters)]
        families = dict.fromkeys(family for _, families in told for family in families)
        division = divide([items for items, _ in told], list(families), replicas_apart=replicas_apart)
    except CkptError as error:
        for rank in range(1, exchange.size):
            exchange.post("division", CommitVerdict(error=error).packed(), rank)
        raise
    answers: list[Any] = []
    for rank in range(exchange.size):
        compared = division.compared(rank)
        answers.append({"id": identity, "writes": encode_rows(division.writes[rank]), "compared": compared})
        if rank:
            exchange.post("division", pack(answers[rank]), rank)
    return Agreement(identity, holding.id, division.writes[0], frozenset(answers[0]["compared"]), division)


def check_changed(exchange: Exchange, letters: list[bytes]) -> None:
    """Raise `RankMismatchError` if some ranks kept the earlier agreement while rank 0 needs a new one."""
    kept = [rank for rank, letter in enumerate(letters) if letter.startswith(_KEPT)]
    if kept:
        raise RankMismatchError(
            f"step {exchange.step} was not saved: rank 0 has other tensors than before, rank {kept[0]} has not; if "
            "a rank has tensors of its own, name them in RankOptions(per_rank=[...]). The next save works",
            agree_anew=True,
        )


def check_kept(exchange: Exchange, agreement: Agreement, deadline: ReplyDeadline) -> None:
    """Rank 0, which kept an agreement: check that all other ranks kept it, too.

    Raises:
        RankMismatchError: a rank did not; that rank and all others are told.
        MissingRankError, FailedRankError: a rank did not report.
    """
    letters = exchange.every("items", deadline, "begin to save it")
    for rank, letter in enumerate(letters):
        if letter == _KEPT + agreement.id.encode():
            continue
        error = RankMismatchError(
            f"step {exchange.step} was not saved: rank {rank} has other tensors than before, rank 0 has not; if a rank "
            "has tensors of its own, name them in RankOptions(per_rank=[...]). The next save works",
            agree_anew=True,
        )
        exchange.post("division", CommitVerdict(error=error).packed(), rank)
        raise error
