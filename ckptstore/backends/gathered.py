"""Blocks of a segment that were collected, in any order, put in order again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["in_order"]


def in_order(blocks: Mapping[int, bytes], size: int) -> Iterator[bytes]:
    """The bytes of a segment of `size`: its blocks from the first on, what was not written as zeros.

    Args:
        blocks: by offset; they do not overlap. What lies beyond `size` is cut off.
    """
    at = 0
    for offset in sorted(blocks):
        if offset >= size:
            break
        if offset > at:
            yield bytes(offset - at)
        block = blocks[offset]
        yield block if offset + len(block) <= size else block[: size - offset]
        at = min(size, offset + len(block))
    if at < size:
        yield bytes(size - at)
