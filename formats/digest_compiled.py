"""The state digest's loop for numba (`ckptstore.formats.kernel_choice`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckptstore.formats.digest import BLOCK_WORDS
from ckptstore.formats.kernel_choice import loop


@loop("u4", "int", "u8", "u8!")
def _block_sums(
    words: npt.NDArray[np.uint32], skip: int, weights: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]
) -> None:
    start = 0
    begin = skip
    for block in range(len(sums)):
        count = min(BLOCK_WORDS - begin, len(words) - start)
        part, own = words[start : start + count], weights[begin : begin + count]
        total = np.uint64(0)
        for i in range(count):
            total += np.uint64(part[i]) * own[i]
        sums[block] = total
        start += count
        begin = 0


@loop("u4", "u8", "u8!")
def _four_sums(words: npt.NDArray[np.uint32], weights: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> None:
    """Of whole blocks, four at a time: weights are twice as many bytes as words, and are loaded once for four."""
    for first in range(0, len(sums), 4):
        at = first * BLOCK_WORDS
        a, b = words[at : at + BLOCK_WORDS], words[at + BLOCK_WORDS : at + 2 * BLOCK_WORDS]
        c, d = words[at + 2 * BLOCK_WORDS : at + 3 * BLOCK_WORDS], words[at + 3 * BLOCK_WORDS : at + 4 * BLOCK_WORDS]
        of_a, of_b, of_c, of_d = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(BLOCK_WORDS):
            weight = weights[i]
            of_a += np.uint64(a[i]) * weight
            of_b += np.uint64(b[i]) * weight
            of_c += np.uint64(c[i]) * weight
            of_d += np.uint64(d[i]) * weight
        sums[first], sums[first + 1], sums[first + 2], sums[first + 3] = of_a, of_b, of_c, of_d


def block_sums(
    words: npt.NDArray[np.uint32], skip: int, weights: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]
) -> None:
    """See ``digest.block_sums``."""
    fours = 0 if skip else len(words) // (4 * BLOCK_WORDS) * 4
    if fours:
        _four_sums(words[: fours * BLOCK_WORDS], weights, sums[:fours])
    if fours < len(sums):
        _block_sums(words[fours * BLOCK_WORDS :], skip, weights, sums[fours:])


@loop("u4", "i8", "u8", "u8!")
def _piece_sums(
    words: npt.NDArray[np.uint32],
    ends: npt.NDArray[np.int64],
    weights: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint64],
) -> None:
    start = 0
    for piece in range(len(sums)):
        end = ends[piece]
        part, own = words[start:end], weights[: end - start]
        total = np.uint64(0)
        for i in range(len(part)):
            total += np.uint64(part[i]) * own[i]
        sums[piece] = total
        start = end


def piece_sums(
    words: npt.NDArray[np.uint32],
    ends: npt.NDArray[np.int64],
    weights: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint64],
) -> None:
    """See ``digest.piece_sums``."""
    _piece_sums(words, ends, weights, sums)
