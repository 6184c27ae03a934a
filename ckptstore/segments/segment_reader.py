"""Reading tensors out of segments: parallel, verified, by extent, with no copy where none is needed.

An extent is a run of neighbouring chunks of about 16 MiB. Threads read extents into memory that agrees with the file
modulo the page size (so that O_DIRECT applies), hash every chunk, and hand bytes over only when the hash is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptstore.backends.base import Backend, SegmentSource
from ckptstore.errors import CorruptSegmentError, KeyNotFoundError, UsageError
from ckptstore.formats import checksums
from ckptstore.formats.layout import HEADER_LIMIT
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import Chunk, SegmentDoc, TensorEntry, check_header, parse
from ckptstore.host.buffers import BLOCK_BYTES, Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import run_all

__all__ = [
    "Piece",
    "SegmentReader",
    "copy_jobs",
    "copy_tensors",
    "extents",
    "load_tensors",
    "map_tensors",
    "placing_jobs",
    "read_chunk",
    "straight",
]

_WORTH_IT = 1 << 20
"""Bytes of a tensor from which reading it by itself, past the page cache, pays."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of one tensor and where its logical bytes begin within the tensor."""

    tensor: TensorEntry
    chunk: Chunk
    start: int


class SegmentReader:
    """An open segment whose header has been read and verified.

    Attributes:
        entry: as the log describes it.
        source: its bytes.
        doc: what it says of itself.
        described: how many bytes each of the reads had that this took: the header, and of a packed one the index.

    Raises:
        CorruptSegmentError: the file is missing, too short, or its header is not the one that was committed.
        StorageError: the medium failed.
    """

    def __init__(self, backend: Backend, entry: SegmentEntry) -> None:
        self.entry = entry
        self.described: list[int] = []  # bytes of each of the reads that its description took
        try:
            self.source: SegmentSource = backend.open_source(entry.key)
        except KeyNotFoundError as error:
            raise CorruptSegmentError(f"{entry.key}: the segment is committed but missing") from error
        try:
            self.doc: SegmentDoc = self._read_doc()
        except BaseException:
            self.source.close()
            raise

    def close(self) -> None:
        """Release the handle."""
        self.source.close()

    def check_identity(self, run: str) -> None:
        """Compare whose segment it says that it is with whose the log says. Raises `CorruptSegmentError`."""
        if (self.doc.run, self.doc.segment, self.doc.term) != (run, self.entry.id, self.entry.term):
            raise CorruptSegmentError(
                f"{self.entry.key}: holds segment {self.doc.segment} of term {self.doc.term} of run {self.doc.run}"
            )

    def _read_doc(self) -> SegmentDoc:
        entry = self.entry
        if self.source.size != entry.size:
            raise CorruptSegmentError(f"{entry.key}: {self.source.size} bytes, {entry.size} were committed")
        if entry.header > min(HEADER_LIMIT, entry.size):  # before memory is taken for it
            raise CorruptSegmentError(f"{entry.key}: a header of {entry.header} bytes was committed")
        header = self._read(0, entry.header)
        check_header(header, entry.hash, entry.key)
        return parse(header, entry.size, entry.key, self._read)

    def _read(self, offset: int, length: int) -> bytes:
        self.described.append(length)
        out = bytearray(length)
        self.source.read_into(offset, memoryview(out))
        return bytes(out)


