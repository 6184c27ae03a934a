"""Reads tensors from segments: parallel, verified, extent by extent, without a copy where none is needed.

An extent is a run of neighboring chunks of about 16 MiB. Threads read extents into memory that agrees with the file
modulo the page size (so that O_DIRECT works), hash every chunk, and return bytes only if the hash is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptstore.backends.base import Backend, SegmentSource
from ckptstore.errors import CorruptSegmentError, KeyNotFoundError, UsageError
from ckptstore.formats import checksums
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.layout import HEADER_LIMIT
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry, check_header, parse
from ckptstore.host.buffers import BLOCK_BYTES, Bytes, Staging, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import run_all

__all__ = [
    "MappedTensor",
    "SegmentReader",
    "TensorChunk",
    "copy_jobs",
    "copy_tensors",
    "extents",
    "load_tensors",
    "map_segment",
    "map_tensors",
    "placing_jobs",
    "read_chunk",
    "read_extent",
    "reads_directly",
]

_WORTH_IT = 1 << 20
"""Minimum bytes of a tensor for which it pays to read the tensor separately, past the page cache."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """One chunk of one tensor, and the offset of its logical bytes in the tensor."""

    tensor: TensorEntry
    chunk: Chunk
    start: int


class SegmentReader:
    """An open segment whose header has been read and verified.

    Attributes:
        entry: its entry in the log.
        source: its bytes.
        doc: its document.
        described: offset and bytes of each read that the description took: the header, and of a packed segment the
            index.

    Raises:
        CorruptSegmentError: the file is missing, too short, or its header is not the one that was committed.
        StorageError: the medium failed.
    """

    def __init__(self, backend: Backend, entry: SegmentEntry) -> None:
        self.entry = entry
        self.described: list[tuple[int, int]] = []  # see above
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
        """Compare the run, id and term in its document with those of the log. Raises `CorruptSegmentError`."""
        if (self.doc.run, self.doc.segment, self.doc.term) != (run, self.entry.id, self.entry.term):
            raise CorruptSegmentError(
                f"{self.entry.key}: holds segment {self.doc.segment} of term {self.doc.term} of run {self.doc.run}"
            )

    def _read_doc(self) -> SegmentDoc:
        entry = self.entry
        if self.source.size != entry.size:
            raise CorruptSegmentError(f"{entry.key}: {self.source.size} bytes, {entry.size} were committed")
        if entry.header > min(HEADER_LIMIT, entry.size):  # before memory is allocated for it
            raise CorruptSegmentError(f"{entry.key}: a header of {entry.header} bytes was committed")
        header = self._read(0, entry.header)
        check_header(header, entry.hash, entry.key)
        return parse(header, entry.size, entry.key, self._read)

    def _read(self, offset: int, length: int) -> bytes:
        self.described.append((offset, length))
        out = bytearray(length)
        self.source.read_into(offset, memoryview(out))
        return bytes(out)


def extents(
    tensors: Iterable[TensorEntry], limit: int = BLOCK_BYTES, needed: Callable[[TensorChunk], bool] | None = None
) -> list[list[TensorChunk]]:
    """Groups of neighboring chunks, in file order, that span at most `limit` bytes (a single chunk may fill that).

    Args:
        needed: selects chunks; None: all.
    """
    pieces = sorted(
        (piece for tensor in tensors for piece in _pieces(tensor) if needed is None or needed(piece)),
        key=lambda piece: (piece.chunk.offset, piece.start),
    )
    groups: list[list[TensorChunk]] = []
    for piece in pieces:
        if groups and _adjacent(groups[-1], piece) and _end(piece) - groups[-1][0].chunk.offset <= limit:
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

    Tensors that are neighbors in the file share one region of memory, and are views of it: nothing is copied.

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
        memory = aligned(_ceil(_tensor_end(run[-1])) - first)
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
    """Views of a private mapping of the segment: no copy at all; pages are read when they are accessed.

    Verification reads all of them; without it the first use of a tensor may raise SIGBUS if the medium fails.

    Raises:
        UsageError: the backend cannot map.
        CorruptSegmentError: a checksum differs.
    """
    mapped = map_segment(reader, tensors)
    verify = verify or not reader.source.held

    def job(extent: list[TensorChunk]) -> Callable[[], None]:
        def work() -> None:
            for piece in extent:
                mapped[piece.tensor.name].check_piece(piece)
                if advance is not None:
                    advance(piece.chunk.length)

        return work

    if verify:
        run_all(pool, [job(extent) for extent in extents(tensors)])
    elif advance is not None:
        advance(sum(tensor.nbytes for tensor in tensors))
    return {name: one.image for name, one in mapped.items()}


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """An uncompressed tensor in a private mapping of its segment. Nothing of it is verified yet.

    Attributes:
        where: names the segment in errors.
        entry: the tensor.
        memory: the whole segment.
    """

    where: str
    entry: TensorEntry
    memory: Bytes

    @property
    def image(self) -> Bytes:
        """The tensor's bytes."""
        chunks = self.entry.chunks
        return self.memory[chunks[0].offset : _tensor_end(self.entry)] if chunks else aligned(0)

    def check(self) -> None:
        """Compare its bytes with their hashes. Raises `CorruptSegmentError`."""
        for piece in _pieces(self.entry):
            self.check_piece(piece)

    def check_piece(self, piece: TensorChunk) -> None:
        """Compare one chunk with its hash. Raises `CorruptSegmentError`."""
        check_chunk(self.where, self.entry, piece.chunk, self.memory[piece.chunk.offset : _end(piece)])


