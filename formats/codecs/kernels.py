"""The hot loops of the codecs, in numpy: the reference that a compiled implementation must match bit for bit.

Every function works on contiguous one-dimensional little-endian unsigned arrays and fills arrays that the caller
owns; none keeps state. Callers hand over *tiles* of at most ``TILE`` bytes, which stay in a core's second-level
cache while several passes go over them: on blocks beyond it the same passes run at memory speed. numpy releases
the interpreter lock inside each pass, so threads scale.

Names: a *word* is one number of the tensor (1, 2, 4 or 8 bytes), a *plane* holds the same byte of every word.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

TILE = 1 << 18
WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_QUARTERS = np.bitwise_or.reduce([((np.arange(256, dtype="<u4") >> 2 * lane) & 3) << 8 * lane for lane in range(4)])
_local = threading.local()


def scratch(role: str, count: int, word: int = 1) -> Words:
    """``count`` words of this thread's buffer for ``role``; what was there before is overwritten.

    A role is lent to one caller at a time. Buffers grow to the largest request, at most a few MiB each: fresh
    memory for every block would cost more in page faults than the passes themselves.
    """
    buffers: dict[str, Bytes] = _local.__dict__
    buffer = buffers.get(role)
    if buffer is None or buffer.nbytes < count * word:
        buffer = buffers[role] = np.empty(max(count * word, 1 << 12), np.uint8)
    return cast(Words, buffer[: count * word].view(WORDS[word]))


# ------------------------------------------------------------------------------------------------ word by word


def difference(new: Words, base: Words, out: Words) -> None:
    """``out = zigzag(new - base)``: the wrapping difference of the bit patterns, folded so that small means small.

    Zigzag maps 0, -1, 1, -2 … to 0, 1, 2, 3 …: the sign goes to the lowest bit. A bijection for every pattern,
    NaN payloads and -0 included.
    """
    np.subtract(new, base, out=out)
    fold(out, out)


def fold(values: Words, out: Words) -> None:
    """``out = zigzag(values)``: two's complement to sign in the lowest bit. ``out`` may be ``values``."""
    bits = out.itemsize * 8
    sign = scratch("sign", len(out), out.itemsize)
    np.right_shift(values.view(_SIGNED[out.itemsize]), bits - 1, out=sign.view(_SIGNED[out.itemsize]))
    np.left_shift(values, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def unfold(values: Words, out: Words) -> None:
    """Undo :func:`fold`. ``out`` may be ``values``."""
    sign = scratch("sign", len(out), out.itemsize)
    np.bitwise_and(values, 1, out=sign)
    np.negative(sign, out=sign)
    np.right_shift(values, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def rotate_left(values: Words, out: Words) -> None:
    """Move the sign bit below the lowest bit, so that a float's exponent fills the top byte."""
    top = scratch("sign", len(out), out.itemsize)
    np.right_shift(values, out.itemsize * 8 - 1, out=top)
    np.left_shift(values, 1, out=out)
    np.bitwise_or(out, top, out=out)


def rotate_right(values: Words, out: Words) -> None:
    """Undo :func:`rotate_left`. ``out`` may be ``values``."""
    top = scratch("sign", len(out), out.itemsize)
    np.left_shift(values, out.itemsize * 8 - 1, out=top)
    np.right_shift(values, 1, out=out)
    np.bitwise_or(out, top, out=out)


# ------------------------------------------------------------------------------------------- words <-> planes


def split(words: Words, wide: int, planes: list[Words]) -> None:
    """Split words into a plane of their ``wide`` low bytes (none if 0) and one plane for each byte above.

    ``planes`` are filled in this order; the conversions truncate, which is twice as fast as strided copies.
    """
    shifted = scratch("shifted", len(words), words.itemsize)
    position = wide
    above = planes
    if wide:
        np.copyto(planes[0], words, casting="unsafe")
        above = planes[1:]
    for plane in above:
        if position:
            np.right_shift(words, position * 8, out=shifted)
            np.copyto(plane, shifted, casting="unsafe")
        else:
            np.copyto(plane, words, casting="unsafe")
        position += 1


def halve(words: Words, low: Words, high: Words) -> None:
    """Split words into their low and their high halves."""
    shifted = scratch("shifted", len(words), words.itemsize)
    np.copyto(low, words, casting="unsafe")
    np.right_shift(words, 4 * words.itemsize, out=shifted)
    np.copyto(high, shifted, casting="unsafe")


def merge(planes: list[Words], out: Words) -> None:
    """Undo :func:`split`: the last plane is the top byte, the first may be wide."""
    np.copyto(out, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(out, plane.itemsize * 8, out=out)
        np.bitwise_or(out, plane, out=out)


def merge_folded(planes: list[Words], out: Words) -> None:
    """``out = unfold(merge(planes))`` with fewer passes: the sign is in the low half, so most of them are half as wide.

    ``planes`` may end early: bytes above them are zero. With ``t`` all ones where the folded value is odd,
    unfold(z) = (z >> 1) ^ t; sign-extending the low half's (low >> 1) ^ t gives all of that but the high half, whose
    bits start one lower than in z.
    """
    half, below = out.itemsize // 2, 1
    while below < len(planes) and sum(plane.itemsize for plane in planes[:below]) < half:
        below += 1
    if planes[0].itemsize > half or out.itemsize == 1:
        merge(planes, out)
        unfold(out, out)
        return
    low, sign = scratch("low half", len(out), half), scratch("sign", len(out), half)
    merge(planes[:below], low)
    np.bitwise_and(low, 1, out=sign)
    np.negative(sign, out=sign)
    np.right_shift(low, 1, out=low)
    np.bitwise_xor(low, sign, out=low)
    # A conversion and an operation, each in one type, are faster than an operation on two.
    extended = out
    if planes[below:]:
        merge(planes[below:], out)
        np.left_shift(out, 4 * out.itemsize - 1, out=out)
        extended = scratch("extended", len(out), out.itemsize)
    np.copyto(extended.view(_SIGNED[out.itemsize]), low.view(_SIGNED[half]))
    if extended is not out:
        np.bitwise_xor(out, extended, out=out)


# ------------------------------------------------------------------------------------- small numbers in bytes


def pack_small(values: Bytes, bits: int) -> Bytes:
    """Pack bytes below ``2**bits`` (``bits`` 1, 2 or 4) into bytes, first value lowest; the last is padded with 0."""
    if bits == 1:
        return np.packbits(values.view(np.bool_), bitorder="little")
    per = 8 // bits
    padded = values
    if len(values) % per:
        padded = np.zeros(-(-len(values) // per) * per, np.uint8)
        padded[: len(values)] = values
    while bits < 8:
        pairs = padded.view("<u2")
        padded = np.bitwise_or(pairs, pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return padded


def unpack_small(packed: Bytes, bits: int, out: Bytes) -> None:
    """Undo :func:`pack_small`: fill ``out``, whose length says how many values there are."""
    if bits == 1:
        out[:] = np.unpackbits(packed, count=len(out), bitorder="little")
    elif bits == 2:
        whole = len(out) // 4
        np.take(_QUARTERS, packed[:whole], out=out[: 4 * whole].view("<u4"), mode="clip")
        if whole < len(packed):
            out[4 * whole :] = _QUARTERS[packed[whole:]].view(np.uint8)[: len(out) - 4 * whole]
    else:
        whole = len(out) // 2
        pairs, high = out[: 2 * whole].view("<u2"), scratch("pairs", whole, 2)
        np.copyto(pairs, packed[:whole])
        np.left_shift(pairs, 4, out=high)
        np.bitwise_or(pairs, high, out=pairs)
        np.bitwise_and(pairs, 0x0F0F, out=pairs)
        if whole < len(packed):
            out[-1] = packed[-1] & 15


def positions(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Where a mask is set, ascending.

    Below a density of a tenth ``flatnonzero`` calls a search for every hit; going over the packed mask first and
    then over its non-zero bytes, both dense, takes half the time.
    """
    if 10 * np.count_nonzero(mask) > len(mask):
        return np.flatnonzero(mask)
    packed = np.packbits(mask, bitorder="little")
    rows = np.flatnonzero(packed != 0)
    inside = np.flatnonzero(np.unpackbits(packed[rows], bitorder="little").view(np.bool_))
    rows *= 8
    rows -= np.arange(0, 8 * len(rows), 8)
    inside += rows[inside >> 3]
    return inside


def steps(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], Bytes]:
    """Where a mask is set, and the same as steps: a byte s < 255 passes s entries over and meets one that is set;
    255 passes over 255 entries and meets none."""
    where = positions(mask)
    strides = np.empty(len(where), np.intp)
    strides[:1] = where[:1] + 1
    np.subtract(where[1:], where[:-1], out=strides[1:])
    if not len(strides) or int(strides.max()) < 256:
        return where, (strides - 1).astype(np.uint8)
    far = np.flatnonzero(strides > 255)
    strides -= 1
    skips = strides[far] // 255
    near = strides.astype(np.uint8)
    near[far] = strides[far] - 255 * skips
    # What lies between two far ones moves by the skips before it.
    shift = np.repeat(np.append(0, np.cumsum(skips)), np.diff(np.concatenate([[0], far, [len(near)]])))
    out = np.full(len(near) + int(skips.sum()), 255, np.uint8)
    shift += np.arange(len(near))
    out[shift] = near
    return where, out


def positions_of_steps(stepped: Bytes) -> npt.NDArray[np.intp]:
    """Undo :func:`steps`: where the mask is set. Ascending, but unchecked against the mask's length."""
    meets = stepped != 255
    where = np.cumsum(stepped + meets, dtype=np.intp)
    where -= 1
    return where if meets.all() else np.compress(meets, where)


# ----------------------------------------------------------------------------------------- numbers of any width


def pack_bits(values: Words, bits: int) -> Bytes:
    """The low ``bits`` (0 to 64) of every value, densely: whole low bytes as planes, then the rest bit-packed.

    Exactly ``len * (bits // 8) + ceil(len * (bits % 8) / 8)`` bytes. The rest is packed eight values to
    ``bits % 8`` bytes, all groups of eight at once.
    """
    count, whole, rest = len(values), bits // 8, bits % 8
    out = np.empty(packed_size(count, bits), np.uint8)
    for byte in range(whole):
        np.copyto(out[byte * count : (byte + 1) * count], values >> (8 * byte) if byte else values, casting="unsafe")
    if rest:
        groups = np.zeros((-(-count // 8), 8), np.uint8)
        np.copyto(groups.reshape(-1)[:count], values >> (8 * whole) if whole else values, casting="unsafe")
        groups &= (1 << rest) - 1
        rows = np.zeros((len(groups), rest), np.uint8)
        for lane in range(8):
            byte, shift = divmod(lane * rest, 8)
            rows[:, byte] |= groups[:, lane] << shift
            if shift + rest > 8:
                rows[:, byte + 1] |= groups[:, lane] >> (8 - shift)
        out[count * whole :] = rows.reshape(-1)[: len(out) - count * whole]
    return out


def unpack_bits(packed: Bytes, count: int, bits: int, word: int) -> Words:
    """Undo :func:`pack_bits` into ``count`` words of ``word`` bytes; ``packed`` has the exact length."""
    whole, rest = bits // 8, bits % 8
    out = np.zeros(count, WORDS[word])
    if rest:
        rows = np.zeros((-(-count // 8), rest), np.uint8)
        rows.reshape(-1)[: len(packed) - count * whole] = packed[count * whole :]
        groups = np.empty((len(rows), 8), np.uint8)
        for lane in range(8):
            byte, shift = divmod(lane * rest, 8)
            np.right_shift(rows[:, byte], shift, out=groups[:, lane])
            if shift + rest > 8:
                groups[:, lane] |= rows[:, byte + 1] << (8 - shift)
        groups &= (1 << rest) - 1
        np.copyto(out, groups.reshape(-1)[:count])
    for byte in reversed(range(whole)):
        np.left_shift(out, 8, out=out)
        np.bitwise_or(out, packed[byte * count : (byte + 1) * count], out=out)
    return out


def packed_size(count: int, bits: int) -> int:
    """How many bytes :func:`pack_bits` makes of ``count`` values."""
    return count * (bits // 8) + -(-count * (bits % 8) // 8)


# --------------------------------------------------------------------------------------------------- contexts


def classes(base: Words, shift: int, low: int, high: int, out: Bytes) -> None:
    """``out = clip(magnitude(base) >> shift, low, high) - low``: the class of every word, at most 255 apart.

    For floats ``shift`` is the width of the mantissa, so that the class is the exponent.
    """
    bits = base.itemsize * 8
    exponent = scratch("shifted", len(base), base.itemsize)
    np.bitwise_and(base, (1 << (bits - 1)) - 1, out=exponent)
    np.right_shift(exponent, shift, out=exponent)
    np.clip(exponent, low, high, out=exponent)
    np.subtract(exponent, low, out=exponent)
    np.copyto(out, exponent, casting="unsafe")


def stable_order(labels: Bytes) -> npt.NDArray[np.intp]:
    """The permutation that sorts labels and keeps equal ones in order (a counting sort: bytes)."""
    return np.argsort(labels, kind="stable")


def histogram(values: Bytes) -> npt.NDArray[np.intp]:
    """How often each of the 256 byte values occurs."""
    return np.bincount(values, minlength=256)


# ------------------------------------------------------------------------------------------- narrower floats


def to_bfloat16(values: Words, out: Words) -> None:
    """Round fp32 bit patterns to bf16, nearest and even on ties; every NaN becomes 7fc0.

    In integers: what the processor does with denormals and NaN depends on its mode, and a decoder must not.
    """
    rounding = scratch("sign", len(values), 4)
    np.right_shift(values, 16, out=rounding)
    np.bitwise_and(rounding, 1, out=rounding)
    np.add(rounding, 0x7FFF, out=rounding)
    np.add(rounding, values, out=rounding)
    np.right_shift(rounding, 16, out=rounding)
    np.copyto(out, rounding, casting="unsafe")
    np.bitwise_and(values, 0x7FFFFFFF, out=rounding)
    out[rounding > 0x7F800000] = 0x7FC0


def to_float16(values: Words, out: Words) -> None:
    """Round fp32 bit patterns to IEEE half precision, nearest and even on ties; every NaN becomes 7e00.

    In integers throughout, for the reason given at :func:`to_bfloat16`.
    """
    magnitude, work = scratch("sign", len(values), 4), scratch("shifted", len(values), 4)
    np.bitwise_and(values, 0x7FFFFFFF, out=magnitude)
    # Normal halves: rebias the exponent by 112, then round off 13 bits; beyond the range lies infinity.
    np.right_shift(magnitude, 13, out=work)
    np.bitwise_and(work, 1, out=work)
    np.add(work, magnitude, out=work)
    np.add(work, (0xFFF - (112 << 23)) & 0xFFFFFFFF, out=work)
    np.right_shift(work, 13, out=work)
    np.copyto(out, work, casting="unsafe")
    out[magnitude >= 0x47800000] = 0x7C00
    small = np.flatnonzero(magnitude < 0x38800000)
    if len(small):
        out[small] = _subnormal_half(magnitude[small])
    out[magnitude > 0x7F800000] = 0x7E00
    np.right_shift(values, 16, out=work)
    np.bitwise_and(work, 0x8000, out=work)
    work[magnitude > 0x7F800000] = 0
    np.bitwise_or(out, work, out=out, casting="unsafe")


def _subnormal_half(magnitude: Words) -> Words:
    """Half-precision patterns of fp32 magnitudes below 2**-14: multiples of 2**-24, rounded to even."""
    exponent = magnitude >> 23
    shift = np.minimum(126 - exponent, 31)
    mantissa = (magnitude & 0x7FFFFF) | np.where(exponent, np.uint32(0x800000), np.uint32(0))
    whole = mantissa >> shift
    rest = mantissa & ((np.uint32(1) << shift) - 1)
    half = np.uint32(1) << (shift - 1)
    up: Words = ((rest > half) | ((rest == half) & (whole & 1 == 1))).astype(np.uint32)
    rounded: Words = whole + up
    return rounded
