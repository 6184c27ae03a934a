"""Encode many chunks: the small ones together, by one call of a kernel.

A small chunk costs calls of Python, not bytes. So the small chunks among those that are encoded at once become one run
of bytes, and one call writes their payloads one after the other. Each payload is the one of ``block_loops.encode``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ckptstore.formats.codecs.block_loops import as_bytes, base_of, encode
from ckptstore.formats.codecs.blocks import MARGIN, OVERHEAD
from ckptstore.formats.codecs.codec import Buffer, Codec
from ckptstore.formats.codecs.kernels import PREPARED, Bytes, Counts
from ckptstore.formats.codecs.plane_coder import FAST, THRIFTY
from ckptstore.formats.codecs.raw_planes import MAPS, WORD_SIZES, Planes
from ckptstore.formats.codecs.tensor_pools import TINY
from ckptstore.formats.codecs.xor_sub import Sub, Xor
from ckptstore.formats.kernel_choice import hot, steady

__all__ = ["KINDS", "ChunkJob", "encode_all", "encoded_chunks"]

KINDS: Final[tuple[Codec, ...]] = (
    *(Planes(word, name) for name in MAPS for word in WORD_SIZES),
    *(Sub(word) for word in WORD_SIZES),
    *(Xor(word) for word in WORD_SIZES),
)
"""The codecs that write a block as one group of words. The kernel knows each by its place here."""
_PLACES: Final = {codec: place for place, codec in enumerate(KINDS)}
_MOST: Final = 64
"""Chunks of one call. More save little, and a comparison with numpy (`kernel_choice`) would take long."""
_NOTHING: Final = np.empty(0, np.uint8)


class ChunkJob(NamedTuple):
    """A chunk to encode: the arguments of ``block_loops.encode``."""

    codec: Codec
    chunk: Buffer
    base: Buffer | None = None
    level: int = FAST


@steady
def encode_all(jobs: Sequence[ChunkJob]) -> list[Bytes]:
    """Encode chunks. Returns the payload of each; those of small chunks are parts of one array.

    Raises as ``block_loops.encode``.
    """
    payloads = [_NOTHING] * len(jobs)
    small: dict[int, list[int]] = {}
    for number, (codec, chunk, base, level) in enumerate(jobs):
        if level <= THRIFTY and len(as_bytes(chunk)) < TINY and codec in _PLACES:
            small.setdefault(level, []).append(number)
        else:
            payloads[number] = encode(codec, chunk, base, level=level)
    for level, numbers in small.items():
        for start in range(0, len(numbers), _MOST):
            some = numbers[start : start + _MOST]
            for number, payload in zip(some, _encoded([jobs[number] for number in some], level), strict=True):
                payloads[number] = payload
    return payloads


def _encoded(jobs: Sequence[ChunkJob], level: int) -> Iterator[Bytes]:
    """The payloads of small chunks."""
    chunks = [as_bytes(job.chunk) for job in jobs]
    bases = [base_of(job.codec, len(chunk), job.base) for job, chunk in zip(jobs, chunks, strict=True)]
    kinds = np.array([_PLACES[job.codec] for job in jobs], np.uint8)
    lengths = np.array([len(chunk) for chunk in chunks], np.int64)
    out = np.empty(int(lengths.sum()) + OVERHEAD * len(jobs) + MARGIN, np.uint8)
    made, ends = encoded_chunks(np.concatenate(chunks), np.concatenate(bases), kinds, lengths, level, out)
    at = 0
    for end in ends.tolist():
        yield made[at:end]
        at = end


@hot(PREPARED, reads=["new", "base", "kinds", "lengths"], destroys=["out"])
def encoded_chunks(
    new: Bytes, base: Bytes, kinds: Bytes, lengths: Counts, level: int, out: Bytes
) -> tuple[Bytes, Counts]:
    """Write the payloads of consecutive chunks.

    Args:
        new: the chunks.
        base: the same ranges of the base, of those chunks whose codec needs them.
        kinds: the codec of each chunk: its place among ``KINDS``.
        lengths: the bytes of each chunk, at most one block.
        level: ``FAST`` or ``THRIFTY``.
        out: memory for all payloads: ``OVERHEAD`` bytes more than each chunk, and ``MARGIN``.

    Returns:
        The part of ``out`` that the payloads take, and where each of them ends there.
    """
    ends = np.empty(len(lengths), np.int64)
    at = start = of_base = 0
    for number, (kind, length) in enumerate(zip(kinds.tolist(), lengths.tolist(), strict=True)):
        codec = KINDS[kind]
        needed = length * codec.base_ratio
        chunk, reference = new[start : start + length], base[of_base : of_base + needed]
        at += len(encode(codec, chunk, reference, out[at:], level))
        ends[number] = at
        start, of_base = start + length, of_base + needed
    return out[:at], ends
