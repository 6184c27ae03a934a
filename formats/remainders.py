"""Remainders of bit patterns: which of three neighbours a number is, in 1.6 bits. No format of the store uses them.

Two machines that compute one step round some numbers differently, by one unit in the last place. Of each number one
machine sends its bit pattern modulo 3, five to a byte. The other, which has computed the number or its neighbour, finds
it. A number that is further away becomes a wrong one: a digest has to tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PER_BYTE", "Changes", "pack", "packed_size", "settle", "unpack"]

PER_BYTE: Final = 5
"""Remainders in a byte: the first is worth 1, the next 3, 9, 27 and 81."""

Changes: TypeAlias = Callable[[npt.NDArray[np.intp]], npt.NDArray[np.float32]]
_Words = npt.NDArray[np.uint32]
_Digits = npt.NDArray[np.uint8]
_TILE: Final = 1 << 15

_DIGITS: Final = (np.arange(256)[:, None] // 3 ** np.arange(PER_BYTE) % 3).astype(np.uint8)
# 2^16 is 1 modulo 3, so the two halves of a word may be added. The high half is signed: the least sum is -2^15, which
# is 1 modulo 3.
_OF_SUM: Final = ((np.arange(1 << 17) + 1) % 3).astype(np.uint8)


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


def settle(words: _Words, digits: _Digits, addends: _Words, changes: Changes | None = None) -> int:
    """Replace each fp32 number whose remainder is another by a neighbour, in place -> how many were replaced.

    The numbers are sums of an addend, which is exact, and a change, which may be one unit in its last place too large
    or too small. If the change is larger than the sum, that is a power of two times the unit of the sum, and if the sum
    is rounded to even, it may be twice its unit. None of these is a multiple of 3.

    Args:
        words: bit patterns of the numbers.
        addends: those of the exact addends.
        changes: returns the changes of some numbers, by their indices; None: they are not known, and a sum that may
            have been rounded to even may become a wrong number.
    """
    moved = 0
    for start in range(0, len(words), _TILE):
        part = words[start : start + _TILE]
        mine, true = _of(part), digits[start : start + len(part)]
        (wrong,) = np.nonzero(mine != true)
        if len(wrong):
            known = None if changes is None else changes(start + wrong)
            found = _neighbours(part[wrong], true[wrong], addends[start : start + len(part)][wrong], known)
            moved += int((found != part[wrong]).sum())
            part[wrong] = found
    return moved


def _neighbours(words: _Words, true: _Digits, addends: _Words, changes: npt.NDArray[np.float32] | None) -> _Words:
    """The neighbours that have these remainders; the same numbers where neither has."""
    found = words.copy()
    asked = np.array([0, 1, -1], np.int32)[(true + np.uint8(3) - _of(words)) % 3]
    found.view(np.int32)[:] += asked
    with np.errstate(all="ignore"):
        numbers = words.view(np.float32)
        unit = np.spacing(np.abs(numbers - addends.view(np.float32)))
        coarse = unit > np.spacing(np.abs(numbers))
        for other in (numbers + unit, numbers - unit):
            pattern = other.view(np.uint32)
            fits = coarse & (_of(pattern) == true)
            found[fits] = pattern[fits]
        if changes is None:
            return found
        for limit in (np.inf, -np.inf):
            other = addends.view(np.float32) + np.nextafter(changes, np.float32(limit))
            pattern = other.view(np.uint32)
            fits = _of(pattern) == true
            found[fits] = pattern[fits]
    return found


def _of(words: _Words) -> _Digits:
    signed = words.view(np.int32)
    total = signed >> 16
    total += signed & 0xFFFF
    total += 1 << 15
    found: _Digits = _OF_SUM[total]
    return found
