"""Remainders of bit patterns: which of three neighbours a number is, in 1.6 bits. No format of the store uses them.

Two machines that compute one step round some numbers differently, by one unit in the last place. Of each number one
machine sends its bit pattern modulo 3, five to a byte. The other, which has computed the number or its neighbour, finds
it. A number that is further away becomes a wrong one: a digest has to tell.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["PER_BYTE", "pack", "packed_size", "settle", "unpack"]

PER_BYTE: Final = 5
"""Remainders in a byte: the first is worth 1, the next 3, 9, 27 and 81."""

_Words = npt.NDArray[np.uint32]
_Digits = npt.NDArray[np.uint8]
_TILE: Final = 1 << 15

_DIGITS: Final = (np.arange(256)[:, None] // 3 ** np.arange(PER_BYTE) % 3).astype(np.uint8)
# 2^16 is 1 modulo 3, so the two halves of a word may be added. The high half is signed: the least sum is -2^15, which
# is 1 modulo 3.
_OF_SUM: Final = ((np.arange(1 << 17) + 1) % 3).astype(np.uint8)
_MOVES: Final = np.array([0, 1, -1], np.int32)


def packed_size(count: int) -> int:
    """The bytes that the remainders of `count` numbers take."""
    return -(-count // PER_BYTE)


def pack(words: _Words) -> _Digits:
    """The remainders of bit patterns, taken as signed integers. A device computes them in its own way."""
    digits = np.zeros(packed_size(len(words)) * PER_BYTE, np.uint8)
    for start in range(0, len(words), _TILE):
        part = words[start : start + _TILE]
        digits[start : start + len(part)] = _of(part)
    rows: npt.NDArray[Any] = digits.reshape(-1, PER_BYTE)
    found: _Digits = (rows * 3 ** np.arange(PER_BYTE)).sum(1).astype(np.uint8)
    return found


def unpack(packed: _Digits, start: int, stop: int) -> _Digits:
    """The remainders of the numbers from `start` to `stop`."""
    first = start // PER_BYTE
    digits: _Digits = _DIGITS[packed[first : packed_size(stop)]].reshape(-1)
    return digits[start - first * PER_BYTE : stop - first * PER_BYTE]


def settle(words: _Words, digits: _Digits, old: _Words) -> int:
    """Replace each fp32 number whose remainder is another by a neighbour, in place -> how many were replaced.

    A sum is as exact as its addends. If the number is smaller than its change, the neighbour is one unit in the last
    place of the *change* away: a power of two times that of the number, which has another remainder on either side.

    Args:
        words: bit patterns of the numbers.
        old: those of the numbers that they were computed from.
    """
    moved = 0
    for start in range(0, len(words), _TILE):
        part = words[start : start + _TILE]
        mine, true = _of(part), digits[start : start + len(part)]
        (wrong,) = np.nonzero(mine != true)
        if not len(wrong):
            continue
        moved += len(wrong)
        asked = _MOVES[(true[wrong] + np.uint8(3) - mine[wrong]) % 3]
        apart = _apart(part[wrong], old[start : start + len(part)][wrong])
        # 2^k is 1 modulo 3 for an even k, and -1 for an odd one.
        part.view(np.int32)[wrong] += np.where(apart % 2, -asked, asked) << apart
    return moved


def _apart(words: _Words, old: _Words) -> npt.NDArray[np.int32]:
    """By how many binary orders the change of numbers is larger than the numbers themselves; 0: it is smaller."""
    with np.errstate(all="ignore"):
        change = words.view(np.float32) - old.view(np.float32)
    orders = (change.view(np.int32) >> 23 & 0xFF) - (words.view(np.int32) >> 23 & 0xFF)
    found: npt.NDArray[np.int32] = np.clip(orders, 0, 22)
    return found


def _of(words: _Words) -> _Digits:
    signed = words.view(np.int32)
    total = signed >> 16
    total += signed & 0xFFFF
    total += 1 << 15
    found: _Digits = _OF_SUM[total]
    return found
