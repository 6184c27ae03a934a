"""Compiled forms of kernels in ``kernels`` for whose results Python provides memory or tables."""

from __future__ import annotations

import numpy as np

from ckptstore.formats import core
from ckptstore.formats.codecs import blocks, kernels
from ckptstore.formats.codecs.kernels import N_LOG_N, Bytes, Counts, Words, scratch
from ckptstore.formats.codecs.plane_coder import compressed, decompressed


def pack_small(values: Bytes, bits: int) -> Bytes:
    """See ``kernels.pack_small``. For single bits, numpy's packing is as fast."""
    if bits == 1:
        return kernels.pack_small.reference(values, bits)
    out = np.empty((len(values) * bits + 7) // 8, np.uint8)
    core.pack_small(values, bits, out)
    return out


def unpack_small(packed: Bytes, bits: int, out: Bytes) -> None:
    """See ``kernels.unpack_small``."""
    if bits == 1:
        kernels.unpack_small.reference(packed, bits, out)
    else:
        core.unpack_small(packed, bits, out)


def take_exceptions(values: Words, limit: int, rest: Bytes) -> tuple[Bytes, Words]:
    """See ``kernels.take_exceptions``."""
    where = scratch("where", len(values), 4)
    found = core.find_exceptions(values, limit, where)
    steps, greater = np.empty(found + len(values) // 255, np.uint8), np.empty(found, values.dtype)
    count = core.take_exceptions(values, limit, where[:found], rest, steps, greater)
    return steps[:count], greater


def survey(values: Bytes) -> tuple[int, int, int]:
    """See ``kernels.survey``."""
    return core.survey(values, N_LOG_N)


def survey_packed(values: Bytes, bits: int) -> tuple[int, int, int, int]:
    """See ``kernels.survey_packed``."""
    return core.survey_packed(values, bits, N_LOG_N)


def classify(base: Words, shift: int, low: int, high: int, out: Bytes) -> Counts:
    """See ``kernels.classify``."""
    counts = np.empty((4, high - low + 1), np.int64)
    core.classify(base, shift, low, high, out, counts)
    return counts


def encoded_group(words: Words, level: int, nested: bool, out: Bytes) -> Bytes:
    """See ``blocks.encoded_group``."""
    if not len(words) or len(out) < words.nbytes + blocks.MARGIN:
        return blocks.encoded_group.reference(words, level, nested, out)
    space = scratch("groups", 8 * words.nbytes + (1 << 17))
    return out[: core.write_group(words, level, nested, N_LOG_N, space, out, compressed)]


def encoded_chunks(
    new: Bytes, base: Bytes, kinds: Bytes, lengths: Counts, level: int, out: Bytes
) -> tuple[Bytes, Counts]:
    """See ``chunk_batches.encoded_chunks``."""
    ends = np.empty(len(lengths), np.int64)
    space = scratch("groups", 9 * int(lengths.max(initial=0)) + (1 << 18))
    size = core.write_chunks(new, base, kinds, lengths, level, N_LOG_N, space, out, ends, compressed)
    return out[:size], ends


def decoded_group(data: Bytes, at: int, how: int, base: Words, out: Words) -> int:
    """See ``blocks.decoded_group``. The reference says what is damaged."""
    end = core.read_group(data, at, how, base, out, scratch("groups", 6 * out.nbytes + (1 << 17)), decompressed)
    return end if end >= 0 else blocks.decoded_group.reference(data, at, how, base, out)
