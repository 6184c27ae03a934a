"""Taking checked members out of parsed JSON that nobody has checked.

Every method removes the member it returns, so that what is left over is what this version does not know and has to be
preserved. A member of the wrong type or out of range raises `FormatError` naming the source and the member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ckptstore.errors import FormatError
from ckptstore.formats.records import CheckpointId, Node, valid_tag

__all__ = ["MAX_INT", "MAX_TERM", "Members", "hexadecimal", "is_term", "is_time", "natural"]

MAX_INT = 2**53
"""Largest number in a record: what every JSON reader represents exactly."""

MAX_TERM = 10**10 - 1
"""Highest term: a key has ten digits for it."""
_HEX = frozenset("0123456789abcdef")
_T = TypeVar("_T")


def natural(value: Any) -> bool:
    """Whether `value` is an integer in 0..2^53 (and no bool)."""
    return type(value) is int and 0 <= value <= MAX_INT


def is_term(value: Any) -> bool:
    """Whether `value` is an integer in 1..`MAX_TERM`."""
    return natural(value) and 1 <= value <= MAX_TERM


def is_time(value: Any) -> bool:
    """Whether `value` is a finite number of moderate size (JSON's ``1e999`` is infinite)."""
    return (type(value) is float or type(value) is int) and -MAX_INT <= value <= MAX_INT


def hexadecimal(value: Any, digits: int = 32) -> bool:
    """Whether `value` is a string of exactly `digits` lower-case hex digits."""
    return type(value) is str and len(value) == digits and _HEX.issuperset(value)


class Members:
    """The members of one JSON object, taken out one by one. `what` names the source in errors."""

    __slots__ = ("_left", "_what")

    def __init__(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise FormatError(f"{what}: expected a JSON object, found {type(value).__name__}")
        self._left: dict[str, Any] = dict(value)
        self._what = what

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Raise `FormatError` about member `name`."""
        raise FormatError(f"{self._what}: member {name!r} is not {wanted}")

    def rest(self) -> dict[str, Any]:
        """What was not taken."""
        return self._left

    def number(self, name: str, *, least: int = 0) -> int:
        """An integer in `least`..2^53."""
        value = self._left.pop(name, None)
        if type(value) is not int or not least <= value <= MAX_INT:
            self.refuse(name, f"an integer in {least}..2^53")
        return value

    def term(self, name: str = "term") -> int:
        """A term, from 1 to `MAX_TERM`."""
        term = self.number(name, least=1)
        if term > MAX_TERM:
            self.refuse(name, f"a term, at most {MAX_TERM}")
        return term

    def time(self, name: str) -> float:
        """A number of seconds."""
        value = self._left.pop(name, None)
        if not is_time(value):
            self.refuse(name, "a number of seconds")
        return float(value)

    def digest(self, name: str) -> str:
        """32 hex digits."""
        value = self._left.pop(name, None)
        if not hexadecimal(value):
            self.refuse(name, "32 lower-case hex digits")
        return str(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._left.pop(name, default)
        if type(value) is not str:
            self.refuse(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; absent means False."""
        value = self._left.pop(name, False)
        if type(value) is not bool:
            self.refuse(name, "a boolean")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; absent means empty."""
        value = self._left.pop(name, {})
        if type(value) is not dict:
            self.refuse(name, "an object")
        return value

    def items(self, name: str, make: Callable[[Any], _T | None], wanted: str) -> tuple[_T, ...]:
        """A list whose entries `make` understands (None: it does not); absent means empty."""
        value = self._left.pop(name, [])
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
        """A list of uuids; absent means empty."""
        return self.items(name, lambda value: value if hexadecimal(value) else None, "uuids")

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent means empty."""
        return self.items(name, lambda value: value if type(value) is str else None, "strings")

    def rules(self, name: str) -> tuple[str, ...] | None:
        """A list of strings that may be empty; None: absent."""
        return self.names(name) if name in self._left else None

    def nodes(self, name: str) -> tuple[Node, ...]:
        """A list of [term, step]; absent means empty."""
        return self.items(name, _node, "[term, step]")

    def checkpoint_id(self, name: str) -> CheckpointId | None:
        """[term, step, state] or null; absent means null."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if type(value) is not list or len(value) != 3 or _node(value[:2]) is None or not hexadecimal(value[2]):
            self.refuse(name, "[term, step, state]")
        return CheckpointId(*value)

    def tags(self, name: str) -> dict[str, Node | None]:
        """An object of tag names to [term, step] or null; absent means empty."""
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
