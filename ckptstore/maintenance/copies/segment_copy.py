"""Copies one segment from a medium to another, byte for byte, and compares every byte with its hash on the way.

It copies, and never links or clones: a link shares the blocks, and with them the bad sector that the copy protects
against. When a segment is deleted, its file may be overwritten by a new one (recycling), which would show through a
second name. Every byte passes through this process anyway, because it is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

import xxhash

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.errors import CorruptSegmentError, KeyExistsError
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.segments.segment_reader import SegmentReader, TensorChunk, extents

__all__ = ["BLOCKS", "check_segment", "copy_segment"]

BLOCKS = 2
"""Blocks of a `Staging` that one call needs: the segment's first one, which is written last, and the current one."""


def copy_segment(
    source: Backend, target: Backend, entry: SegmentEntry, run: str, staging: Staging, advance: Advance
) -> None:
    """Copy a segment and make it durable. Remains of an earlier try at its key are replaced.

    Args:
        run: the run that the segment has to belong to.
        staging: memory; `BLOCKS` blocks of it for each copying thread.
        advance: called with the number of bytes written.

    Raises:
        CorruptSegmentError: it is missing, or a byte of it is not what was written; the copy is removed.
        StorageError: a medium failed.
    """
    with closing(SegmentReader(source, entry)) as reader, staging.block() as first, staging.block() as block:
        reader.check_identity(run)
        checking = _Checking(entry.key, extents(_tensors(reader)))
        sink = _opened(target, entry)
        sink.shared = True
        try:
            # The first block has the header and is written last: a file without a header is recognizably unfinished.
            size = staging.block_bytes
            for offset in range(0, entry.size, size):
                length = min(size, entry.size - offset)
                memory = block if offset else first
                reader.source.read_into(offset, memory[:length].data)
                checking.take(offset, memory[:length])
                if offset:
                    _write(sink, offset, memory, length)
                    advance(length)
            crash_point("copy.before-header")
            _write(sink, 0, first, min(size, entry.size))
            sink.seal(entry.size)
            crash_point("copy.sealed")
        except BaseException:
            sink.abort()
            raise
    advance(min(size, entry.size))
    # Header and index have hashes of their own: check those of the copy.
    try:
        SegmentReader(target, entry).close()
    except CorruptSegmentError:
        target.delete(entry.key)
        raise


def check_segment(source: Backend, entry: SegmentEntry, run: str, staging: Staging) -> None:
    """Read a whole segment and check it: `copy_segment` without the copy.

    Raises:
        CorruptSegmentError, StorageError: as `copy_segment`.
    """
    with closing(SegmentReader(source, entry)) as reader, staging.block() as block:
        reader.check_identity(run)
        checking = _Checking(entry.key, extents(_tensors(reader)))
        for offset in range(0, entry.size, staging.block_bytes):
            data = block[: min(staging.block_bytes, entry.size - offset)]
            reader.source.read_into(offset, data.data)
            checking.take(offset, data)


def _opened(target: Backend, entry: SegmentEntry) -> SegmentSink:
    try:
        return target.open_sink(entry.key, entry.size)
    except KeyExistsError:  # no log names it: a killed copy left it
        target.delete(entry.key)
        return target.open_sink(entry.key, entry.size)


def _write(sink: SegmentSink, offset: int, memory: Bytes, length: int) -> None:
    whole = -(-length // BLOCK) * BLOCK
    memory[length:whole] = 0
    sink.write(offset, memory[:whole].data)


def _tensors(reader: SegmentReader) -> Iterable[TensorEntry]:
    return [tensor for step in reader.doc.steps for tensor in reader.doc.tensors.get(step, {}).values()]


class _Checking:
    """Hashes the chunks of a segment as its bytes pass from first to last.

    All of them pass: a header is refused if its chunks do not end where the segment ends.
    """

    def __init__(self, key: str, found: Sequence[Sequence[TensorChunk]]) -> None:
        self._key = key
        self._pieces = [piece for extent in found for piece in extent if piece.chunk.length]
        self._next = 0
        self._sum = xxhash.xxh3_64()

    def take(self, offset: int, data: Bytes) -> None:
        """Add the bytes from `offset` on. Raises `CorruptSegmentError` naming tensor and offset."""
        end = offset + len(data)
        while self._next < len(self._pieces):
            chunk = self._pieces[self._next].chunk
            begin, stop = max(chunk.offset, offset), min(chunk.offset + chunk.length, end)
            if begin < stop:
                self._sum.update(data[begin - offset : stop - offset].data)
            if chunk.offset + chunk.length > end:
                return
            if self._sum.hexdigest() != chunk.stored_hash:
                raise CorruptSegmentError(
                    f"{self._key}: tensor {self._pieces[self._next].tensor.name!r}: checksum mismatch in bytes "
                    f"{chunk.offset}..{chunk.offset + chunk.length} of the file"
                )
            self._sum = xxhash.xxh3_64()
            self._next += 1
