"""Fills boxes of tensors from what is stored of them: assembles shards, reshards, or reads slices.

A *box* is a range of elements of a whole tensor in each dimension: the elements of a shard, or those that a caller
wants. For each stored part that overlaps the wanted box the necessary chunks are read, verified, and copied to their
places. A part that is contiguous in the wanted memory is read straight into it where the disk allows. Besides that,
only the memory of a few chunks is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy.typing as npt

from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, common_elements, elements_of, touches
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers, run_all
from ckptstore.restore.chains.chain import Chain, Target, decode_chunk, restore_tensors
from ckptstore.segments.segment_reader import (
    SegmentReader,
    TensorChunk,
    copy_jobs,
    extents,
    placing_jobs,
    reads_directly,
)

__all__ = [
    "LINE",
    "BoxRead",
    "MemorySink",
    "Part",
    "PartRead",
    "Sink",
    "bytes_to_read",
    "fill",
    "jobs_of",
    "memory_for",
    "new_sinks",
]

LINE: Final = 128
"""The address of a restored tensor is a multiple of this. torch's own memory begins at multiples of 64; at other
addresses BLAS sums in another order, and an optimizer with products of its state (LBFGS) takes other steps."""
_SHARED: Final = 1 << 20
"""New tensors below this many bytes share memory, so that there are few mappings."""

Part = tuple[Chain, Box]
"""The chain that restores a stored part of a tensor, and the box of its elements."""


class Sink(Protocol):
    """The destination of a box of a tensor.

    Attributes:
        box: the elements that it takes.
        memory: memory for the box's image, if that is contiguous in host memory; else None.
    """

    @property
    def box(self) -> Box: ...  # noqa: D102 - described above
    @property
    def memory(self) -> Bytes | None: ...  # noqa: D102

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Copy elements, in the form of `boxes.elements_of`, to their place in the box. Called from several threads."""