def map_segment(reader: SegmentReader, tensors: Iterable[TensorEntry]) -> dict[str, MappedTensor]:
    """Map a segment and find tensors in it, by name. The mapping lives as long as one of them. Reads nothing.

    Raises:
        UsageError: the backend cannot map.
        StorageError: the medium failed.
    """
    mapping = reader.source.map()
    if mapping is None:
        raise UsageError(f"{reader.entry.key}: mmap=True needs a local store, and a checkpoint of few segments")
    memory = np.frombuffer(mapping, np.uint8)
    return {tensor.name: MappedTensor(reader.entry.key, tensor, memory) for tensor in tensors}


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
    found: Sequence[list[TensorChunk]],
    staging: Staging,
    deliver: Callable[[TensorEntry, int, Bytes], None],
    *,
    verify: bool = True,
    advance: Advance | None = None,
) -> list[Callable[[], None]]:
    """The jobs of `copy_tensors` for a pool: one job for each of the extents `found`."""

    def job(extent: list[TensorChunk]) -> Callable[[], None]:
        def work() -> None:
            with staging.block() as block:
                for piece, data in zip(extent, read_extent(reader, extent, block, verify=verify), strict=True):
                    deliver(piece.tensor, piece.start, data)
                    if advance is not None:
                        advance(piece.chunk.length)

        return work

    return [job(extent) for extent in found]


def read_extent(
    reader: SegmentReader, extent: Sequence[TensorChunk], scratch: Bytes, *, verify: bool = True
) -> list[Bytes]:
    """The stored bytes of neighboring chunks, in one read: slices of `scratch`, all of them verified.

    Args:
        extent: one of `extents`, of a limit that is `SLACK` below the length of `scratch`.

    Raises:
        CorruptSegmentError: a checksum differs; names segment and tensor.
        StorageError: the medium failed.
    """
    first = extent[0].chunk.offset // BLOCK * BLOCK
    _read_job(reader, extent, scratch, first, verify or not reader.source.held, None)()
    places = [(piece.chunk.offset - first, piece.chunk.length) for piece in extent]
    return [scratch[at : at + length] for at, length in places]


def placing_jobs(
    reader: SegmentReader, tensor: TensorEntry, memory: Bytes, *, verify: bool = True, advance: Advance | None = None
) -> list[Callable[[], None]]:
    """Jobs that read an uncompressed tensor straight into memory of its size, at any address.

    Fast from a cold disk if memory and file agree modulo the page size (`reads_directly`).
    """
    return [
        _read_job(
            reader, [piece], memory[piece.start : piece.start + piece.chunk.length], piece.chunk.offset, verify, advance
        )
        for piece in _pieces(tensor)
    ]


def reads_directly(tensor: TensorEntry, memory: Bytes) -> bool:
    """Whether a cold read of an uncompressed tensor into `memory`, of its size, needs no other memory."""
    address = memory.__array_interface__["data"][0]
    return len(memory) >= _WORTH_IT and all(
        (address + piece.start - piece.chunk.offset) % BLOCK == 0 for piece in _pieces(tensor)
    )


def read_chunk(
    reader: SegmentReader, tensor: TensorEntry, chunk: Chunk, scratch: Bytes, *, verify: bool = True
) -> Bytes:
    """The stored bytes of one chunk of a tensor, in any encoding: a slice of `scratch`.

    Args:
        scratch: at least as long as the chunk plus `SLACK`.

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
    # A reader truncates a chunk that is longer than its block: then it is damaged, whatever its hash.
    if len(data) != chunk.length or checksums.chunk_hash(data.data) != chunk.stored_hash:
        raise CorruptSegmentError(
            f"{where}: tensor {tensor.name!r}: checksum mismatch in bytes "
            f"{chunk.offset}..{chunk.offset + chunk.length} of the file"
        )


def _read_job(
    reader: SegmentReader,
    extent: Sequence[TensorChunk],
    memory: Bytes,
    first: int,
    verify: bool,
    advance: Advance | None,
) -> Callable[[], None]:
    """Read an extent to its place in `memory`, which begins at file offset `first`, a multiple of 4096.

    Memory and file then agree modulo 4096, so the backend can read whole pages past the cache. Exactly the extent's
    bytes are written: a page that two extents share must not be overwritten by one after the other verified its part.
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
    """Groups of tensors that are adjacent in the file."""
    runs: list[list[TensorEntry]] = []
    for tensor in sorted((t for t in tensors if t.nbytes), key=lambda t: t.chunks[0].offset):
        if runs and tensor.chunks[0].offset - _tensor_end(runs[-1][-1]) == 0:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _pieces(tensor: TensorEntry) -> Iterator[TensorChunk]:
    start = 0
    for chunk in tensor.chunks:
        yield TensorChunk(tensor, chunk, start)
        start += chunk.logical


def _adjacent(extent: Sequence[TensorChunk], piece: TensorChunk) -> bool:
    return _end(extent[-1]) == piece.chunk.offset


def _end(piece: TensorChunk) -> int:
    return piece.chunk.offset + piece.chunk.length


def _tensor_end(tensor: TensorEntry) -> int:
    return tensor.chunks[-1].offset + tensor.chunks[-1].length


def _ceil(offset: int) -> int:
    return -(-offset // BLOCK) * BLOCK
