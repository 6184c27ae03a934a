"""Take type-checked members out of untrusted parsed JSON.

Every method removes the member that it returns, so the remaining members are those that this version does not know and
must preserve. A member of the wrong type or range raises `FormatError`, which names the source and the member.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ckptstore.errors import FormatError
from ckptstore.formats.history.records import CheckpointId, Node, valid_tag

__all__ = ["MAX_INT", "MAX_TERM", "Members", "hexadecimal", "is_term", "is_time", "natural"]

MAX_INT = 2**53
"""Largest number in a record: every JSON reader represents it exactly."""

MAX_TERM = 10**10 - 1
"""Highest term: a key has ten digits for the term."""
_HEX = re.compile("[0-9a-f]*")
_T = TypeVar("_T")


def natural(value: Any) -> bool:
    """Whether `value` is an integer in 0..2^53 (not a bool)."""
    return type(value) is int and 0 <= value <= MAX_INT


def is_term(value: Any) -> bool:
    """Whether `value` is an integer in 1..`MAX_TERM`."""
    return natural(value) and 1 <= value <= MAX_TERM


def is_time(value: Any) -> bool:
    """Whether `value` is a finite number within ±2^53 (JSON's ``1e999`` is infinite)."""
    return (type(value) is float or type(value) is int) and -MAX_INT <= value <= MAX_INT


def hexadecimal(value: Any, digits: int = 32) -> bool:
    """Whether `value` is a string of exactly `digits` lower-case hex digits."""
    return type(value) is str and len(value) == digits and _HEX.fullmatch(value) is not None


class Members:
    """The members of one JSON object, to be taken one by one. `what` names the source in errors."""

    __slots__ = ("_remaining", "_what")

    def __init__(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise FormatError(f"{what}: expected a JSON object, found {type(value).__name__}")
        self._remaining: dict[str, Any] = dict(value)
        self._what = what

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Raise `FormatError`, which says that member `name` is not `wanted`."""
        raise FormatError(f"{self._what}: member {name!r} is not {wanted}")

    def rest(self) -> dict[str, Any]:
        """Return the members that were not taken."""
        return self._remaining

    def number(self, name: str, *, least: int = 0) -> int:
        """Take an integer in `least`..2^53."""
        value = self._remaining.pop(name, None)
        if type(value) is not int or not least <= value <= MAX_INT:
            self.refuse(name, f"an integer in {least}..2^53")
        return value

    def term(self, name: str = "term") -> int:
        """Take a term, from 1 to `MAX_TERM`."""
        term = self.number(name, least=1)
        if term > MAX_TERM:
            self.refuse(name, f"a term, at most {MAX_TERM}")
        return term

    def time(self, name: str) -> float:
        """Take a number of seconds."""
        value = self._remaining.pop(name, None)
        if not is_time(value):
            self.refuse(name, "a number of seconds")
        return float(value)

    def digest(self, name: str) -> str:
        """Take a string of 32 hex digits."""
        value = self._remaining.pop(name, None)
        if not hexadecimal(value):
            self.refuse(name, "32 lower-case hex digits")
        return str(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Take a string."""
        value = self._remaining.pop(name, default)
        if type(value) is not str:
            self.refuse(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        """Take a boolean; absent means False."""
        value = self._remaining.pop(name, False)
        if type(value) is not bool:
            self.refuse(name, "a boolean")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Take a JSON object; absent means empty."""
        value = self._remaining.pop(name, {})
        if type(value) is not dict:
            self.refuse(name, "an object")
        return value

    def items(self, name: str, make: Callable[[Any], _T | None], wanted: str) -> tuple[_T, ...]:
        """Take a list and convert its entries with `make`, which returns None to refuse one; absent means empty."""
        value = self._remaining.pop(name, [])
        if type(value) is not list:
            self.refuse(name, "a list")
        made = []
        for entry in value:
            item = make(entry)
            if item is None:
                self.refuse(name, f"a list of {wanted}")
            made.append(item)
        return tuple(made)

    def ids(self, name: str) -> tuple[str, ...]:
        """Take a list of uuids; absent means empty."""
        return self.items(name, lambda value: value if hexadecimal(value) else None, "uuids")

    def names(self, name: str) -> tuple[str, ...]:
        """Take a list of strings; absent means empty."""
        return self.items(name, lambda value: value if type(value) is str else None, "strings")

    def rules(self, name: str) -> tuple[str, ...] | None:
        """Take a list of strings, which may be empty; None: absent."""
        return self.names(name) if name in self._remaining else None

    def nodes(self, name: str) -> tuple[Node, ...]:
        """Take a list of [term, step]; absent means empty."""
        return self.items(name, _node, "[term, step]")

    def checkpoint_id(self, name: str) -> CheckpointId | None:
        """Take [term, step, state] or null; absent means null."""
        value = self._remaining.pop(name, None)
        if value is None:
            return None
        if type(value) is not list or len(value) != 3 or _node(value[:2]) is None or not hexadecimal(value[2]):
            self.refuse(name, "[term, step, state]")
        return CheckpointId(*value)

    def tags(self, name: str) -> dict[str, Node | None]:
        """Take an object of tag names to [term, step] or null; absent means empty."""
        tags: dict[str, Node | None] = {}
        for tag, value in self.mapping(name).items():
            node = _node(value)
            if not valid_tag(tag) or (node is None and value is not None):
                self.refuse(name, "an object of tag names to [term, step] or null")
            tags[tag] = node
        return tags


def _node(value: Any) -> Node | None:
    if type(value) is list and len(value) == 2 and is_term(value[0]) and natural(value[1]):
        return (value[0], value[1])
    return None
