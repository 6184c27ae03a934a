"""The rule ``space``: the most space that a store's checkpoints may take, in bytes or as a number of states.

Unlike the other rules it keeps nothing: it bounds what a writer stores (SPEC 7.5). The others say which checkpoints go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptstore.formats.history.members import MAX_INT

__all__ = ["LEAST_STATES", "SpaceLimit", "is_space", "space_limit", "space_of"]

LEAST_STATES: Final = 2
"""One durable checkpoint, and the one that is being written."""
_PREFIX: Final = "space:"
_POWERS: Final = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class SpaceLimit:
    """A limit on the space of a store's segments.

    Attributes:
        text: the limit as it is written: ``4GB``, ``3states``.
        nbytes: the limit in bytes; None: it is a number of states.
        states: the limit in states; None: it is a number of bytes.
    """

    text: str
    nbytes: int | None = None
    states: int | None = None

    @property
    def rule(self) -> str:
        """The rule as a COMMIT stores it."""
        return f"{_PREFIX}{self.text}"

    def bytes_for(self, state: int) -> int:
        """The limit in bytes if a full of the present state takes `state` bytes."""
        if self.nbytes is not None:
            return self.nbytes
        return (self.states or 0) * state


def is_space(rule: str) -> bool:
    """Whether a rule has the form of a limit on space, valid or not."""
    return rule.startswith(_PREFIX)


def space_limit(text: str) -> SpaceLimit | None:
    """Parse ``4GB``, ``500MiB``, ``4000000000``, ``3states``; spaces are ignored. None: another form."""
    text = "".join(text.split())
    if found := re.fullmatch(r"([0-9]{1,16})states?", text, re.ASCII):
        states = int(found[1])
        return SpaceLimit(f"{states}states", states=states) if LEAST_STATES <= states <= MAX_INT else None
    found = re.fullmatch(r"([0-9]{1,16})(?:\.([0-9]{1,6}))?(?:([kMGT])(i)?)?B?", text, re.ASCII)
    if found is None:
        return None
    unit = (1024 if found[4] else 1000) ** _POWERS[found[3] or ""]
    nbytes = int(found[1]) * unit + int(f"{found[2] or '0':0<6}") * unit // 10**6
    return SpaceLimit(text, nbytes=nbytes) if 1 <= nbytes <= MAX_INT else None


def space_of(rules: Iterable[str]) -> SpaceLimit | None:
    """The limit among a store's rules; None: there is none."""
    for rule in rules:
        if is_space(rule):
            return space_limit(rule.removeprefix(_PREFIX))
    return None
