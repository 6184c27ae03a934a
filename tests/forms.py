"""How much the long tests try: a sample in CI, all of it with ``CKPTSTORE_TESTS=long`` (``make test-long``)."""

from __future__ import annotations

import os

import pytest

__all__ = ["LONG", "long_only", "short_or"]

LONG = os.environ.get("CKPTSTORE_TESTS") == "long"

long_only = pytest.mark.skipif(not LONG, reason="the long form: CKPTSTORE_TESTS=long, or make test-long")
"""What its short neighbours cover in kind; CI leaves it out to stay short."""


def short_or(short: int, long: int) -> int:
    """How many of something to try in CI, or in the long form."""
    return long if LONG else short
