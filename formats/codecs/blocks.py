"""Words <-> groups of plane pieces: the framing that every plane codec shares.

A chunk of at most ``CHUNK`` logical bytes is coded as consecutive *blocks* of ``BLOCK`` logical bytes, the last
one shorter. A block fits a core's cache, so that a chain of deltas is folded block by block without going back to
memory, and a sample decides the modes of its planes anew, because tensors are not the same everywhere.

A *group* is a run of words coded together::

    wide     one byte: how many low bytes of each word are stored together and uncoded (0, 2, 4 or the word size);
             255 for a group of words that are all zero, which has nothing else
    words    those low bytes, little-endian (absent if wide is 0)
    pieces   one plane piece (``planecoder``) for each byte above, lowest first

With ``wide`` the word size a group costs one byte more than its words: no group ever costs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import kernels, planecoder
from ckptstore.formats.codecs.kernels import Bytes, Words
from ckptstore.formats.codecs.planecoder import FILL, RAW, SAMPLE, Cursor
from ckptstore.formats.errors import CorruptSegmentError

CHUNK = 16 << 20
BLOCK = 1 << 20
OVERHEAD = 16
"""The most bytes by which a block's payload may exceed the block: one for each group, of which it has at most 16."""
MARGIN = 32
"""What an encoder may write past the final end of a payload before it falls back to a smaller form."""
ZERO_GROUP = 255
_Sparse: TypeAlias = "tuple[npt.NDArray[np.intp], Bytes]"
_Tile: TypeAlias = "tuple[slice, Words]"


def block_count(length: int) -> int:
    """How many blocks a chunk of ``length`` logical bytes has."""
    return -(-length // BLOCK)


def bound(length: int) -> int:
    """The room an encoder needs for a chunk of ``length`` bytes."""
    return length + block_count(length) * OVERHEAD + MARGIN


def write_group(words: Words, out: Bytes, at: int, level: int) -> int:
    """Write the group of ``words`` to ``out[at:]``; returns where it ends, at most one byte beyond their size."""
    word, count = words.itemsize, len(words)
    wide, modes = _plan(words, level)
    if modes == [FILL] * word and not words.any():
        out[at] = ZERO_GROUP
        return at + 1
    if wide < word:
        planes: list[Words] = []
        if wide:
            planes.append(kernels.scratch("plane0", count, wide))
        planes += [kernels.scratch(f"plane{byte}", count) for byte in range(wide, word)]
        _split(words, wide, planes)
        end = at
        out[end] = wide
        end += 1
        if wide:
            out[end : end + count * wide] = planes[0].view(np.uint8)
            end += count * wide
        for plane, mode in zip(planes[1 if wide else 0 :], modes[wide:], strict=True):
            end = planecoder.encode(plane, out, end, mode, level)
        if end - at <= 1 + count * word:
            return end
    out[at] = word
    out[at + 1 : at + 1 + count * word] = words.view(np.uint8)
    return at + 1 + count * word


def _plan(words: Words, level: int) -> tuple[int, list[int]]:
    """From a sample of the words: how many low bytes to leave uncoded, and the mode of every byte plane."""
    word, count = words.itemsize, len(words)
    size = min(SAMPLE, max(SAMPLE // 4, count // 16))
    sampled = words
    if count > size:
        run, stride = size // 8, count // 8
        sampled = words[: stride * 8].reshape(8, stride)[:, :run].reshape(-1)
    table = sampled.view(np.uint8).reshape(-1, word)
    if level > planecoder.THRIFTY:
        return 0, [planecoder.ZSTD] * word
    modes = [planecoder.choose_mode(np.ascontiguousarray(table[:, byte]), level) for byte in range(word)]
    uncoded = next((byte for byte, mode in enumerate(modes) if mode != RAW), word)
    return (uncoded if uncoded in (word, 4) else min(uncoded, 2) // 2 * 2), modes


def _split(words: Words, wide: int, planes: list[Words]) -> None:
    step = kernels.TILE // words.itemsize
    for start in range(0, len(words), step):
        tile = slice(start, start + step)
        kernels.split(words[tile], wide, [plane[tile] for plane in planes])


def read_group(cursor: Cursor, count: int, word: int, folded: bool = False) -> Iterator[_Tile] | None:
    """The ``count`` words of the group at ``cursor``, as tiles: (which words, a scratch array the caller may destroy).

    ``folded`` undoes the folding of the words. None means that all words are zero. Raises ``CorruptSegmentError``,
    before the first tile, where the group is not well-formed.
    """
    wide = cursor.byte()
    if wide == ZERO_GROUP:
        return None
    if wide > word or wide not in (0, 2, 4, word):
        raise CorruptSegmentError(f"a group of {word}-byte words claims {wide} uncoded bytes")
    planes: list[Words] = []
    if wide:
        planes.append(cursor.take(count * wide).view(kernels.WORDS[wide]))
    top = word - 1
    planes += [planecoder.decode(cursor, count, f"plane{byte}") for byte in range(wide, top)]
    sparse = planecoder.decode_sparse(cursor, count) if planes and wide < word else None
    if sparse is None and wide < word:
        planes.append(planecoder.decode(cursor, count, f"plane{top}"))
    return _merge(planes, sparse, count, word, folded)


def _merge(planes: list[Words], sparse: _Sparse | None, count: int, word: int, folded: bool) -> Iterator[_Tile]:
    """Merge tile by tile. A sparse top plane is laid over the others, which takes half of the passes out."""
    kernel = kernels.merge_folded if folded else kernels.merge
    step, shift = kernels.TILE // word, 8 * word - (9 if folded else 8)
    for start in range(0, count, step):
        tile = slice(start, min(start + step, count))
        merged = kernels.scratch("merged", tile.stop - start, word)
        kernel([plane[tile] for plane in planes], merged)
        if sparse is not None:
            where, values = sparse
            first, last = np.searchsorted(where, (start, tile.stop))
            merged[where[first:last] - start] ^= values[first:last].astype(merged.dtype) << shift
        yield tile, merged