class MemorySink:
    """Memory that takes the image of a box."""

    def __init__(self, memory: Bytes, box: Box, itemsize: int) -> None:
        """Fill `memory`, which has `itemsize` bytes for each element of `box`."""
        self.image = memory
        self.memory: Bytes | None = memory
        self.box = box
        self._array = elements_of(memory, itemsize).reshape(box.shape)

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """See `Sink.put`."""
        self._array[index] = elements


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A wanted box of a tensor, and all stored parts of the tensor."""

    parts: Sequence[Part]
    sink: Sink


@dataclass(frozen=True, slots=True)
class Destination:
    """A sink of a stored part, and the memory for the whole part in it, if the part is contiguous there; else None."""

    sink: Sink
    memory: Bytes | None


class PartRead:
    """One stored part, and all destinations that take something of it.

    Attributes:
        chain: restores the part.
        box: the part's elements.
        whole: all chunks are needed.
        memory: the memory for the part, if it has one destination, which takes it as it is; else None.
    """

    def __init__(self, chain: Chain, box: Box, destinations: Sequence[Destination]) -> None:
        """Plan which chunk goes where."""
        self.chain = chain
        self.box = box
        self._itemsize = dtypes.get(chain.tensor.dtype).itemsize
        self._takers: dict[int, list[Destination]] = {}  # start of a chunk -> who takes something of it
        starts = list(accumulate((chunk.logical for chunk in chain.tensor.chunks), initial=0))
        for one in destinations:
            for number in self._chunks_of(one.sink.box, starts):
                self._takers.setdefault(starts[number], []).append(one)
        self.whole = len(self._takers) == len(chain.tensor.chunks)
        self.memory = destinations[0].memory if len(destinations) == 1 else None

    def _chunks_of(self, wanted: Box, starts: list[int]) -> Iterator[int]:
        """Numbers of the chunks that hold elements of a box. `starts`: the chunks' first bytes, and the part's end."""
        common = self.box.common(wanted)
        if common is None:
            return
        first = last = 0
        for start, end, low, length in zip(common.offset, common.end, self.box.offset, self.box.shape, strict=True):
            first = first * length + start - low
            last = last * length + end - 1 - low
        size = self._itemsize
        low_chunk, high_chunk = (bisect_right(starts, element * size) - 1 for element in (first, last))
        for number in range(low_chunk, high_chunk + 1):
            if number in (low_chunk, high_chunk) or touches(
                self.box, starts[number] // size, starts[number + 1] // size, common
            ):
                yield number

    def needs(self, start: int) -> bool:
        """Whether any byte of the chunk that begins at `start` in the part's image is wanted."""
        return start in self._takers

    def deliver(self, start: int, data: Bytes) -> None:
        """Copy a chunk to its places."""
        elements = elements_of(data, self._itemsize)
        for one in self._takers[start]:
            if one.memory is not None:
                one.memory[start : start + len(data)] = data
                continue
            for index, block in common_elements(elements, start // self._itemsize, self.box, one.sink.box):
                one.sink.put(index, block)

    def chunks(self) -> list[tuple[int, int, int]]:
        """(number, start, length) in the image of the chunks that are needed."""
        found, start = [], 0
        for number, chunk in enumerate(self.chain.tensor.chunks):
            if self.needs(start):
                found.append((number, start, chunk.logical))
            start += chunk.logical
        return found


def jobs_of(fillings: Sequence[BoxRead]) -> list[PartRead]:
    """The jobs of `fill`: one for each stored part, so that a chunk that several boxes need is read once."""
    found: dict[int, tuple[Chain, Box, list[Destination]]] = {}
    for filling in fillings:
        sink = filling.sink
        for chain, box in filling.parts:
            tensor = chain.tensor
            everything = sink.box.shape == (tensor.shape if tensor.global_shape is None else tensor.global_shape)
            common = box if everything else box.common(sink.box)
            if common is None or not common.size:
                continue
            memory = None
            if common == box and sink.memory is not None and (run := box.run(sink.box)) is not None:
                first = run * dtypes.get(tensor.dtype).itemsize
                memory = sink.memory[first : first + tensor.nbytes]
            found.setdefault(id(chain), (chain, box, []))[2].append(Destination(sink, memory))
    return [PartRead(*job) for job in found.values()]


def bytes_to_read(jobs: Sequence[PartRead]) -> int:
    """Logical bytes of the chunks that `fill` reads: those that it reports to `advance`."""
    return sum(length for job in jobs for _, _, length in job.chunks())


def fill(
    jobs: Sequence[PartRead],
    readers: Workers,
    staging: Staging,
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> None:
    """Read the wanted boxes, in parallel.

    Args:
        jobs: from `jobs_of`.
        staging: at least two blocks for every thread.
        verify: compare everything that is read with its hashes; bytes are copied only after the comparison.
        advance: called with the logical bytes of every restored chunk.

    Raises:
        CorruptSegmentError: the stored bytes are not those that were written. Boxes may be partly filled then, with
            verified bytes.
        StorageError: the medium failed.
    """
    run_all(readers.pool, _raw_work([job for job in jobs if job.chain.raw], staging, verify, advance))
    coded = [job for job in jobs if not job.chain.raw]
    if whole := [job for job in coded if job.whole]:
        targets: dict[str, tuple[Chain, Target]] = {
            job.chain.tensor.name: (job.chain, job.deliver if job.memory is None else job.memory) for job in whole
        }
        restore_tensors(targets, readers.pool, staging, verify=verify, advance=advance)
    work = [
        _chunk_work(job, *chunk, staging, verify, advance) for job in coded if not job.whole for chunk in job.chunks()
    ]
    run_all(readers.pool, work)


def _raw_work(
    jobs: Sequence[PartRead], staging: Staging, verify: bool, advance: Advance | None
) -> list[Callable[[], None]]:
    """Jobs that read uncompressed parts: several neighbors at once, large tensors straight to their place."""
    work: list[Callable[[], None]] = []
    staged: dict[int, tuple[SegmentReader, dict[str, PartRead]]] = {}
    for job in jobs:
        tensor, reader = job.chain.tensor, job.chain.links[-1].reader
        if job.memory is not None and reads_directly(tensor, job.memory):
            work += placing_jobs(reader, tensor, job.memory, verify=verify, advance=advance)
        else:
            staged.setdefault(id(reader), (reader, {}))[1][tensor.name] = job
    for reader, members in staged.values():
        work += _staged_work(reader, members, staging, verify, advance)
    return work


def _staged_work(
    reader: SegmentReader, members: dict[str, PartRead], staging: Staging, verify: bool, advance: Advance | None
) -> list[Callable[[], None]]:
    def needed(piece: TensorChunk) -> bool:
        return members[piece.tensor.name].needs(piece.start)

    def deliver(tensor: TensorEntry, start: int, data: Bytes) -> None:
        members[tensor.name].deliver(start, data)

    found = extents([job.chain.tensor for job in members.values()], needed=needed)
    return copy_jobs(reader, found, staging, deliver, verify=verify, advance=advance)


def _chunk_work(
    job: PartRead, number: int, start: int, length: int, staging: Staging, verify: bool, advance: Advance | None
) -> Callable[[], None]:
    """Restores one chunk of an encoded part of which only some chunks are needed."""

    def work() -> None:
        with staging.block() as scratch, staging.block() as decoded:
            out = decoded[:length]
            decode_chunk(job.chain, number, out, scratch, verify=verify)
            job.deliver(start, out)
        if advance is not None:
            advance(length)

    return work


def memory_for(parts: Sequence[Part], box: Box) -> Bytes:
    """New memory for the image of a box; the first large contiguous part can be read straight into it."""
    first = parts[0][0].tensor
    itemsize = dtypes.get(first.dtype).itemsize
    nbytes = box.size * itemsize
    for chain, part in parts:
        inside = part.common(box) == part
        if chain.raw and inside and chain.tensor.nbytes >= BLOCK and (run := part.run(box)) is not None:
            phase = (chain.tensor.chunks[0].offset - run * itemsize) % BLOCK
            if phase % itemsize == 0:
                return aligned(nbytes + BLOCK)[phase : phase + nbytes]
    return aligned(nbytes)


def new_sinks(boxes: Sequence[tuple[Sequence[Part], Box]]) -> list[MemorySink]:
    """New memory for boxes of tensors, each given with the stored parts of its tensor; small ones share a block.

    A block is unmapped with the last of them.
    """
    sizes = [dtypes.get(parts[0][0].tensor.dtype).itemsize for parts, _ in boxes]
    lengths = [box.size * size for (_, box), size in zip(boxes, sizes, strict=True)]
    block, at = aligned(sum(-(-length // LINE) * LINE for length in lengths if length < _SHARED)), 0
    sinks = []
    for (parts, box), size, length in zip(boxes, sizes, lengths, strict=True):
        if length < _SHARED:
            memory = block[at : at + length]
            at += -(-length // LINE) * LINE
        else:
            memory = memory_for(parts, box)
        sinks.append(MemorySink(memory, box, size))
    return sinks
