"""The parts of an object in a state's tree (SPEC.md 3.4), and the checks of parts from an untrusted source."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import FormatError

__all__ = ["KIND", "Make", "Parts", "need", "text_of"]

KIND: Final = re.compile(r"[a-z][a-z0-9_.]{0,63}")


@dataclass(frozen=True, slots=True)
class Parts:
    """An object taken apart. `value` may hold anything that a state may hold; `name` is empty if the kind has none."""

    kind: str
    value: Any
    name: str = ""


Make = Callable[[str, Any, str], Any]
"""Called with kind, parts and name of an object; returns what stands for it."""


def need(right: bool) -> None:
    """Raise `FormatError` if parts are not `right`."""
    if not right:
        raise FormatError("its parts are of another form")


def text_of(value: Any) -> str:
    """A part that has to be a text. Raises `FormatError`."""
    need(type(value) is str)
    return str(value)
