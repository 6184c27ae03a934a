"""Divides a plain segment into units: runs of neighboring chunks that are copied, hashed and sent together.

Chunks begin and end anywhere in a page of the file, but whole pages are written. A page belongs to the unit in which it
begins: that unit copies the page to its end. The next unit hashes its own bytes there, but does not send the page
again.

The start of a unit does not depend on the header's length, which is a multiple of a page: a plan without a header
(`plan_units`) is valid for the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np

from ckptstore.formats import uncached_copy
from ckptstore.formats.segment_files.layout import (
    CHUNK,
    HEADER_LIMIT,
    SEGMENT_LIMIT,
    Layout,
    TensorSpec,
    chunk_extents,
    order,
    padded,
    place,
    split,
)
from ckptstore.formats.states.state import TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK

__all__ = [
    "Chunk",
    "Fill",
    "Run",
    "SegmentBytes",
    "SegmentUnit",
    "UnitPlan",
    "filler",
    "plan_units",
    "runs_of",
    "units",
]

Fill: TypeAlias = Callable[[int, Bytes], None]
"""Copies bytes of a tensor from an offset on."""
Copy: TypeAlias = Callable[[Bytes, Bytes], None]
"""Copies the second argument to the first."""


Chunk: TypeAlias = tuple[TensorSpec, int, int]
"""A tensor, the offset of a chunk in it, and the chunk's length."""

_PIECE: Final = 1 << 20
_SMALL: Final = 64 << 10
"""Up to this size a call costs more than the sums of a tensor: neighbors are summed in one call."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighboring chunks that are summed together: whole small tensors of at most 1 MiB, or one other chunk.

    Attributes:
        small: whether they are whole small tensors.
        nbytes: bytes of all of them.
        lengths: bytes of each.
    """

    chunks: tuple[Chunk, ...]
    small: bool
    nbytes: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentUnit:
    """Neighboring chunks, and their range of the file.

    Attributes:
        runs: the same chunks, as they are summed if no digest is known before.
    """

    chunks: tuple[Chunk, ...]
    begin: int
    end: int
    runs: tuple[Run, ...] = field(default=(), repr=False, compare=False)

    @property
    def pages(self) -> tuple[int, int]:
        """The range of the file that it sends: from the first page that begins in it to the end of its last page."""
        return padded(self.begin), padded(self.end)

    @property
    def first(self) -> int:
        """The file offset of the memory that holds it: that of the page in which it begins."""
        return self.begin // BLOCK * BLOCK

    @property
    def space(self) -> int:
        """Bytes of memory that hold it: whole pages, at most a chunk plus two pages."""
        return padded(self.end) - self.first


def units(layout: Layout) -> tuple[SegmentUnit, ...]:
    """The units of a segment, in the order of the file."""
    return _units(layout.specs, layout.header_size)


@lru_cache(maxsize=8)  # a run saves the same tensors again and again
def _units(specs: tuple[TensorSpec, ...], header_size: int) -> tuple[SegmentUnit, ...]:
    found: list[SegmentUnit] = []
    chunks: list[Chunk] = []
    begin = end = header_size
    for spec in specs:
        for start, length in chunk_extents(spec.nbytes):
            if chunks and end + length - begin > CHUNK:
                found.append(SegmentUnit(tuple(chunks), begin, end, runs_of(chunks)))
                chunks, begin = [], end
            chunks.append((spec, start, length))
            end += length
    if chunks:
        found.append(SegmentUnit(tuple(chunks), begin, end, runs_of(chunks)))
    return tuple(found)


def runs_of(chunks: Sequence[Chunk], known: Container[str] = ()) -> tuple[Run, ...]:
    """Divide neighboring chunks into runs.

    Args:
        known: names of tensors whose digest is known: only their hashes are wanted.
    """

    def is_small(chunk: Chunk) -> bool:
        spec, _, _ = chunk
        return spec.nbytes <= _SMALL and not spec.nbytes % 4 and spec.name not in known

    found: list[Run] = []
    for small, group in groupby(chunks, is_small):
        for run in _pieces(group) if small else ([one] for one in group):
            lengths = tuple(length for _, _, length in run)
            found.append(Run(tuple(run), small, sum(lengths), lengths))
    return tuple(found)


def _pieces(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Groups of neighbors with at most `_PIECE` bytes."""
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if size + chunk[2] > _PIECE:
            yield group
            group, size = [], 0
        group.append(chunk)
        size += chunk[2]
    yield group


class SegmentBytes:
    """A segment whose bytes are copied from its tensors, any range of the file at a time, in any thread."""

    def __init__(self, layout: Layout, sources: Mapping[str, TensorSource]) -> None:
        """
        Args:
            sources: every tensor of `layout`, by name; others are ignored.
        """
        self._layout = layout
        self._sources = sources
        self._ends = [layout.offsets[spec.name] + spec.nbytes for spec in layout.specs]

    def copy(self, offset: int, out: Bytes, how: Copy = np.copyto) -> None:
        """Copy the bytes that the file has from `offset` on, after its header: tensors, then zeros.

        Args:
            how: copies bytes that are in memory in the form of the file.
        """
        done = 0
        specs = self._layout.specs
        for number in range(bisect_right(self._ends, offset), len(specs)):
            if done == len(out):
                return
            spec = specs[number]
            begin = max(0, offset - self._layout.offsets[spec.name])
            part = out[done : done + spec.nbytes - begin]
            filler(self._sources[spec.name], how)(begin, part)
            done += len(part)
        out[done:] = 0

    def fill(self, unit: SegmentUnit, out: Bytes) -> None:
        """Copy a unit, to the end of its last page, past the caches, to memory that begins with its first page."""
        self.copy(unit.begin, out[unit.begin - unit.first : unit.space], _streamed)


def _streamed(out: Bytes, source: Bytes) -> None:
    uncached_copy.copy(source, out)


def filler(source: TensorSource, how: Copy = np.copyto) -> Fill:
    """A function that copies bytes of a tensor from an offset on."""
    view = source.view()
    if view is None:
        return source.read

    def fill(offset: int, out: Bytes) -> None:
        how(out, view[offset : offset + len(out)])

    return fill


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The units of a state, known before the rest of its segments.

    Attributes:
        segments: for each segment its tensors in access order, their layout without a header, and its units.
        space: bytes of memory that hold all units at once.
    """

    segments: tuple[tuple[tuple[TensorSpec, ...], Layout, tuple[SegmentUnit, ...]], ...]
    space: int


@lru_cache(maxsize=4)  # a run saves the same tensors again and again, and training waits for this call
def plan_units(
    tensors: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None], ...],
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> UnitPlan:
    """Divide a state into segments and units, as `plain_segments.write_full` does with the same `limit`.

    Args:
        tensors: name, dtype and shape of each, in access order; then global shape and offset of a shard, or None twice.
        limit: maximum bytes of tensors per segment.

    Raises:
        FormatError: no segment can hold one of the tensors.
    """
    divided: Sequence[Sequence[TensorSpec]] = split([TensorSpec(*tensor) for tensor in tensors], limit)
    segments = []
    for specs in divided:
        layout = place(order(specs), 0)
        segments.append((tuple(specs), layout, units(layout)))
    return UnitPlan(tuple(segments), sum(unit.space for _, _, own in segments for unit in own))
