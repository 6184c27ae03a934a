"""How REFs and ranges of them are written: what a word of a command line is taken for."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["LIKE_A_RANGE", "LIKE_A_REF", "like_a_ref"]

_A_REF: Final = r"(?:latest|[0-9]{1,16}(?:@[0-9]{1,10})?|tag:.+)"
LIKE_A_REF: Final = re.compile(rf"{_A_REF}\Z")
LIKE_A_RANGE: Final = re.compile(rf"{_A_REF}\.\.{_A_REF}\Z")


def like_a_ref(word: str) -> bool:
    """Whether `word` is written like a REF."""
    return LIKE_A_REF.match(word) is not None
