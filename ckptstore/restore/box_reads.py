"""Filling boxes of tensors from what is stored of them: shards put together, cut in another way, or slices alone.

A *box* is a box of elements of a whole tensor: what a shard has, and what a caller wants of it. Of each stored part
that overlaps what is wanted the chunks are read that are needed, verified, and copied to where they belong; a part that
is one run of the wanted memory is read straight into it where the disk allows that. No other memory than a few chunks
is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from ckptstore.formats import dtypes
from ckptstore.formats.boxes import Box, elements_of, scattered, touches
from ckptstore.formats.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers, run_all
from ckptstore.restore.chain import Chain, Target, decode_chunk, restore_tensors
from ckptstore.segments.segment_reader import Piece, SegmentReader, copy_jobs, extents, placing_jobs, straight

__all__ = ["Filling", "Job", "MemorySink", "Part", "Sink", "bytes_to_read", "fill", "jobs_of", "memory_for"]

Part = tuple[Chain, Box]
"""What restores a stored part of a tensor, and which of its elements that are."""


class Sink(Protocol):
    """Where a box of a tensor goes.

    Attributes:
        box: which elements it takes.
        memory: the box's image, if that is one run of host memory; else None.
    """

    @property
    def box(self) -> Box: ...  # noqa: D102 - described above
    @property
    def memory(self) -> Bytes | None: ...  # noqa: D102

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Copy elements, as `boxes.elements_of` gives them, to their place in the box. Called from several threads."""


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
class Filling:
    """A box that is wanted of a tensor, and all that is stored of the tensor."""

    parts: Sequence[Part]
    sink: Sink


@dataclass(frozen=True, slots=True)
class Job:
    """One stored part and what is wanted of it.

    Attributes:
        whole: all of it is wanted.
        memory: all of it is wanted, as one run of this memory.
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
        """Whether bytes of the part's image are wanted, some of them."""
        return self.whole or touches(self.box, start // self.itemsize, (start + length) // self.itemsize, self.sink.box)

    def deliver(self, start: int, data: Bytes) -> None:
        """Copy a chunk to where it belongs."""
        if self.memory is not None:
            self.memory[start : start + len(data)] = data
            return
        elements = elements_of(data, self.itemsize)
        for index, block in scattered(elements, start // self.itemsize, self.box, self.sink.box):
            self.sink.put(index, block)

    def chunks(self) -> list[tuple[int, int, int]]:
        """(number, start, length) of the chunks that are needed, in the image."""
        found, start = [], 0
        for number, chunk in enumerate(self.chain.tensor.chunks):
            if self.needs(start, chunk.logical):
                found.append((number, start, chunk.logical))
            start += chunk.logical
        return found


def jobs_of(fillings: Sequence[Filling]) -> list[Job]:
    """What `fill` has to do. Each stored part is in one of the fillings at most."""
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
            found.append(Job(chain, box, sink, whole, memory))
    return found


def bytes_to_read(jobs: Sequence[Job]) -> int:
    """Logical bytes of the chunks that `fill` reads: those that it tells `advance` of."""
    return sum(job.chain.tensor.nbytes if job.whole else sum(length for _, _, length in job.chunks()) for job in jobs)


def fill(
    jobs: Sequence[Job],
    readers: Workers,
    staging: Staging,
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> None:
    """Read what is wanted, in parallel.

    Args:
        jobs: as `jobs_of` gave them.
        staging: at least two blocks for every thread.
        verify: compare all that is read with its hashes; what is copied was compared before.
        advance: told the logical bytes of every chunk that is restored.

    Raises:
        CorruptSegmentError: what is stored is not what was written. Boxes are filled in part then, with verified bytes.
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


def _raw_work(jobs: Sequence[Job], staging: Staging, verify: bool, advance: Advance | None) -> list[Callable[[], None]]:
    """Reads what lies in segments as it is: a few neighbours at once, large tensors straight to their place."""
    work: list[Callable[[], None]] = []
    staged: dict[int, tuple[SegmentReader, dict[str, Job]]] = {}
    for job in jobs:
        tensor, reader = job.chain.tensor, job.chain.links[-1].reader
        if job.memory is not None and straight(tensor, job.memory):
            work += placing_jobs(reader, tensor, job.memory, verify=verify, advance=advance)
        else:
            staged.setdefault(id(reader), (reader, {}))[1][tensor.name] = job
    for reader, members in staged.values():
        work += _staged_work(reader, members, staging, verify, advance)
    return work


def _staged_work(
    reader: SegmentReader, members: dict[str, Job], staging: Staging, verify: bool, advance: Advance | None
) -> list[Callable[[], None]]:
    def needed(piece: Piece) -> bool:
        return members[piece.tensor.name].needs(piece.start, piece.chunk.logical)

    def deliver(tensor: TensorEntry, start: int, data: Bytes) -> None:
        members[tensor.name].deliver(start, data)

    found = extents([job.chain.tensor for job in members.values()], needed=needed)
    return copy_jobs(reader, found, staging, deliver, verify=verify, advance=advance)


def _chunk_work(
    job: Job, number: int, start: int, length: int, staging: Staging, verify: bool, advance: Advance | None
) -> Callable[[], None]:
    """Restores one chunk of a coded part of which only some chunks are needed."""

    def work() -> None:
        with staging.block() as scratch, staging.block() as decoded:
            out = decoded[:length]
            decode_chunk(job.chain, number, out, scratch, verify=verify)
            job.deliver(start, out)
        if advance is not None:
            advance(length)

    return work


def memory_for(parts: Sequence[Part], box: Box) -> Bytes:
    """New memory for the image of a box; the first large part that is a run of it can be read straight into it."""
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
