"""Numbers and texts that users give as options: what cannot be meant is refused by the option's name."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

from ckptstore.errors import UsageError

__all__ = ["MOST_BYTES", "MOST_THREADS", "real", "seconds", "texts", "whole"]

MOST_THREADS: Final = 1024
"""More in one pool are a mistake: each takes memory and time, and a core or two is busy with one."""
MOST_BYTES: Final = 1 << 48
"""More memory is not to be had: it is what a process may address."""
_LONGEST: Final = 1e8
"""Seconds, three years: the longest that the system's clocks wait for."""


def whole(option: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number of any type (numpy's, too) as Python's. Raises `UsageError` for others, and for truth values."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise UsageError(f"{option}: {_shown(value)}; a whole number {bounds} is needed")
    return number


def real(option: str, value: Any, *, least: float = 0.0, above: bool = False, unit: str = "") -> float:
    """A number of any real type as Python's; infinity is one.

    Args:
        least: what it must be at least.
        above: `least` itself will not do.
        unit: what is counted, for the message.

    Raises:
        UsageError: it is no number, not a number (NaN), or too little.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number > least or (number == least and not above)):
        bounds = f"more than {least:g}" if above else f"{least:g} or more"
        raise UsageError(f"{option}: {_shown(value)}; {bounds} {unit}is needed, or None")
    return number


def seconds(option: str, value: Any, *, above: bool = False) -> float | None:
    """A time in seconds; what nobody can wait for (years, infinity) is None: no limit. Raises `UsageError` as `real`.

    Args:
        above: 0 will not do.
    """
    if value is None:
        return None
    number = real(option, value, above=above, unit="seconds ")
    return None if number > _LONGEST else number


def texts(option: str, value: Any) -> tuple[str, ...]:
    """A text, or several, or None for none. Raises `UsageError` for anything else."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise UsageError(f"{option}: {_shown(value)}; a text is needed, or several")
    several = tuple(value)
    for one in several:
        if not isinstance(one, str):
            raise UsageError(f"{option}: {_shown(one)} among them is no text")
    return several


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # a number of more digits than Python writes
        return f"{type(value).__name__} that is too long to be shown"
