"""Deltas on deltas: chains of additive codecs may be summed up in any grouping, so that halves of a chain can be
decoded by different threads and then added (a tree instead of a line)."""

from __future__ import annotations

from ckptstore.formats.codecs.codec import Codec
from ckptstore.formats.codecs.kernels import WORDS, Bytes


def add(codec: Codec, later: Bytes, into: Bytes) -> None:
    """Lay a sum of deltas over ``into``, a sum of earlier ones, or the base itself. Both have one length.

    Raises:
        ValueError: not an additive codec.
    """
    if not codec.additive or len(later) != len(into):
        raise ValueError(f"{codec.name} is not summed up, or {len(later)} and {len(into)} bytes are not")
    whole = len(into) // codec.word * codec.word
    codec.sum_up(later[:whole].view(WORDS[codec.word]), into[:whole].view(WORDS[codec.word]))
    into[whole:] = later[whole:]  # bytes that make no word are stored as they are
