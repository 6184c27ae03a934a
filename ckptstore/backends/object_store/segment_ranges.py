"""Which ranges of a segment one read requests from a bucket. A request takes as long as a megabyte of its answer.

The first request of a segment reads its first bytes, and its answer contains the segment's size. If the rest is small,
the second request reads all of it. Larger segments are read as they are asked for.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FIRST", "RANGE", "REST", "cuts", "first", "is_small"]

FIRST: Final = 64 << 10
"""Bytes of the first request: most headers, and a small segment whole."""
REST: Final = 4 << 20
"""Maximum bytes after the first ones that one request reads as soon as any of them is asked for."""
RANGE: Final = 8 << 20
"""Maximum bytes of one range request."""


def first(size: int) -> int:
    """Bytes that the first request of a segment of `size` bytes returns."""
    return min(size, FIRST)


def is_small(size: int) -> bool:
    """Whether a second request reads the rest of a segment of `size` bytes."""
    return size <= FIRST + REST


def cuts(offset: int, length: int) -> list[tuple[int, int]]:
    """The ranges, (offset, length), that read `length` bytes at `offset` of a large segment.

    Its first bytes are at hand: they are part of no range.
    """
    start, end = max(offset, FIRST), offset + length
    return [(at, min(RANGE, end - at)) for at in range(start, end, RANGE)]
