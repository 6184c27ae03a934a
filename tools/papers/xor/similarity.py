"""The XOR paper, section 3.3: moments whose prefixes are alike in one group, which then needs fewer bits for an index.

The store's codec ``prefix`` groups consecutive numbers. Here small pieces of consecutive numbers are grouped by their
largest prefix: each piece has the number of its group, each group a dictionary. This counts bits, and encodes nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["ratio"]

PIECES: Final = (64, 256)
BITS: Final = (7, 8, 9)
MOST: Final = 256
"""Groups at first; those whose union costs least are united."""
BLOCK: Final = 1 << 18
"""Numbers that have their own dictionaries, as in a block of the format."""


def ratio(words: npt.NDArray[np.uint32]) -> float:
    """Raw by stored bytes of fp32 numbers, with the best length of prefix and piece."""
    blocks = [words[at : at + BLOCK] for at in range(0, len(words), BLOCK)]
    return max(
        len(words) * 32 / sum(_bits(block, bits, piece) for block in blocks) for bits in BITS for piece in PIECES
    )


def _bits(words: npt.NDArray[np.uint32], bits: int, piece: int) -> float:
    """Bits of a block, with the number of groups that takes the fewest."""
    whole = len(words) // piece * piece
    pieces, rest = whole // piece, len(words) - whole
    if not pieces:
        return 32.0 * rest
    prefixes = (words[:whole] >> np.uint32(32 - bits)).astype(np.int64).reshape(pieces, piece)
    there = np.zeros((pieces, 1 << bits), np.bool_)
    there[np.arange(pieces)[:, None], prefixes] = True
    largest = (prefixes & ((1 << (bits - 1)) - 1)).max(axis=1)
    order = np.argsort(largest * 1000 + there.sum(axis=1), kind="stable")
    groups = [there[part].any(axis=0) for part in np.array_split(order, min(MOST, pieces))]
    sizes = [len(part) * piece for part in np.array_split(order, min(MOST, pieces))]
    costs = [_cost(*one, bits) for one in zip(groups, sizes, strict=True)]
    least = np.inf
    while True:
        least = min(least, sum(costs) + pieces * int(np.ceil(np.log2(len(groups)))))
        if len(groups) == 1:
            return float(least + whole * (32 - bits) + 32 * rest)
        united = [
            _cost(groups[at] | groups[at + 1], sizes[at] + sizes[at + 1], bits) - costs[at] - costs[at + 1]
            for at in range(len(groups) - 1)
        ]
        at = int(np.argmin(united))
        groups[at : at + 2], sizes[at : at + 2] = [groups[at] | groups[at + 1]], [sizes[at] + sizes[at + 1]]
        costs[at : at + 2] = [_cost(groups[at], sizes[at], bits)]


def _cost(present: npt.NDArray[Any], count: int, bits: int) -> int:
    """Bits of a group: an index for each number, and the dictionary with its size."""
    distinct = int(present.sum())
    return count * int(np.ceil(np.log2(distinct))) + (distinct + 1) * bits
