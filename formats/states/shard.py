"""Shards in a state: parts of larger tensors, with their places, without a framework's own distributed tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, boxes_of, common_elements, elements_of, gap, overlapping
from ckptstore.formats.sources import Bytes, NumpySource, Origin, TensorSource

__all__ = ["JoinedSource", "PlacedArray", "Shard", "Shards", "place_within"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a larger tensor, which is in a state in place of that tensor.

    The ranks of a `RankWriter` give the parts that they have; together they must be the whole tensor. In ``into=`` of
    `Store.load` the part is filled in place. Ranks that have the same part are replicas of each other.

    Attributes:
        tensor: a torch tensor or numpy array: the part.
        global_shape: shape of the whole tensor.
        offset: index of the part's first element in the whole tensor, in each dimension.

    Raises:
        UsageError: the part is not inside a tensor of that shape.
    """

    tensor: Any
    global_shape: Sequence[int]
    offset: Sequence[int]

    def __post_init__(self) -> None:
        shape = getattr(self.tensor, "shape", None)
        if shape is None:
            raise UsageError(f"a Shard takes a tensor or an array, not a {type(self.tensor).__qualname__}")
        try:
            numbers = [tuple(int(number) for number in one) for one in (shape, self.global_shape, self.offset)]
        except (TypeError, ValueError):
            raise UsageError(
                f"Shard: global_shape={self.global_shape!r:.80}, offset={self.offset!r:.80}: both take one number for "
                "each dimension"
            ) from None
        part, whole, offset = numbers
        if len(offset) != len(part) or not Box(offset, part).inside(whole):
            raise UsageError(f"Shard: a part of shape {list(part)} at {list(offset)} is not inside {list(whole)}")
        object.__setattr__(self, "global_shape", whole)
        object.__setattr__(self, "offset", offset)

    @property
    def box(self) -> Box:
        """The elements that it has."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Several `Shard`s of one tensor, in place of that tensor. Together they have to be one box of it.

    A box, because a rank stores one part of a tensor (SPEC.md 5.1: a segment has at most one shard of it).

    Attributes:
        shards: at least one, in any order, without overlaps.

    Raises:
        UsageError: they are not Shards of one tensor, overlap, or are not a box together.
    """

    shards: Sequence[Shard]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        if not self.shards or not all(type(one) is Shard for one in self.shards):
            raise UsageError("Shards takes a list of at least one Shard")
        if len({tuple(one.global_shape) for one in self.shards}) > 1:
            shapes = ", ".join(sorted({str(list(one.global_shape)) for one in self.shards}))
            raise UsageError(f"Shards: parts of different tensors, of shapes {shapes}")
        boxes = [one.box for one in self.shards if one.box.size]
        if (pair := overlapping(boxes)) is not None:
            raise UsageError(f"Shards: {boxes[pair[0]]} and {boxes[pair[1]]} overlap")
        box = self.box
        inner = [Box(_minus(one.offset, box.offset), one.shape) for one in boxes]
        if boxes and (missing := gap(box.shape, inner)) is not None:
            where = Box(tuple(map(int.__add__, missing.offset, box.offset)), missing.shape)
            raise UsageError(
                f"Shards: together they are not a box: {where} of {box} is in none of them. A rank stores one box of a "
                "tensor: give it another part, or each part a name of its own"
            )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.shards[0].global_shape)

    @property
    def box(self) -> Box:
        """The elements that they have together."""
        boxes = [one.box for one in self.shards if one.box.size] or [self.shards[0].box]
        low = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
        high = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
        return Box(low, _minus(high, low))


