"""The log of a remote in the model of part ``remote``, and its catalog."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Catalog", "Checkpoint", "Nonce", "Rec", "base_of", "catalog", "needed", "retirements"]

Nonce = tuple[int, str]
"""A term and its opener."""
Checkpoint = tuple[Nonce, int]


class Rec(NamedTuple):
    """A record of the remote's log: ``open``, ``add``, ``lacks`` or ``retire``."""

    kind: str
    nonce: Nonce
    checkpoints: tuple[Checkpoint, ...] = ()
    drops: tuple[Checkpoint, ...] = ()  # segments: each checkpoint has one
    number: int | None = None  # of an OPEN: the last step of the previous term; else the lowest step that is left out

    def __str__(self) -> str:
        what = " ".join(f"{step}@{nonce[0]}{nonce[1]}" for nonce, step in self.checkpoints)
        return f"{self.kind} {self.nonce[0]}{self.nonce[1]} {what}{'' if self.number is None else self.number}"


class Catalog(NamedTuple):
    """A log, applied."""

    terms: tuple[Nonce, ...]
    promised: frozenset[Checkpoint]
    retired: frozenset[Checkpoint]
    dropped: frozenset[Checkpoint]
    reached: tuple[tuple[Nonce, int | None], ...]  # of terms that are over
    lacks: tuple[tuple[Nonce, int], ...]

    @property
    def newest(self) -> Nonce:
        return self.terms[-1]

    @property
    def live(self) -> frozenset[Checkpoint]:
        """The checkpoints that are promised or held."""
        return (self.promised | self.retired) - self.dropped

    def lacking(self, nonce: Nonce) -> int | None:
        return dict(self.lacks).get(nonce)


def base_of(checkpoint: Checkpoint) -> Checkpoint | None:
    """The base of a delta."""
    nonce, step = checkpoint
    return (nonce, 1) if step == 2 else None


def needed(promised: Iterable[Checkpoint]) -> frozenset[Checkpoint]:
    """These checkpoints and all their bases."""
    found = set(promised)
    return frozenset(found | {base for one in found if (base := base_of(one)) is not None})


@lru_cache(maxsize=200_000)
def catalog(log: tuple[Rec, ...]) -> Catalog:
    """READ the log."""
    terms: list[Nonce] = []
    promised: set[Checkpoint] = set()
    retired: set[Checkpoint] = set()
    dropped: set[Checkpoint] = set()
    reached: dict[Nonce, int | None] = {}
    lacks: dict[Nonce, int] = {}
    for record in log:
        if record.kind == "open":
            if terms:
                reached[terms[-1]] = record.number
            terms.append(record.nonce)
        elif record.kind == "add":
            promised |= set(record.checkpoints)
        elif record.kind == "lacks" and record.number is not None:
            lacks[record.nonce] = min(record.number, lacks.get(record.nonce, record.number))
        elif record.kind == "retire":
            promised -= set(record.checkpoints)
            retired |= set(record.checkpoints)
            dropped |= set(record.drops)
    return Catalog(
        tuple(terms),
        frozenset(promised),
        frozenset(retired),
        frozenset(dropped),
        tuple(reached.items()),
        tuple(lacks.items()),
    )


def retirements(there: Catalog) -> list[Rec]:
    """The checkpoints that a prune of this view may retire, and drop: one, or all but the newest."""
    choices = sorted(there.promised - {max(there.promised, default=None)})
    found = []
    for gone in {tuple(choices), *((one,) for one in choices)} - {()}:
        left = there.promised - set(gone)
        found.append(Rec("retire", there.newest, gone, tuple(sorted(there.live - needed(left)))))
    return found
