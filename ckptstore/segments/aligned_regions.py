"""Plans memory with the layout of a state's plain segments, so that it is written without another copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from ckptstore.formats.segment_files.layout import HEADER_LIMIT, SEGMENT_LIMIT, TensorSpec, order, padded, split
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes

__all__ = ["LaidOutState", "RegionPlan", "SegmentRegion", "plan_regions"]


@dataclass(frozen=True, slots=True)
class SegmentRegion:
    """The data of one plain segment in memory.

    Attributes:
        specs: its tensors, in access order.
        memory: begins at a multiple of 4096 and has the layout of the data region in the file; the last page is padded
            with zeros.
    """

    specs: tuple[TensorSpec, ...]
    memory: Bytes


@dataclass(frozen=True, slots=True)
class LaidOutState(FlatState):
    """A state whose tensors are views of the data regions of its segments.

    Attributes:
        regions: one for each segment, in order.
        digests: state digests that are already known, by tensor name.
        limit: the `limit` with which `plan_regions` has divided exactly these tensors into the regions; None: they were
            divided in another way, or there are no regions.
        mapped_directly: whether the memory is that of segments on the medium (`mapped_fulls.MappedState`).
    """

    mapped_directly: ClassVar[bool] = False
    regions: tuple[SegmentRegion, ...]
    digests: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The positions of a state's tensors in memory that has the layout of its segments.

    Attributes:
        segments: the tensors of each segment, in access order.
        bounds: for each segment its start in the memory, the end of its data, and the end of its region.
        offsets: start of each tensor in the memory, by name.
        size: bytes of memory: those of the state, plus less than a page for each segment.
        limit: maximum bytes of tensors per segment.
    """

    segments: tuple[tuple[TensorSpec, ...], ...]
    bounds: tuple[tuple[int, int, int], ...]
    offsets: Mapping[str, int]
    size: int
    limit: int

    def regions(self, memory: Bytes) -> tuple[SegmentRegion, ...]:
        """The regions of page-aligned `memory` of at least `size` bytes. Sets their padding to zero."""
        for _, data_end, end in self.bounds:
            memory[data_end:end] = 0
        return tuple(
            SegmentRegion(specs, memory[start:end])
            for specs, (start, _, end) in zip(self.segments, self.bounds, strict=True)
        )


@lru_cache(maxsize=4)  # a run saves the same tensors again and again, and training waits for this call
def plan_regions(
    tensors: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None], ...],
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> RegionPlan:
    """Lay tensors out as `plain_segments.write_full` does with the same `limit`.

    Args:
        tensors: name, dtype and shape of each, in access order; then global shape and offset of a shard, or None twice.
        limit: maximum bytes of tensors per segment.

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
    return RegionPlan(segments, tuple(bounds), offsets, at, limit)
