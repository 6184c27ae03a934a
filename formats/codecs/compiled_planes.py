"""Words and planes as loops for numba: what ``kernels`` defines, in as few passes as there can be.

Imported at the first call of a hot kernel, and only where numba is. Each loop is compiled for the word sizes that
occur; words of eight bytes are two of four.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import ADD, PUT, ROTATE, UNZIGZAG, WORDS, XOR, Bytes, Words, scratch
from ckptstore.formats.kernel_choice import Loop, inner, loop, loops

_TILE = 4096  # words that are merged, and then combined while they are in the first-level cache
_ADD_HERE, _XOR_HERE = ADD + 2, XOR + 2  # where the base is overwritten
_NOTHING = {word: np.empty(0, kind) for word, kind in WORDS.items()}


# ------------------------------------------------------------------------------------------------ word by word


@loops("u", "u", "u!")
def _difference(new: Words, base: Words, out: Words) -> None:
    word = out.dtype.type
    for i in range(len(out)):
        delta = word(new[i] - base[i])
        out[i] = (delta << word(1)) ^ (word(0) - (delta >> word(8 * out.itemsize - 1)))


@loops("u", "u!")
def _zigzag(values: Words, out: Words) -> None:
    word = out.dtype.type
    for i in range(len(out)):
        out[i] = (values[i] << word(1)) ^ (word(0) - (values[i] >> word(8 * out.itemsize - 1)))


@loops("u", "u!")
def _rotate_left(values: Words, out: Words) -> None:
    word = out.dtype.type
    for i in range(len(out)):
        out[i] = (values[i] << word(1)) | (values[i] >> word(8 * out.itemsize - 1))


def difference(new: Words, base: Words, out: Words) -> None:
    """See ``kernels.difference``."""
    _difference[out.itemsize](new, base, out)


def zigzag(values: Words, out: Words) -> None:
    """See ``kernels.zigzag``."""
    _zigzag[out.itemsize](values, out)


def rotate_left(values: Words, out: Words) -> None:
    """See ``kernels.rotate_left``."""
    _rotate_left[out.itemsize](values, out)


# ------------------------------------------------------------------------------------------- words <-> planes


@loop("u4", "u2!", "u1!", "u1!")
def _split_wide(words: Words, low: Words, third: Bytes, top: Bytes) -> None:
    for i in range(len(words)):
        low[i] = words[i]
        third[i] = words[i] >> np.uint32(16)
        top[i] = words[i] >> np.uint32(24)


@loop("u4", "u1!", "u1!", "u1!", "u1!")
def _split_bytes(words: Words, first: Bytes, second: Bytes, third: Bytes, top: Bytes) -> None:
    for i in range(len(words)):
        first[i] = words[i]
        second[i] = words[i] >> np.uint32(8)
        third[i] = words[i] >> np.uint32(16)
        top[i] = words[i] >> np.uint32(24)


def _split_half(words: Words, low: Words, high: Words) -> None:
    for i in range(len(words)):
        low[i] = words[i]
        high[i] = words[i] >> words.dtype.type(4 * words.itemsize)


_SPLIT: dict[tuple[int, ...], Loop[..., Any]] = {
    (2, 1, 1): _split_wide,
    (1, 1, 1, 1): _split_bytes,
    (1, 1): loop("u2", "u1!", "u1!")(_split_half),
    (2, 2): loop("u4", "u2!", "u2!")(_split_half),
    (4, 4): loop("u8", "u4!", "u4!")(_split_half),
}


def split(words: Words, planes: list[Words]) -> None:
    """See ``kernels.split``."""
    sizes = tuple(plane.itemsize for plane in planes)
    if sizes in _SPLIT:
        _SPLIT[sizes](words, *planes)
    elif words.itemsize < 8:
        kernels.split.reference(words, planes)
    else:
        below = _below(planes, 4)
        low = planes[0] if below == 1 else scratch("low words", len(words), 4)
        high = scratch("high words", len(words), 4)
        _SPLIT[4, 4](words, low, high)
        if below > 1:
            split(low, planes[:below])
        split(high, planes[below:])


def _below(planes: list[Words], size: int) -> int:
    """How many planes make up the low ``size`` bytes of a word."""
    return next(count for count in range(1, len(planes)) if sum(plane.itemsize for plane in planes[:count]) == size)


@inner
def _finish(tile: Words, how: int, base: Words, out: Words) -> None:
    """What ``kernels.combine`` does with merged words. (Slices, not sums of indices: those might be negative.)"""
    word, last = out.dtype.type, out.dtype.type(8 * out.itemsize - 1)
    if how == PUT:
        for i in range(len(out)):
            out[i] = tile[i]
    elif how == UNZIGZAG:
        for i in range(len(out)):
            out[i] = (tile[i] >> word(1)) ^ (word(0) - (tile[i] & word(1)))
    elif how == ROTATE:
        for i in range(len(out)):
            out[i] = (tile[i] >> word(1)) | (tile[i] << last)
    elif how == ADD:
        for i in range(len(out)):
            out[i] = base[i] + ((tile[i] >> word(1)) ^ (word(0) - (tile[i] & word(1))))
    elif how == XOR:
        for i in range(len(out)):
            out[i] = base[i] ^ tile[i]
    elif how == _ADD_HERE:
        for i in range(len(out)):
            out[i] += (tile[i] >> word(1)) ^ (word(0) - (tile[i] & word(1)))
    else:
        for i in range(len(out)):
            out[i] ^= tile[i]


@loops("u", "int", "u", "u!")
def _combine_whole(words: Words, how: int, base: Words, out: Words) -> None:
    _finish(words, how, base, out)


@loop("u2", "u1", "u1", "int", "u4", "u4!", "u4!")
def _combine_wide(low: Words, third: Bytes, top: Bytes, how: int, base: Words, out: Words, tile: Words) -> None:
    for start in range(0, len(out), _TILE):
        stop = min(start + _TILE, len(out))
        a, c, d, merged = low[start:stop], third[start:stop], top[start:stop], tile[: stop - start]
        for i in range(len(merged)):
            merged[i] = np.uint32(a[i]) | (np.uint32(c[i]) << np.uint32(16)) | (np.uint32(d[i]) << np.uint32(24))
        _finish(merged, how, base[start:stop], out[start:stop])


@loop("u1", "u1", "u1", "u1", "int", "u4", "u4!", "u4!")
def _combine_bytes(
    first: Bytes, second: Bytes, third: Bytes, top: Bytes, how: int, base: Words, out: Words, tile: Words
) -> None:
    for start in range(0, len(out), _TILE):
        stop = min(start + _TILE, len(out))
        a, b, c, d = first[start:stop], second[start:stop], third[start:stop], top[start:stop]
        merged = tile[: stop - start]
        for i in range(len(merged)):
            low = np.uint32(a[i]) | (np.uint32(b[i]) << np.uint32(8))
            merged[i] = low | (np.uint32(c[i]) << np.uint32(16)) | (np.uint32(d[i]) << np.uint32(24))
        _finish(merged, how, base[start:stop], out[start:stop])


def _combine_half(low: Words, high: Words, how: int, base: Words, out: Words, tile: Words) -> None:
    word = out.dtype.type
    for start in range(0, len(out), _TILE):
        stop = min(start + _TILE, len(out))
        a, b, merged = low[start:stop], high[start:stop], tile[: stop - start]
        for i in range(len(merged)):
            merged[i] = word(a[i]) | (word(b[i]) << word(4 * out.itemsize))
        _finish(merged, how, base[start:stop], out[start:stop])


_COMBINE: dict[tuple[int, ...], Loop[..., Any]] = {
    (2, 1, 1): _combine_wide,
    (1, 1, 1, 1): _combine_bytes,
    (1, 1): loop("u1", "u1", "int", "u2", "u2!", "u2!")(_combine_half),
    (2, 2): loop("u2", "u2", "int", "u4", "u4!", "u4!")(_combine_half),
    (4, 4): loop("u4", "u4", "int", "u8", "u8!", "u8!")(_combine_half),
}


def combine(planes: list[Words], how: int, base: Words, out: Words) -> None:
    """See ``kernels.combine``."""
    word = out.itemsize
    if how not in (ADD, XOR):
        base = _NOTHING[word]
    elif np.may_share_memory(base, out):
        how, base = how + 2, _NOTHING[word]
    _combine(planes, how, base, out)


def _combine(planes: list[Words], how: int, base: Words, out: Words) -> None:
    sizes = tuple(plane.itemsize for plane in planes)
    if len(planes) == 1:
        _combine_whole[out.itemsize](planes[0], how, base, out)
    elif sizes in _COMBINE:
        _COMBINE[sizes](*planes, how, base, out, scratch("tile", _TILE, out.itemsize))
    else:  # eight bytes: each half by itself
        below = _below(planes, 4)
        low = planes[0] if below == 1 else scratch("low words", len(out), 4)
        high = scratch("high words", len(out), 4)
        if below > 1:
            _combine(planes[:below], PUT, _NOTHING[4], low)
        _combine(planes[below:], PUT, _NOTHING[4], high)
        _combine([low, high], how, base, out)
