"""Parse a REF, the text that names a checkpoint, into a value.

The forms are ``latest`` | ``STEP`` | ``STEP@TERM`` | ``tag:NAME``, and ``A..B`` for a range of two. Only this module
knows how they are written. `ckptstore.log.refs` looks up a `Ref` in a catalog.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import StepOrderError, UsageError
from ckptstore.formats.history.records import Node, ref_of, valid_tag

__all__ = [
    "LATEST",
    "LIKE_A_RANGE",
    "LIKE_A_REF",
    "Ref",
    "check_tag",
    "node_of",
    "parse_range",
    "step_number",
    "text_of",
]

LATEST: Final = "latest"
_TAG: Final = "tag:"
_NUMBERS: Final = r"([0-9]{1,16})(?:@([0-9]{1,10}))?"
_STEP: Final = re.compile(rf"{_NUMBERS}\Z")
_WRITTEN: Final = rf"(?:{LATEST}|{_NUMBERS}|{_TAG}.+)"
LIKE_A_REF: Final = re.compile(rf"{_WRITTEN}\Z")
"""Matches a word that has the form of a REF, even if its tag name is not allowed."""
LIKE_A_RANGE: Final = re.compile(rf"{_WRITTEN}\.\.{_WRITTEN}\Z")


@dataclass(frozen=True, slots=True)
class Ref:
    """A parsed REF. All attributes are None for ``latest``.

    Attributes:
        step: the step of ``STEP`` or ``STEP@TERM``.
        term: the term of ``STEP@TERM``; None: the newest term that has the step.
        tag: the name in ``tag:NAME``. An invalid tag name raises `UsageError`.
    """

    step: int | None = None
    term: int | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        if self.tag is not None:
            check_tag(self.tag)

    @classmethod
    def parse(cls, ref: object, tags: Iterable[str] = ()) -> Ref:
        """Parse a REF. Surrounding spaces are ignored. A `Ref` is returned unchanged.

        Args:
            ref: a string, or an integer of any type, which is a STEP.
            tags: existing tags; the error suggests the one that was probably meant.

        Raises:
            UsageError: `ref` is not a REF, or names an invalid tag.
        """
        if isinstance(ref, Ref):
            return ref
        text = ref.strip() if isinstance(ref, str) else _number(ref)
        if text == LATEST:
            return cls()
        if text.startswith(_TAG):
            return cls(tag=text.removeprefix(_TAG))
        match = _STEP.match(text)
        if match is None:
            raise _no_ref(text, tags)
        return cls(int(match[1]), None if match[2] is None else int(match[2]))

    @property
    def is_latest(self) -> bool:
        """Whether the REF is ``latest``."""
        return self.step is None and self.tag is None

    @property
    def node(self) -> Node | None:
        """(term, step) of ``STEP@TERM``; None for any other REF."""
        return None if self.step is None or self.term is None else (self.term, self.step)

    def __str__(self) -> str:
        """Return the text of the REF: `Ref.parse` of it is an equal `Ref`."""
        if self.tag is not None:
            return f"{_TAG}{self.tag}"
        if self.step is None:
            return LATEST
        return str(self.step) if self.term is None else ref_of((self.term, self.step))


def parse_range(text: str, tags: Iterable[str] = ()) -> tuple[Ref, Ref]:
    """Parse ``A..B`` into two REFs. Raises `UsageError`."""
    sides = [side.strip() for side in text.split("..")]
    if len(sides) != 2 or not all(sides):
        raise UsageError(f"{text!r} is not a range; write A..B with two REFs, as in 1000..1100 or 1000@2..latest")
    return Ref.parse(sides[0], tags), Ref.parse(sides[1], tags)


def node_of(ref: str) -> Node:
    """Parse ``STEP@TERM``, as `ref_of` writes it, into (term, step). Raises `UsageError` for any other text."""
    if (node := Ref.parse(ref).node) is None:
        raise UsageError(f"{ref!r:.80} is not STEP@TERM")
    return node


def text_of(ref: object) -> str:
    """Return a REF as text, for a message to the process that parses it and looks it up.

    Args:
        ref: a string, an integer, or an object whose attribute `ref` names a checkpoint.

    Raises:
        UsageError: `ref` is none of these.
    """
    if isinstance(ref, str):
        return ref
    named = getattr(ref, "ref", None)
    return named if isinstance(named, str) else _number(ref)


def step_number(step: Any) -> int:
    """Return a step as a Python int. Any integer type is accepted, including numpy's and torch's scalars.

    Raises:
        StepOrderError: `step` is anything else; booleans and floats are refused, even whole ones.
    """
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(step)
    except TypeError:
        raise StepOrderError(f"step {step!r:.80}: a whole number from 0 to 2^53 - 1 is needed") from None


def check_tag(name: object) -> None:
    """Raise `UsageError` if `name` is not a valid tag name."""
    if not isinstance(name, str) or not valid_tag(name):
        raise UsageError(f"{name!r:.80} is not a tag name: 1-128 letters, digits and _.+/-")


def _number(ref: object) -> str:
    try:
        return str(step_number(ref))
    except StepOrderError:
        raise _no_ref(ref) from None


def _no_ref(ref: object, tags: Iterable[str] = ()) -> UsageError:
    from difflib import get_close_matches  # imported only for an error, so that the command starts fast

    error = UsageError(f"{ref!r:.80} is not a REF; use latest, STEP, STEP@TERM or tag:NAME")
    if isinstance(own := getattr(ref, "ref", None), str):  # a CheckpointInfo
        error.add_note(f"name a checkpoint by its ref: {own!r}")
    bare = {LATEST: LATEST, **{name: f"{_TAG}{name}" for name in tags}}
    if close := get_close_matches(str(ref)[:80], bare, n=1):
        error.add_note(f"did you mean {bare[close[0]]}?")
    return error
