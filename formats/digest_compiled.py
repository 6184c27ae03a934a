"""The state digest's loop for numba (`ckptstore.formats.compiled`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckptstore.formats.compiled import loop
from ckptstore.formats.digest import BLOCK_WORDS


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


def block_sums(
    words: npt.NDArray[np.uint32], skip: int, weights: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]
) -> None:
    """See ``digest.block_sums``."""
    _block_sums(words, skip, weights, sums)


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
