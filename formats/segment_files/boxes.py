"""Boxes of an array: where shards are in a tensor, whether they cover it, and how to copy bytes from one to another.

All boxes in one call use the coordinates of the whole tensor. Images are C-contiguous bytes, so elements are counted in
C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ckptstore.formats.sources import Bytes, blocks

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Box", "boxes_of", "common_elements", "elements_of", "gap", "overlapping", "touches"]

_CARRIERS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Item size -> the numpy type used to copy such elements bit for bit."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array: `offset` is its first index and `shape` its size, in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Index behind the last element, in every dimension."""
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offset, self.end, strict=True))}]"

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box is inside an array of `shape`."""
        return len(self.shape) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= limit
            for start, length, limit in zip(self.offset, self.shape, shape, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """Return the box of the elements that are in both, or None if there are none."""
        starts = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - start for start, end in zip(starts, map(min, self.end, other.end), strict=True))
        return Box(starts, shape) if min(shape, default=1) > 0 else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of these elements in the array of box `other`."""
        return tuple(
            slice(start - low, start - low + length)
            for start, length, low in zip(self.offset, self.shape, other.offset, strict=True)
        )

    def run(self, other: Box) -> int | None:
        """Return the element offset of this box in the image of `other`, which contains it.

        None: the elements of this box are not contiguous there, in their own order.
        """
        running = False
        for length, limit in zip(self.shape, other.shape, strict=True):
            if running and length != limit:
                return None
            running = running or length > 1
        at = 0
        for start, low, limit in zip(self.offset, other.offset, other.shape, strict=True):
            at = at * limit + start - low
        return at


def elements_of(data: Bytes, itemsize: int) -> npt.NDArray[Any]:
    """View bytes as elements of `itemsize` bytes, in a type that numpy copies bit for bit. Makes no copy."""
    return data.view(_CARRIERS[itemsize])


def common_elements(
    data: npt.NDArray[Any], start: int, box: Box, target: Box
) -> Iterator[tuple[tuple[slice, ...], npt.NDArray[Any]]]:
    """Yield the elements that part of a box's image and another box have in common.

    Yields (index in the array of box `target`, the elements at that index).

    Args:
        data: 1-D, elements [start, start + len(data)) of the image of `box`.
        start: position of the first of them in the image of `box`, in elements.
        box: the box to which `data` belongs.
        target: the other box.
    """
    done = 0
    for part in boxes_of(box, start, start + len(data)):
        common = part.common(target)
        if common is not None:
            yield common.within(target), data[done : done + part.size].reshape(part.shape)[common.within(part)]
        done += part.size


def touches(box: Box, start: int, stop: int, target: Box) -> bool:
    """Whether any of the elements [start, stop) of the image of `box` is in `target`."""
    return any(part.common(target) is not None for part in boxes_of(box, start, stop))


def boxes_of(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Split a range of a box's image into boxes, in order; at most two for each dimension."""
    for index, _ in blocks(box.shape, start, stop):
        offset, shape = list(box.offset), list(box.shape)
        for dimension, place in enumerate(index):
            first, last = (place.start, place.stop) if isinstance(place, slice) else (place, place + 1)
            offset[dimension] += first
            shape[dimension] = last - first
        yield Box(tuple(offset), tuple(shape))


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indexes of two boxes that have an element in common, or None. All have the same number of dimensions.

    Boxes are swept along the dimension with the most distinct offsets. The number of comparisons is about the number of
    boxes times the number of boxes that share a coordinate of that dimension.
    """
    if len(boxes) < 2:
        return None
    if not boxes[0].shape:
        return 0, 1
    along = max(range(len(boxes[0].shape)), key=lambda dimension: len({box.offset[dimension] for box in boxes}))
    reaching: list[int] = []
    for place in sorted(range(len(boxes)), key=lambda one: boxes[one].offset[along]):
        start = boxes[place].offset[along]
        reaching = [other for other in reaching if boxes[other].offset[along] + boxes[other].shape[along] > start]
        for other in reaching:
            if boxes[place].common(boxes[other]) is not None:
                return min(place, other), max(place, other)
        reaching.append(place)
    return None


def gap(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """Return some elements of an array that no box covers, or None. The boxes are inside it and do not overlap."""
    if sum(box.size for box in boxes) == math.prod(shape):
        return None
    offset: list[int] = []
    lengths: list[int] = []
    for dimension, limit in enumerate(shape):
        cuts = {0, limit, *(box.offset[dimension] for box in boxes), *(box.end[dimension] for box in boxes)}
        for low, high in pairwise(sorted(cuts)):
            there = [box for box in boxes if box.offset[dimension] <= low < box.end[dimension]]
            covered = sum(math.prod(box.shape[dimension + 1 :]) for box in there)
            if covered < math.prod(shape[dimension + 1 :]):
                offset.append(low)
                lengths.append(high - low)
                boxes = there
                break
    return Box(tuple(offset), tuple(lengths))
