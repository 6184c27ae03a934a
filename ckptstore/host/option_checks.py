"""Check numbers and strings that users pass as options. An error names the option, the value and the valid range."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

from ckptstore.errors import UsageError

__all__ = ["MOST_BYTES", "MOST_THREADS", "real", "seconds", "texts", "whole"]

MOST_THREADS: Final = 1024
"""Most threads of one pool. A larger number is a mistake: each thread takes memory, and one keeps a core busy."""
MOST_BYTES: Final = 1 << 48
"""Most bytes of memory: a process cannot address more."""
_LONGEST: Final = 1e8
"""Longest finite wait, in seconds (three years): what the system's clocks support."""


def whole(option: str, value: Any, least: int, most: int | None = None) -> int:
    """Convert a whole number of any type (numpy's, too) to `int`.

    Raises:
        UsageError: the value is not a whole number, is a bool, or is out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{option}: {_shown(value)}; pass a whole number {bounds}")
    return number


def real(option: str, value: Any, *, least: float = 0.0, above: bool = False, unit: str = "") -> float:
    """Convert a number of any real type to `float`. Infinity is valid.

    Args:
        least: the smallest valid number.
        above: `least` itself is invalid.
        unit: the unit, for the message.

    Raises:
        UsageError: the value is not a number, is NaN, or is too small.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number > least or (number == least and not above)):
        bounds = f"more than {least:g}" if above else f"{least:g} or more"
        raise UsageError(f"{option}: {_shown(value)}; pass {bounds}{unit}, or None")
    return number


def seconds(option: str, value: Any, *, above: bool = False) -> float | None:
    """Convert a time in seconds to `float`. More than three years, or infinity, becomes None: no limit.

    Args:
        above: 0 is invalid.

    Raises:
        UsageError: as `real`.
    """
    if value is None:
        return None
    number = real(option, value, above=above, unit=" seconds")
    return None if number > _LONGEST else number


def texts(option: str, value: Any) -> tuple[str, ...]:
    """Convert a string, several strings or None to a tuple of strings. Raises `UsageError` for anything else."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise UsageError(f"{option}: {_shown(value)}; pass a string or several strings")
    several = tuple(value)
    for one in several:
        if not isinstance(one, str):
            raise UsageError(f"{option}: one of the values, {_shown(one)}, is not a string")
    return several


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # a number with more digits than Python formats
        return f"{type(value).__name__} that is too long to show"
