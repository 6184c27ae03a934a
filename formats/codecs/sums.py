"""Deltas on deltas: ``xor`` and ``sub`` chains may be summed up in any grouping, so that halves of a chain can be
decoded by different threads and then added (a tree instead of a line)."""

from __future__ import annotations

from ckptstore.formats.codecs.coding import Codec
from ckptstore.formats.codecs.deltas import Sub, Xor
from ckptstore.formats.codecs.kernels import WORDS, Bytes


def is_additive(codec: Codec) -> bool:
    """Whether decoding onto zeros gives what decoding onto anything adds: not where the base decides how to decode."""
    return isinstance(codec, Xor) or (isinstance(codec, Sub) and codec.context is None)


def add(codec: Codec, later: Bytes, into: Bytes) -> None:
    """Lay a sum of deltas over ``into``, a sum of earlier ones, or the base itself. Both have one length.

    Raises:
        ValueError: not an additive codec.
    """
    if not is_additive(codec) or len(later) != len(into):
        raise ValueError(f"{codec.name} is not summed up, or {len(later)} and {len(into)} bytes are not")
    assert isinstance(codec, Xor | Sub)
    whole = len(into) // codec.word * codec.word
    words, more = into[:whole].view(WORDS[codec.word]), later[:whole].view(WORDS[codec.word])
    if isinstance(codec, Xor):
        words ^= more
    else:
        words += more
    into[whole:] = later[whole:]  # bytes that make no word are stored as they are
