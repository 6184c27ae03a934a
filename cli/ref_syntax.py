"""How REFs and ranges of them are written: what a word of a command line is taken for."""

from __future__ import annotations

from ckptstore.formats.checkpoint_ref import LIKE_A_RANGE, LIKE_A_REF

__all__ = ["LIKE_A_RANGE", "LIKE_A_REF", "like_a_ref"]


def like_a_ref(word: str) -> bool:
    """Whether `word` is written like a REF."""
    return LIKE_A_REF.match(word) is not None
