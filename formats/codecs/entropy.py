"""What can be known of data without coding it: the order-0 entropy of its byte planes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import Words

SEGMENT = 1 << 16


class Classes(Protocol):
    """Classes of words by their base: a `deltas.Context`."""

    @property
    def shift(self) -> int: ...  # noqa: D102
    @property
    def low(self) -> int: ...  # noqa: D102
    @property
    def high(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102


def plane_entropy(words: Words, segment: int = SEGMENT) -> float:
    """Order-0 entropy of the byte planes in bits per word, histograms taken anew every ``segment`` words.

    The bound that ``planes`` over the same words is measured against: what a perfect entropy coder of bytes, with
    tables that cost nothing, would spend. A coder with context (``sub`` with ``context``) may go below it.
    """
    bits = 0.0
    for start in range(0, len(words), segment):
        table = words[start : start + segment].view(np.uint8).reshape(-1, words.itemsize)
        bits += sum(_information(np.ascontiguousarray(table[:, byte])) for byte in range(words.itemsize))
    return bits / len(words) if len(words) else 0.0


def best_entropy(words: Words, segment: int = SEGMENT) -> float:
    """`plane_entropy` of the numbers as they are, rotated by one bit or as zigzag, whichever is least.

    These are the maps of ``planes``.
    """
    mapped, found = np.empty(len(words), words.dtype), [plane_entropy(words, segment)]
    for forward in (kernels.rotate_left, kernels.zigzag):
        forward(words, mapped)
        found.append(plane_entropy(mapped, segment))
    return min(found)


def difference_entropy(new: Words, base: Words, segment: int = SEGMENT) -> float:
    """``plane_entropy`` of the integer difference as zigzag: the bound for ``sub``."""
    delta = np.empty(len(new), new.dtype)
    kernels.difference(new, base, delta)
    return plane_entropy(delta, segment)


def context_entropy(new: Words, base: Words, context: Classes, segment: int = SEGMENT) -> float:
    """``difference_entropy`` with a histogram for every class of the base: the bound for ``sub`` with ``context``."""
    delta, labels = np.empty(len(new), new.dtype), np.empty(len(new), np.uint8)
    kernels.difference(new, base, delta)
    kernels.classify(base, context.shift, context.low, context.high, labels)
    bits = 0.0
    for start in range(0, len(new), segment):
        words, classes = delta[start : start + segment], labels[start : start + segment]
        for label in range(context.count):
            found = words[classes == label]
            bits += len(found) * plane_entropy(found, segment)
    return bits / len(new) if len(new) else 0.0


def _information(values: kernels.Bytes) -> float:
    counts = kernels.histogram(values)
    present = counts[counts > 0]
    return float(len(values) * np.log2(len(values)) - np.dot(present, np.log2(present)))
