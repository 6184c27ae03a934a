"""Fills boxes of tensors from what is stored of them: assembles shards, reshards, or reads slices.

A *box* is a range of elements of a whole tensor in each dimension: the elements of a shard, or those that a caller
wants. For each stored part that overlaps the wanted box the necessary chunks are read, verified, and copied to their
places. A part that is contiguous in the wanted memory is read straight into it where the disk allows. Besides that,
only the memory of a few chunks is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box, common_elements, elements_of, touches
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers, run_all
from ckptstore.restore.chain import Chain, Target, decode_chunk, restore_tensors
from ckptstore.segments.segment_reader import (
    SegmentReader,
    TensorChunk,
    copy_jobs,
    extents,
    placing_jobs,
    reads_directly,
)

__all__ = ["BoxRead", "MemorySink", "Part", "PartRead", "Sink", "bytes_to_read", "fill", "jobs_of", "memory_for"]

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
class PartRead:
    """One stored part, and what is wanted of it.

    Attributes:
        whole: the whole part is wanted.
        memory: the contiguous memory for it, if the whole part is wanted there; else None.
    """

    chain: Chain
    box: Box
    sink: Sink
    whole: bool
    memory: Bytes | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.get(self.chain.tensor.dtype).itemsize

    def needs(self, start: int, length: int) -> bool:
        """Whether any of these bytes of the part's image are wanted."""
        return self.whole or touches(self.box, start // self.itemsize, (start + length) // self.itemsize, self.sink.box)

    def deliver(self, start: int, data: Bytes) -> None:
        """Copy a chunk to its place."""
        if self.memory is not None:
            self.memory[start : start + len(data)] = data
            return
        elements = elements_of(data, self.itemsize)
        for index, block in common_elements(elements, start // self.itemsize, self.box, self.sink.box):
            self.sink.put(index, block)

    def chunks(self) -> list[tuple[int, int, int]]:
        """(number, start, length) in the image of the chunks that are needed."""
        found, start = [], 0
        for number, chunk in enumerate(self.chain.tensor.chunks):
            if self.needs(start, chunk.logical):
                found.append((number, start, chunk.logical))
            start += chunk.logical
        return found


def jobs_of(fillings: Sequence[BoxRead]) -> list[PartRead]:
    """The jobs of `fill`. Each stored part is in at most one of the fillings."""
    found = []
    for filling in fillings:
        sink = filling.sink
        for chain, box in filling.parts:
            tensor = chain.tensor
            everything = sink.box.shape == (tensor.shape if tensor.global_shape is None else tensor.global_shape)
            common = box if everything else box.common(sink.box)
            if common is None or not common.size:
                continue
            whole, memory = common == box, None
            if whole and sink.memory is not None and (run := box.run(sink.box)) is not None:
                first = run * dtypes.get(tensor.dtype).itemsize
                memory = sink.memory[first : first + tensor.nbytes]
            found.append(PartRead(chain, box, sink, whole, memory))
    return found


def bytes_to_read(jobs: Sequence[PartRead]) -> int:
    """Logical bytes of the chunks that `fill` reads: those that it reports to `advance`."""
    return sum(job.chain.tensor.nbytes if job.whole else sum(length for _, _, length in job.chunks()) for job in jobs)


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
        return members[piece.tensor.name].needs(piece.start, piece.chunk.logical)

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
