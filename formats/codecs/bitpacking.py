"""Pack numbers of any bit width, for the codec ``prefix`` (SPEC section 5.4.6)."""

from __future__ import annotations

import numpy as np

from ckptstore.formats.codecs.kernels import WORDS, Bytes, Words


def pack_bits(values: Words, bits: int) -> Bytes:
    """Pack the low ``bits`` (0 to 64) of every value: whole low bytes as planes, then the remaining bits.

    Returns exactly ``len * (bits // 8) + ceil(len * (bits % 8) / 8)`` bytes. The remaining bits of eight values take
    ``bits % 8`` bytes. All groups of eight are packed at once.
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
    """Undo :func:`pack_bits`: return ``count`` words of ``word`` bytes. ``packed`` has the exact length."""
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
    """Number of bytes that :func:`pack_bits` returns for ``count`` values."""
    return count * (bits // 8) + -(-count * (bits % 8) // 8)
