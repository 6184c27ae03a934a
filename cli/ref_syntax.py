"""Recognizes words of a command line that are written like a REF or a range."""

from __future__ import annotations

from ckptstore.formats.history.checkpoint_ref import LIKE_A_RANGE, LIKE_A_REF

__all__ = ["LIKE_A_RANGE", "LIKE_A_REF", "like_a_ref"]


def like_a_ref(word: str) -> bool:
    """Tell whether `word` is written like a REF."""
    return LIKE_A_REF.match(word) is not None
