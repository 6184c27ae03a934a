"""Memory that is laid out as the plain segments of a state will be, so that it is written without another copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ckptstore.formats.layout import HEADER_LIMIT, SEGMENT_LIMIT, TensorSpec, order, padded, split
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Bytes

__all__ = ["LaidOutState", "Region", "RegionPlan", "plan_regions"]


@dataclass(frozen=True, slots=True)
class Region:
    """The data of one plain segment in memory.

    Attributes:
        specs: its tensors, in access order.
        memory: at a multiple of 4096, as the data region in the file is, with the tensors where they are there; the
            last page is filled up with zeros.
    """

    specs: tuple[TensorSpec, ...]
    memory: Bytes


@dataclass(frozen=True, slots=True)
class LaidOutState(FlatState):
    """A state whose tensors are views of the data regions of its segments.

    Attributes:
        regions: one for each segment, in order.
        digests: state digests that are known already, by name of the tensor.
    """

    regions: tuple[Region, ...]
    digests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Where the tensors of a state lie in memory that is laid out as its segments will be.

    Attributes:
        segments: the tensors of each segment, in access order.
        bounds: for each segment where its region begins in the memory, where its data ends, and where the region does.
        offsets: where each tensor begins in the memory, by name.
        size: bytes of memory: those of the state, and for each segment less than a page.
    """

    segments: tuple[tuple[TensorSpec, ...], ...]
    bounds: tuple[tuple[int, int, int], ...]
    offsets: Mapping[str, int]
    size: int

    def regions(self, memory: Bytes) -> tuple[Region, ...]:
        """The regions of page-aligned `memory`, of `size` bytes or more. What pads them is set to zero."""
        for _, data_end, end in self.bounds:
            memory[data_end:end] = 0
        return tuple(
            Region(specs, memory[start:end]) for specs, (start, _, end) in zip(self.segments, self.bounds, strict=True)
        )


@lru_cache(maxsize=4)  # a run saves the same tensors again and again, and whoever asks here keeps training waiting
def plan_regions(
    tensors: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None], ...],
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> RegionPlan:
    """Lay tensors out as `plain.write_full` will with the same `limit`.

    Args:
        tensors: name, dtype and shape of each, in access order; then global shape and offset of a shard, or None twice.
        limit: bytes of tensors per segment.

    Raises:
        FormatError: a tensor that no segment can hold.
    """
    segments = tuple(tuple(specs) for specs in split([TensorSpec(*tensor) for tensor in tensors], limit))
    bounds: list[tuple[int, int, int]] = []
    offsets: dict[str, int] = {}
    at = 0
    for specs in segments:
        start = at
        for spec in order(specs):
            offsets[spec.name] = at
            at += spec.nbytes
        bounds.append((start, at, padded(at)))
        at = padded(at)
    return RegionPlan(segments, tuple(bounds), offsets, at)