def extents(
    tensors: Iterable[TensorEntry], limit: int = BLOCK_BYTES, needed: Callable[[Piece], bool] | None = None
) -> list[list[Piece]]:
    """Neighbouring chunks, in file order, in groups that span at most `limit` bytes (one chunk may be all of it).

    Args:
        needed: which chunks; None: all.
    """
    pieces = sorted(
        (piece for tensor in tensors for piece in _pieces(tensor) if needed is None or needed(piece)),
        key=lambda piece: (piece.chunk.offset, piece.start),
    )
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and _touches(groups[-1], piece) and _end(piece) - groups[-1][0].chunk.offset <= limit:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def load_tensors(
    reader: SegmentReader,
    tensors: Sequence[TensorEntry],
    pool: ThreadPoolExecutor,
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> dict[str, Bytes]:
    """Read uncompressed tensors of one segment straight into new memory.

    Tensors that are neighbours in the file share one region of memory, and are views of it: nothing is copied.

    Returns:
        name -> 1-D uint8, the tensor's logical bytes.

    Raises:
        CorruptSegmentError: names segment, tensor and offset.
        StorageError: the medium failed.
    """
    verify = verify or not reader.source.held
    result: dict[str, Bytes] = {tensor.name: aligned(0) for tensor in tensors if tensor.nbytes == 0}
    work: list[Callable[[], None]] = []
    for run in _runs(tensors):
        first = run[0].chunks[0].offset // BLOCK * BLOCK
        memory = aligned(_ceil(_stop(run[-1])) - first)
        for tensor in run:
            at = tensor.chunks[0].offset - first
            result[tensor.name] = memory[at : at + tensor.nbytes]
        work += [_read_job(reader, extent, memory, first, verify, advance) for extent in extents(run)]
    run_all(pool, work)
    return result


def map_tensors(
    reader: SegmentReader,
    tensors: Sequence[TensorEntry],
    pool: ThreadPoolExecutor,
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> dict[str, Bytes]:
    """Views of a private mapping of the segment: no copy at all, and pages are read when touched.

    Verification touches them all; without it the first use of a tensor may raise SIGBUS if the medium fails.

    Raises:
        UsageError: the backend cannot map.
        CorruptSegmentError: a checksum differs.
    """
    mapping = reader.source.map()
    if mapping is None:
        raise UsageError(f"{reader.entry.key}: mmap=True needs a local store, and a checkpoint of few segments")
    verify = verify or not reader.source.held
    memory = np.frombuffer(mapping, np.uint8)

    def job(extent: list[Piece]) -> Callable[[], None]:
        def work() -> None:
            for piece in extent:
                check_chunk(reader.entry.key, piece.tensor, piece.chunk, memory[piece.chunk.offset : _end(piece)])
                if advance is not None:
                    advance(piece.chunk.length)

        return work

    if verify:
        run_all(pool, [job(extent) for extent in extents(tensors)])
    elif advance is not None:
        advance(sum(tensor.nbytes for tensor in tensors))
    return {
        tensor.name: memory[tensor.chunks[0].offset : _stop(tensor)] if tensor.nbytes else aligned(0)
        for tensor in tensors
    }


def copy_tensors(
    reader: SegmentReader,
    tensors: Sequence[TensorEntry],
    pool: ThreadPoolExecutor,
    staging: Staging,
    deliver: Callable[[TensorEntry, int, Bytes], None],
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> None:
    """Read uncompressed tensors through staging memory and deliver verified bytes: `deliver(tensor, offset, bytes)`.

    `deliver` is called from several threads, in any order, and must copy. Nothing unverified is ever delivered.
    """
    run_all(pool, copy_jobs(reader, extents(tensors), staging, deliver, verify=verify, advance=advance))


def copy_jobs(
    reader: SegmentReader,
    found: Sequence[list[Piece]],
    staging: Staging,
    deliver: Callable[[TensorEntry, int, Bytes], None],
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> list[Callable[[], None]]:
    """What `copy_tensors` does, as work for a pool: one job for each of the extents `found`."""
    verify = verify or not reader.source.held

    def job(extent: list[Piece]) -> Callable[[], None]:
        def work() -> None:
            with staging.block() as block:
                first = extent[0].chunk.offset // BLOCK * BLOCK
                _read_job(reader, extent, block, first, verify, advance)()
                for piece in extent:
                    at = piece.chunk.offset - first
                    deliver(piece.tensor, piece.start, block[at : at + piece.chunk.length])

        return work

    return [job(extent) for extent in found]


def placing_jobs(
    reader: SegmentReader, tensor: TensorEntry, memory: Bytes, *, verify: bool = True, advance: Advance | None = None
) -> list[Callable[[], None]]:
    """Work that reads an uncompressed tensor straight into memory of its size, wherever that lies.

    Fast from a cold disk where memory and file agree modulo the page size (`straight`).
    """
    return [
        _read_job(
            reader, [piece], memory[piece.start : piece.start + piece.chunk.length], piece.chunk.offset, verify, advance
        )
        for piece in _pieces(tensor)
    ]


def straight(tensor: TensorEntry, memory: Bytes) -> bool:
    """Whether reading an uncompressed tensor into `memory`, of its size, needs no other memory from a cold disk."""
    address = memory.__array_interface__["data"][0]
    return len(memory) >= _WORTH_IT and all(
        (address + piece.start - piece.chunk.offset) % BLOCK == 0 for piece in _pieces(tensor)
    )


def read_chunk(
    reader: SegmentReader, tensor: TensorEntry, chunk: Chunk, scratch: Bytes, *, verify: bool = True
) -> Bytes:
    """The stored bytes of one chunk of a tensor, however it is coded: a part of `scratch`.

    Args:
        scratch: at least as long as the chunk and `SLACK`.

    Raises:
        CorruptSegmentError: its checksum differs, or it is longer than `scratch`; names segment and tensor.
        StorageError: the medium failed.
    """
    # Memory that agrees with the file modulo the page size lets the backend read past the cache.
    phase = chunk.offset % BLOCK
    payload = scratch[phase : phase + chunk.length]
    if len(payload) != chunk.length:
        raise CorruptSegmentError(
            f"{reader.entry.key}: tensor {tensor.name!r}: {chunk.length} stored bytes for a chunk of {chunk.logical}"
        )
    reader.source.read_into(chunk.offset, payload.data)
    if verify or not reader.source.held:
        check_chunk(reader.entry.key, tensor, chunk, payload)
    return payload


def check_chunk(where: str, tensor: TensorEntry, chunk: Chunk, data: Bytes) -> None:
    """Compare stored bytes with their hash. Raises `CorruptSegmentError` naming tensor and offset."""
    # A chunk longer than any block is cut by whoever reads into one: that is no chunk, whatever its hash.
    if len(data) != chunk.length or checksums.chunk_hash(data.data) != chunk.stored_hash:
        raise CorruptSegmentError(
            f"{where}: tensor {tensor.name!r}: checksum mismatch in bytes "
            f"{chunk.offset}..{chunk.offset + chunk.length} of the file"
        )


def _read_job(
    reader: SegmentReader, extent: Sequence[Piece], memory: Bytes, first: int, verify: bool, advance: Advance | None
) -> Callable[[], None]:
    """Read an extent to where it belongs in `memory`, which begins at file offset `first`, a multiple of 4096.

    Memory and file then agree modulo 4096, so the backend can read whole pages past the cache. Exactly the extent's
    bytes are written: a page shared by two extents must not be overwritten by one after the other verified its part.
    """

    def work() -> None:
        begin, end = extent[0].chunk.offset, _end(extent[-1])
        reader.source.read_into(begin, memory[begin - first : end - first].data)
        for piece in extent:
            at = piece.chunk.offset - first
            if verify:
                check_chunk(reader.entry.key, piece.tensor, piece.chunk, memory[at : at + piece.chunk.length])
            if advance is not None:
                advance(piece.chunk.length)

    return work


def _runs(tensors: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Tensors that lie in the file one behind the other, in groups."""
    runs: list[list[TensorEntry]] = []
    for tensor in sorted((t for t in tensors if t.nbytes), key=lambda t: t.chunks[0].offset):
        if runs and tensor.chunks[0].offset - _stop(runs[-1][-1]) == 0:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _pieces(tensor: TensorEntry) -> Iterator[Piece]:
    start = 0
    for chunk in tensor.chunks:
        yield Piece(tensor, chunk, start)
        start += chunk.logical


def _touches(extent: Sequence[Piece], piece: Piece) -> bool:
    return _end(extent[-1]) == piece.chunk.offset


def _end(piece: Piece) -> int:
    return piece.chunk.offset + piece.chunk.length


def _stop(tensor: TensorEntry) -> int:
    return tensor.chunks[-1].offset + tensor.chunks[-1].length


def _ceil(offset: int) -> int:
    return -(-offset // BLOCK) * BLOCK
