"""The size of the long tests: a sample in CI, everything with ``CKPTSTORE_TESTS=long`` (``make test-long``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["LONG", "in_turn", "long_only", "short_or"]

_T = TypeVar("_T")
LONG = os.environ.get("CKPTSTORE_TESTS") == "long"

long_only = pytest.mark.skipif(not LONG, reason="the long form: CKPTSTORE_TESTS=long, or make test-long")
"""Marks tests that CI leaves out because shorter tests cover the same kind of case."""


def short_or(short: _T, long: _T) -> _T:
    """The cases to try, or their number: in CI, or in the long form."""
    return long if LONG else short


def in_turn(names: Sequence[Any], values: Sequence[Any], each: int = 1) -> list[Any]:
    """Parameters: in CI every name with `each` of the values, in rotation; in the long form every name with all values.

    So CI tries every name and every value, but not every combination. A value that has several parts is a tuple.
    """
    found = []
    for place, name in enumerate(names):
        for at, value in enumerate(values):
            now = (at - place * each) % len(values) < each
            parts = value if isinstance(value, tuple) else (value,)
            ident = "-".join(map(str, (name, *parts)))
            found.append(pytest.param(name, *parts, marks=() if now else long_only, id=ident))
    return found
