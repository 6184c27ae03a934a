"""Words <-> groups of plane pieces: the framing that every plane codec shares.

A chunk of at most ``CHUNK`` logical bytes is coded as consecutive *blocks* of ``BLOCK`` logical bytes, the last
one shorter. A block fits a core's cache, so that a chain of deltas is folded block by block without going back to
memory, and a sample decides the modes of its planes anew, because tensors are not the same everywhere.

A *group* is a run of words coded together. Its first byte is its form::

    0, 2, 4, 8  planes: so many low bytes of each word, uncoded, little-endian; then one plane piece (``planecoder``)
                for each byte above, lowest first. The word size: all bytes, uncoded.
    16 + b      narrow: words below 2**b (b = 0, 1, 2, 4, 8 bits) as the piece of their packed bytes (none if b = 0),
                0 for every other; then the others as exceptions: u32 number of steps, u32 number of exceptions,
                piece of the steps (as in ``planecoder``), group of the words less 2**b (not narrow itself;
                none without exceptions)
    32 + b      halves: the low half of each word (of 2, 4 or 8 bytes), uncoded; the high halves as in the narrow form
    255         zero: all words are

No group costs more than its words and one byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import kernels, planecoder
from ckptstore.formats.codecs.kernels import Bytes, Words
from ckptstore.formats.codecs.planecoder import FILL, RAW, SAMPLE, ZSTD, Cursor
from ckptstore.formats.errors import CorruptSegmentError

CHUNK = 16 << 20
BLOCK = 1 << 20
OVERHEAD = 16
"""The most bytes by which a block's payload may exceed the block: one for each group, of which it has at most 16."""
MARGIN = 32
"""What an encoder may write past the final end of a payload before it falls back to a smaller form."""
ZERO_GROUP = 255
NARROW, HALVES = 16, 32
_WIDTHS = (0, 1, 2, 4, 8)
_Sparse: TypeAlias = "tuple[npt.NDArray[np.intp], Words]"
_Tile: TypeAlias = "tuple[slice, Words]"
_counts = struct.Struct("<II")


