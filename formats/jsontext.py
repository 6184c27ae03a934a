"""Write canonical JSON text, and strictly parse untrusted JSON.

Canonical text is ASCII, without white space and NaN, with members in the given order. The order is part of the text
because the order of a state's keys is part of the state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

from ckptstore.errors import FormatError

__all__ = ["MAX_ARRAYS", "MAX_DEPTH", "MAX_DIGITS", "MAX_MARKS", "MAX_STRING", "bounded", "check", "dumps", "loads"]

_Pairs: TypeAlias = list[tuple[str, Any]]

MAX_DEPTH = 256
MAX_MARKS = 1 << 24
"""Maximum commas and opening brackets of a text outside of its strings. They bound its number of values."""
MAX_ARRAYS = 1 << 21
"""Maximum opening brackets among them: an empty array has 2 bytes of text and 60 of memory, an object 200."""
MAX_STRING = 1 << 26
"""Maximum bytes of text between the quotes of a string."""
MAX_DIGITS = 4300
"""Maximum digits of a number: CPython's limit for int(text), stated here because other readers must know it."""


def dumps(value: Any) -> bytes:
    """Return the canonical JSON text of `value`.

    Raises:
        ValueError: a float is NaN or infinite (the typed tree writes those as tags).
        TypeError: JSON cannot represent an object in `value`.
    """
    return _CANONICAL.encode(value).encode("ascii")


def bounded(value: Any, *, what: str, max_marks: int = MAX_MARKS) -> bytes:
    """Return `dumps(value)` after checking that it does not have too many values for `loads`.

    Raises:
        FormatError: too many values: a text must not be written if it cannot be read.
        ValueError, TypeError: see `dumps`.
    """
    text = dumps(value)
    check(text, what=what, max_marks=max_marks)
    return text


def check(text: bytes, *, what: str, max_marks: int = MAX_MARKS) -> None:
    """Raise `FormatError` if `loads` would refuse a text with so many values. Takes 1 % of the time of parsing it."""
    _check_marks(text, what, max_marks)