def place_within(box: Box, whole: Sequence[int]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Global shape and offset of a source of `box`, as `sources.place_of` returns them; None for the whole tensor."""
    return (None, None) if box.shape == tuple(whole) else (tuple(whole), box.offset)


class PlacedArray(NumpySource):
    """The array of a `Shard`.

    Attributes:
        owner: the `Shard`.
        global_shape, offset: see `place_within`.
    """

    __slots__ = ("global_shape", "offset", "owner")

    def __init__(self, shard: Shard) -> None:
        """Wrap the array of `shard`. Raises `UnsupportedStateError` as `NumpySource`."""
        super().__init__(shard.tensor)
        self.owner = shard
        self.global_shape, self.offset = place_within(shard.box, shard.global_shape)
        if self.offset is not None:
            self.identity: Hashable = ("shard", self.identity, self.global_shape, self.offset)


class JoinedSource:
    """The box of a tensor that several sources have together. Implements `TensorSource`.

    Attributes:
        pieces: (box, source) of each part that has elements.
        box: the elements of the tensor that it has.
        owner: the `Shards`.
        global_shape, offset: see `place_within`.
    """

    __slots__ = ("box", "dtype", "global_shape", "identity", "nbytes", "offset", "origin", "owner", "pieces", "shape")

    def __init__(self, owner: Shards, sources: Sequence[TensorSource]) -> None:
        """Join the sources of `owner.shards`. Raises `UnsupportedStateError` if they have different dtypes."""
        first = sources[0]
        for source in sources:
            if (source.dtype, source.origin) != (first.dtype, first.origin):
                raise UnsupportedStateError(
                    f"Shards of different kinds: {first.origin} {first.dtype}, {source.origin} {source.dtype}"
                )
        self.owner = owner
        self.box = box = owner.box
        self.pieces = tuple(
            (one.box, source) for one, source in zip(owner.shards, sources, strict=True) if one.box.size
        )
        self.dtype: str = first.dtype
        self.origin: Origin = first.origin
        self.shape = box.shape
        self.nbytes: int = dtypes.nbytes(dtypes.get(first.dtype), box.shape)
        self.global_shape, self.offset = place_within(box, owner.global_shape)
        # Empty tensors have no memory: only the object itself distinguishes them.
        memory: tuple[Hashable, ...] = tuple((one, source.identity) for one, source in self.pieces) or (id(owner),)
        self.identity: Hashable = ("joined", owner.global_shape, memory)

    def view(self) -> Bytes | None:
        """None: no memory has the image."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """Copy a range of the image."""
        if offset < 0 or offset + out.size > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + out.size} of a tensor of {self.nbytes} bytes")
        size = dtypes.get(self.dtype).itemsize
        first, skip = divmod(offset, size)
        last = -(-(offset + out.size) // size)
        image = np.empty((last - first) * size, np.uint8)
        elements = elements_of(image, size)
        done = 0
        for part in boxes_of(self.box, first, last):
            block = elements[done : done + part.size].reshape(part.shape)
            for box, source in self.pieces:
                if (common := part.common(box)) is not None:
                    block[common.within(part)] = _elements(source, box, common, size)
            done += part.size
        out[:] = image[skip : skip + out.size]

    def split(
        self, start: int, elements: npt.NDArray[Any]
    ) -> Iterator[tuple[TensorSource, tuple[slice, ...], npt.NDArray[Any]]]:
        """Divide elements of the image, from element `start` on, among the parts: (source, index in it, elements)."""
        for box, source in self.pieces:
            for index, block in common_elements(elements, start, self.box, box):
                yield source, index, block


def _elements(source: TensorSource, box: Box, wanted: Box, size: int) -> npt.NDArray[Any]:
    """The elements `wanted` of a source of `box`, as `boxes.elements_of`. Reads the range that has them."""
    first = last = 0
    for start, end, low, length in zip(wanted.offset, wanted.end, box.offset, box.shape, strict=True):
        first = first * length + start - low
        last = last * length + end - 1 - low
    image = np.empty((last + 1 - first) * size, np.uint8)
    source.read(first * size, image)
    strides, step = [], size
    for length in reversed(box.shape):
        strides.append(step)
        step *= length
    return np.lib.stride_tricks.as_strided(elements_of(image, size), wanted.shape, strides[::-1])


def _minus(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))
