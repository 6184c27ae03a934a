"""Add up deltas of additive codecs, so that threads can decode parts of a chain separately and then add them (a tree
instead of a line)."""

from __future__ import annotations

from ckptstore.formats.codecs.codec import Codec
from ckptstore.formats.codecs.kernels import WORDS, Bytes


def add(codec: Codec, later: Bytes, into: Bytes) -> None:
    """Add a sum of deltas to ``into``: a sum of earlier deltas, or the base itself. Both have the same length.

    Raises:
        ValueError: the codec is not additive, or the lengths differ.
    """
    if not codec.additive or len(later) != len(into):
        raise ValueError(
            f"deltas of {codec.name}, of {len(later)} and {len(into)} bytes, do not add up: the codec must be additive "
            "and the lengths equal"
        )
    whole = len(into) // codec.word * codec.word
    codec.sum_up(later[:whole].view(WORDS[codec.word]), into[:whole].view(WORDS[codec.word]))
    into[whole:] = later[whole:]  # trailing bytes that make no whole word are stored unchanged