def loads(
    data: bytes | memoryview,
    *,
    what: str,
    max_bytes: int,
    max_depth: int = MAX_DEPTH,
    max_marks: int = MAX_MARKS,
    shared: bool = False,
) -> Any:
    """Parse JSON from an untrusted source. Memory is bounded by 64 bytes and a member's name for each value.

    Args:
        data: UTF-8 text.
        what: names the source in errors.
        max_bytes: maximum length of the text, checked before it is parsed.
        max_depth: maximum nesting, checked before it is parsed.
        max_marks: maximum number of commas and opening brackets outside of strings, checked before it is parsed, as is
            the limit of `MAX_ARRAYS` brackets.
        shared: equal objects whose only member is a string are one object, which nobody may change. The trees of many
            steps have one for each tensor of each step.

    Raises:
        FormatError: not JSON, a duplicate key, NaN or Infinity, a text, string or number that is too long, nesting that
            is too deep, or too many values.
    """
    text = bytes(data)
    if len(text) > max_bytes:
        raise FormatError(f"{what}: {len(text)} bytes of JSON, at most {max_bytes} are allowed")
    _check_marks(text, what, max_marks)
    _check_strings(text, what)
    _check_depth(text, what, max_depth)

    def refuse(token: str) -> NoReturn:
        raise FormatError(f"{what}: {token} is not allowed in JSON")

    def integer(token: str) -> int:
        return int(_checked(token, what))

    def real(token: str) -> float:
        value = float(_checked(token, what))
        if not math.isfinite(value):
            raise FormatError(f"{what}: {token[:40]} is beyond a double's range")
        return value

    try:
        # Our functions would be called for every number and take ten times as long as Python's. They are used only if a
        # number may be too long or too large (or a string looks like one).
        long = _has_digits(text, MAX_DIGITS // 3 + 1)  # a number has three parts
        large = long or _LARGE_EXPONENT.search(text) is not None or _has_digits(text, 300)
        return json.loads(
            _letters(text, what),
            parse_constant=refuse,
            parse_int=integer if long else None,
            parse_float=real if large else None,
            object_pairs_hook=_object_maker(what, shared),
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not JSON: {error}") from error


def _object_maker(what: str, shared: bool) -> Callable[[_Pairs], dict[str, Any]]:
    """Return what makes an object of its members. `shared`: see `loads`."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def members(pairs: _Pairs) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FormatError(f"{what}: duplicate JSON key {_twice(pairs)!r}")
        return found

    def few_members(pairs: _Pairs) -> dict[str, Any]:
        if len(pairs) != 1 or type(pairs[0][1]) is not str:
            return members(pairs)
        return known.get(pairs[0]) or known.setdefault(pairs[0], dict(pairs))

    return few_members if shared else members


def _letters(text: bytes, what: str) -> str:
    """Decode the text. Surrogates become escapes, so that high and low ones are joined however each is written."""
    # Decoded here: from bytes Python would also accept UTF-16 and UTF-32, in which brackets would not be counted.
    # Lone surrogates are allowed: a document inside a header may contain them, and they are escaped when written.
    letters = text.decode("utf-8", "surrogatepass")
    if text.isascii() or not _RAW_SURROGATE.search(text):
        return letters
    if _BROKEN_ESCAPE.search(letters):
        raise FormatError(f"{what}: not JSON: a backslash before a surrogate")
    # Prevents: two texts with one canonical form: one with two surrogates, one with the character they stand for.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", letters)


def _check_marks(text: bytes, what: str, max_marks: int) -> None:
    """Raise `FormatError` if the text has too many values. Takes 1 % of the time of parsing it."""
    arrays, marks = _marks(text)
    if arrays > MAX_ARRAYS or marks > max_marks:  # strings may contain some of them: count exactly
        counted = [_marks(piece) for piece in _without_strings(text)]
        arrays, marks = sum(one for one, _ in counted), sum(both for _, both in counted)
    if arrays > MAX_ARRAYS or marks > max_marks:
        most = f"at most {MAX_ARRAYS} and {max_marks} are allowed"
        raise FormatError(f"{what}: JSON of {arrays} arrays and objects and {marks} values; {most}")


def _check_depth(text: bytes, what: str, max_depth: int) -> None:
    """Raise `FormatError` if arrays and objects are nested too deep."""
    # A quick bound first: only text with many brackets can be deep and needs the exact scan.
    if text.count(b"[") + text.count(b"{") > max_depth and _depth(text) > max_depth:
        raise FormatError(f"{what}: JSON nested deeper than {max_depth}")


def _check_strings(text: bytes, what: str) -> None:
    """Raise `FormatError` if a string is too long. Only a text longer than the limit can contain one."""
    if len(text) <= MAX_STRING:
        return
    for found in _STRING.finditer(text):
        if found.end() - found.start() - 2 > MAX_STRING:
            raise FormatError(f"{what}: a string longer than {MAX_STRING} bytes")


def _twice(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key that occurs again."""
    seen: set[str] = set()
    return next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _checked(token: str, what: str) -> str:
    """Return the token of a number. Raises `FormatError` if it has too many digits."""
    digits = len(token) - sum(map(token.count, "-+.eE"))
    if digits > MAX_DIGITS:
        raise FormatError(f"{what}: a number of {digits} digits, at most {MAX_DIGITS} are allowed")
    return token


def _has_digits(text: bytes, count: int) -> bool:
    """Whether so many digits stand in a row. Most texts are columns of short numbers, which a sample rules out."""
    sampled = re.search(rb"[0-9]{%d}" % (count // _STRIDE), text[::_STRIDE])
    return sampled is not None and re.search(rb"(?<![0-9])[0-9]{%d}" % count, text) is not None


def _marks(text: bytes) -> tuple[int, int]:
    """Return (opening brackets, opening brackets and commas)."""
    arrays = text.count(b"[") + text.count(b"{")
    return arrays, arrays + text.count(b",")


_CANONICAL = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_CLOSED = re.compile(rb'(?:[^"]*+"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[^"]*+', re.DOTALL)
_PIECE = 1 << 18
_STRIDE = 17  # no column has this period: its numbers have fewer digits, or 16 without commas
_LARGE_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
_RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BROKEN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[\ud800-\udfff]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 or -1, as signed bytes


def _without_strings(text: bytes) -> Iterator[bytes]:
    """Yield the text without its strings, piece by piece.

    A substitution in the whole text at once would hold one small object for each string, of which there may be
    millions.
    """
    position = 0
    while position < len(text):
        piece = text[position : position + _PIECE]
        whole = _CLOSED.match(piece).end()  # type: ignore[union-attr] # the pattern matches any text
        yield _STRING.sub(b"", piece[:whole])
        position += whole
        if whole < len(piece):  # a string begins here and crosses the end of the piece
            position = _STRING.match(text, position).end()  # type: ignore[union-attr]


def _depth(text: bytes) -> int:
    """Return the nesting depth of JSON text, without brackets inside strings. Linear time, no recursion."""
    import numpy as np  # few texts are deep; `ckpt log` reads none that is

    deepest = depth = 0
    for piece in _without_strings(text):
        brackets = piece.translate(_STEPS, _NO_BRACKET)
        if brackets:
            depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int64)
            deepest = max(deepest, depth + int(depths.max()))
            depth += int(depths[-1])
    return deepest
