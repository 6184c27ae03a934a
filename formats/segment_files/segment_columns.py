"""Read and write columns: compact lists of hashes, digests and numbers in a segment's header or index.

A column describes thousands of chunks without a JSON object for each. Hashes and digests are one JSON string: 16
lower-case hex digits each, or 16 dashes for a missing value. Such a string contains no quotes (they would be escaped
twice in a safetensors header), and its length is known before any hash is. Other numbers are arrays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats.history.members import MAX_INT

__all__ = [
    "WIDTH",
    "cell",
    "digest_column",
    "hash_column",
    "known_hashes",
    "numbers",
    "optional_hashes",
    "read_digests",
    "read_known_hashes",
]

WIDTH: Final = 16
_NONE: Final = "-" * WIDTH
_SHORT: Final = 8
_CELL = re.compile(r"[0-9a-f]{16}")
_KNOWN = re.compile(r"[0-9a-f]*")
_COLUMN = re.compile(r"(?:[0-9a-f]{16}|-{16})*")


def hash_column(hashes: Iterable[str | None]) -> str:
    """Join chunk hashes into a column.

    Raises:
        FormatError: a hash is not 16 hex digits.
    """
    cells = [_NONE if cell is None else cell for cell in hashes]
    for cell in cells:
        if cell is not _NONE and _CELL.fullmatch(cell) is None:
            raise FormatError(f"{cell!r:.40} is not a chunk hash of {WIDTH} hex digits")
    return "".join(cells)


def digest_column(digests: Iterable[int | None]) -> str:
    """Join state digests (unsigned 64-bit) into a column.

    Raises:
        FormatError: a digest does not fit 64 bits.
    """
    digests = list(digests)
    if not all(digest is None or 0 <= digest < 1 << 64 for digest in digests):
        raise FormatError("a digest is not an unsigned 64-bit number")
    return "".join(_NONE if digest is None else f"{digest:0{WIDTH}x}" for digest in digests)


def optional_hashes(value: Any, count: int, what: str) -> str:
    """Return a column of `count` hashes or dashes. Raises `FormatError`, which names `what`, for anything else."""
    return _column(value, count, what, _COLUMN)


def known_hashes(value: Any, count: int, what: str) -> str:
    """Return a column of `count` hashes, none missing. Raises `FormatError`, which names `what`, for anything else."""
    return _column(value, count, what, _KNOWN)


def cell(column: str, place: int) -> str | None:
    """Return one hash of a column; None if it is missing."""
    found = column[WIDTH * place : WIDTH * place + WIDTH]
    return None if found == _NONE else found


def read_known_hashes(value: Any, count: int, what: str) -> list[str]:
    """Return the hashes of a column without missing ones. Raises `FormatError`, which names `what`."""
    return _cells(known_hashes(value, count, what))


def read_digests(columns: dict[str, Any], count: int, where: str) -> list[int | None]:
    """Remove column ``digests`` from `columns` and return its `count` digests, each None if there is no such column.

    Raises:
        FormatError: the column is not made of `count` digests.
    """
    if "digests" not in columns:
        return [None] * count
    column = optional_hashes(columns.pop("digests"), count, f"{where}: digests")
    return [None if found == _NONE else int(found, 16) for found in _cells(column)]


def numbers(value: Any, what: str, count: int | None = None, limit: int = MAX_INT) -> tuple[int, ...]:
    """Return an array of integers in [0, limit] as a tuple.

    Args:
        value: the parsed JSON value.
        what: names the array in errors.
        count: required length; None: any length.
        limit: the largest number allowed.

    Raises:
        FormatError: `value` is anything else.
    """
    if type(value) is not list or (count is not None and len(value) != count):
        raise FormatError(f"{what}: not an array of {'numbers' if count is None else f'{count} numbers'}")
    if len(value) > _SHORT:  # three passes without a step of Python for each number
        wrong = set(map(type, value)) != {int} or min(value) < 0 or max(value) > limit
    else:  # a loop: a generator would take twice as long
        wrong = False
        for number in value:
            wrong = wrong or type(number) is not int or not 0 <= number <= limit
    if wrong:
        raise FormatError(f"{what}: something other than numbers from 0 to {limit}")
    return tuple(value)


def _column(value: Any, count: int, what: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or len(value) != WIDTH * count:
        raise FormatError(f"{what}: not a column of {count} times {WIDTH} hex digits")
    if pattern.fullmatch(value) is None:
        raise FormatError(f"{what}: something other than hex digits in a column")
    return value


def _cells(column: str) -> list[str]:
    return [column[start : start + WIDTH] for start in range(0, len(column), WIDTH)]