def block_count(length: int) -> int:
    """How many blocks a chunk of ``length`` logical bytes has."""
    return -(-length // BLOCK)


def bound(length: int) -> int:
    """The room an encoder needs for a chunk of ``length`` bytes."""
    return length + block_count(length) * OVERHEAD + MARGIN


# ----------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a sample suggests for a group: planes above ``wide`` uncoded bytes, with these modes; or instead of the
    planes narrow words, of so many bits.

    Eight-bit narrow words beat planes only where they spare more than one.
    """

    narrow: int | None
    wide: int
    modes: tuple[int, ...]


def write_group(words: Words, out: Bytes, at: int, level: int, nested: bool = False) -> int:
    """Write the group of ``words`` to ``out[at:]``; returns where it ends, at most one byte beyond their size."""
    word, count = words.itemsize, len(words)
    plan = _plan(words, level, nested)
    end = None
    if plan.narrow is not None:
        if plan.narrow == 0 and plan.wide == 0 and not words.any():
            out[at] = ZERO_GROUP
            return at + 1
        end = (_write_halves if plan.wide else _write_narrow)(words, out, at, plan, level)
        if end is None:
            plan = _plan(words, level, True)
    if end is None and plan.wide < word:
        end = _write_planes(words, out, at, plan, level)
    if end is not None and end - at <= 1 + count * word:
        return end
    out[at] = word
    out[at + 1 : at + 1 + count * word] = words.view(np.uint8)
    return at + 1 + count * word


def _plan(words: Words, level: int, nested: bool) -> _Plan:
    word, count = words.itemsize, len(words)
    if level > planecoder.THRIFTY:
        return _Plan(None, 0, (ZSTD,) * word)
    size = min(SAMPLE, max(SAMPLE // 4, count // 16))
    sampled = words
    if count > size:
        run, stride = size // 8, count // 8
        sampled = words[: stride * 8].reshape(8, stride)[:, :run].reshape(-1)
    if word > 1 and not nested and 20 * np.count_nonzero(sampled >> 8) <= len(sampled):
        mode = planecoder.choose_mode(np.minimum(sampled, 255).astype(np.uint8), level)
        if mode in planecoder.PACKED_BITS or word > 2 or not sampled.any():
            return _Plan(0 if mode == FILL else planecoder.PACKED_BITS.get(mode, 8), 0, (mode,))
    table = sampled.view(np.uint8).reshape(-1, word)
    modes = tuple(planecoder.choose_mode(np.ascontiguousarray(table[:, byte]), level) for byte in range(word))
    uncoded = next((byte for byte, mode in enumerate(modes) if mode != RAW), word)
    wide = uncoded if uncoded in (word, 4) else min(uncoded, 2) // 2 * 2
    packed = planecoder.PACKED_BITS.get(modes[wide]) if 2 * wide == word else None
    if packed is None or nested or 20 * np.count_nonzero(table[:, wide + 1 :]) > len(table):
        return _Plan(None, wide, modes)
    return _Plan(packed, wide, modes)


def _write_planes(words: Words, out: Bytes, at: int, plan: _Plan, level: int) -> int:
    word, count, wide = words.itemsize, len(words), plan.wide
    planes: list[Words] = [kernels.scratch("plane0", count, wide)] if wide else []
    planes += [kernels.scratch(f"plane{byte}", count) for byte in range(wide, word)]
    step = kernels.TILE // word
    for start in range(0, count, step):
        tile = slice(start, start + step)
        kernels.split(words[tile], wide, [plane[tile] for plane in planes])
    out[at] = wide
    at += 1
    if wide:
        out[at : at + count * wide] = planes[0].view(np.uint8)
        at += count * wide
    for plane, mode in zip(planes[1 if wide else 0 :], plan.modes[wide:], strict=True):
        at = planecoder.encode(plane, out, at, mode, level)
    return at


def _write_narrow(words: Words, out: Bytes, at: int, plan: _Plan, level: int) -> int | None:
    """The narrow form, or None where it might not be smaller than the words."""
    out[at] = NARROW + (plan.narrow or 0)
    return _write_packed(words, out, at + 1, plan, level)


def _write_halves(words: Words, out: Bytes, at: int, plan: _Plan, level: int) -> int | None:
    """The form of halves, or None where it might not be smaller than the words."""
    count, half = len(words), plan.wide
    low, high = kernels.scratch("low half", count, half), kernels.scratch("high half", count, half)
    step = kernels.TILE // words.itemsize
    for start in range(0, count, step):
        tile = slice(start, start + step)
        kernels.halve(words[tile], low[tile], high[tile])
    out[at] = HALVES + (plan.narrow or 0)
    out[at + 1 : at + 1 + count * half] = low.view(np.uint8)
    return _write_packed(high, out, at + 1 + count * half, plan, level)


def _write_packed(words: Words, out: Bytes, at: int, plan: _Plan, level: int) -> int | None:
    """The body of the narrow form, or None where it might not be smaller than the words."""
    count, bits = len(words), plan.narrow or 0
    where, steps = kernels.steps(words >= (1 << bits))
    if 16 + -(-count * bits // 8) + len(steps) + len(where) * words.itemsize > count * words.itemsize:
        return None
    if bits:
        small = kernels.scratch("plane0", count)
        np.copyto(small, words, casting="unsafe")
        small[where] = 0
        packed = kernels.pack_small(small, bits) if bits < 8 else small
        at = planecoder.encode(packed, out, at, plan.modes[0] if bits == 8 else None, level, depth=1)
    _counts.pack_into(out.data, at, len(steps), len(where))
    mode = RAW if level == planecoder.FAST and len(steps) < SAMPLE else ZSTD
    at = planecoder.encode(steps, out, at + 8, mode, level, depth=1)
    if not len(where):
        return at
    return write_group(words[where] - words.dtype.type(1 << bits), out, at, level, nested=True)


# ----------------------------------------------------------------------------------------------------- decoding


def read_group(
    cursor: Cursor, count: int, word: int, folded: bool = False, into: Words | None = None
) -> Iterator[_Tile] | None:
    """The ``count`` words of the group at ``cursor``, as tiles: (which words, an array of them).

    The arrays are parts of ``into``, or of scratch memory that the caller may destroy. ``folded`` undoes the folding
    of the words. None means that all words are zero. Raises ``CorruptSegmentError``, before the first tile, where the
    group is not well-formed.
    """
    form = cursor.byte()
    if form == ZERO_GROUP:
        return None
    if form >= NARROW and form - NARROW in _WIDTHS and word > 1:
        planes, exceptions = _read_packed(cursor, count, word, form - NARROW)
        return _merge(planes, _Overlay(*exceptions, 0), count, word, folded, into)
    if form >= HALVES and form - HALVES in _WIDTHS and word > 1:
        half = word // 2
        low = cursor.take(count * half).view(kernels.WORDS[half])
        (small,), (where, values) = _read_packed(cursor, count, half, form - HALVES)
        high = kernels.scratch("high half", count, half)
        np.copyto(high, small)
        high[where] = values
        return _merge([low, high], None, count, word, folded, into)
    planes, top = _read_planes(cursor, count, word, form)
    if top and word > 2:
        # Two planes in one: laying the sparse one over bytes once costs less than over the words of every tile.
        where, values = top
        pair = kernels.scratch("pair", count, 2)
        np.copyto(pair, planes[-1])
        pair[where] |= values.astype(np.uint16) << 8
        return _merge([*planes[:-1], pair], None, count, word, folded, into)
    return _merge(planes, _Overlay(*top, word - 1) if top else None, count, word, folded, into)


def _read_planes(cursor: Cursor, count: int, word: int, wide: int) -> tuple[list[Words], _Sparse | None]:
    """The planes of a group from the lowest; the top one apart where it is sparse."""
    if wide > word or wide not in (0, 2, 4, word):
        raise CorruptSegmentError(f"a group of {word}-byte words has unknown form {wide}")
    planes: list[Words] = []
    if wide:
        planes.append(cursor.take(count * wide).view(kernels.WORDS[wide]))
    if wide == word:
        return planes, None
    planes += [planecoder.decode(cursor, count, f"plane{byte}") for byte in range(wide, word - 1)]
    top = planecoder.decode_sparse(cursor, count) if planes else None
    if top is None:
        planes.append(planecoder.decode(cursor, count, f"plane{word - 1}"))
    return planes, top


def _read_packed(cursor: Cursor, count: int, word: int, bits: int) -> tuple[list[Words], _Sparse]:
    """The body of the narrow form: low bytes as the only plane, and the words to lay over the zeros among them."""
    if bits == 8:
        small = planecoder.decode(cursor, count, "narrow", 1)
    else:
        small = kernels.scratch("narrow", count)
        if bits:
            kernels.unpack_small(planecoder.decode(cursor, -(-count * bits // 8), "packed", 1), bits, small)
        else:
            small.fill(0)
    where, found = planecoder.decode_positions(cursor, count, "top", 1)
    if found and cursor.left and cursor.data[cursor.position] in range(NARROW, ZERO_GROUP):
        raise CorruptSegmentError("narrow groups do not nest")
    greater = np.zeros(found, kernels.WORDS[word])
    for tile, merged in (read_group(cursor, found, word) or ()) if found else ():
        np.copyto(greater[tile], merged)
    greater += greater.dtype.type(1 << bits)
    return [small], (where, greater)


@dataclass(frozen=True, slots=True)
class _Overlay:
    """Words ``values`` at ``where``, to be combined (xor) with the bytes from ``position`` up of merged planes."""

    where: npt.NDArray[np.intp]
    values: Words
    position: int

    def apply(self, tile: slice, merged: Words, folded: bool) -> None:
        """Lay over ``merged``, the words of a tile. Unfolding xors every bit with the same one, one place lower."""
        first, last = np.searchsorted(self.where, (tile.start, tile.stop))
        values = self.values[first:last].astype(merged.dtype)
        if not folded:
            values <<= 8 * self.position
        elif self.position:
            values <<= 8 * self.position - 1
        else:
            kernels.unfold(values, values)
        merged[self.where[first:last] - tile.start] ^= values


def _merge(
    planes: list[Words], overlay: _Overlay | None, count: int, word: int, folded: bool, into: Words | None
) -> Iterator[_Tile]:
    """Merge tile by tile; zeros of the planes that the overlay covers become its words."""
    kernel = kernels.merge_folded if folded else kernels.merge
    step = kernels.TILE // word
    for start in range(0, count, step):
        tile = slice(start, min(start + step, count))
        merged = kernels.scratch("merged", tile.stop - start, word) if into is None else into[tile]
        kernel([plane[tile] for plane in planes], merged)
        if overlay is not None:
            overlay.apply(tile, merged, folded)
        yield tile, merged
