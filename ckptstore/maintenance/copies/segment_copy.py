"""One segment from a medium to another, byte for byte: nothing arrives that was not compared with its hash.

Copied, never linked or cloned: a link shares the blocks, and with them the bad sector that the copy is made for; and a
segment's file may be given to another one when it is deleted (recycling), which a second name would show. Every byte
passes through this process anyway, because it is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

import xxhash

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.errors import CorruptSegmentError, KeyExistsError
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.segments.segment_reader import Piece, SegmentReader, extents

__all__ = ["BLOCKS", "check_segment", "copy_segment"]

BLOCKS = 2
"""Blocks of a `Staging` that one call needs: the segment's first one, which is written last, and the present one."""


def copy_segment(
    source: Backend, target: Backend, entry: SegmentEntry, run: str, staging: Staging, advance: Advance
) -> None:
    """Copy a segment and make it durable. What an earlier try left at its key is replaced.

    Args:
        run: whose segment it has to say that it is.
        staging: memory; `BLOCKS` blocks of it for each thread that copies.
        advance: told the bytes that are written.

    Raises:
        CorruptSegmentError: it is missing, or a byte of it is not what was written; nothing is left of the copy.
        StorageError: a medium failed.
    """
    with closing(SegmentReader(source, entry)) as reader, staging.block() as first, staging.block() as block:
        reader.check_identity(run)
        checking = _Checking(entry.key, extents(_tensors(reader)))
        sink = _opened(target, entry)
        sink.shared = True
        try:
            # The first block has the header, and goes last: a file without one is recognisably unfinished.
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
    # Header and index have hashes of their own: what arrived is compared with them.
    try:
        SegmentReader(target, entry).close()
    except CorruptSegmentError:
        target.delete(entry.key)
        raise


def check_segment(source: Backend, entry: SegmentEntry, run: str, staging: Staging) -> None:
    """Read all of a segment, and compare it: `copy_segment` without the copy.

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
    except KeyExistsError:  # nobody knows of it: it was left by a copy that was killed
        target.delete(entry.key)
        return target.open_sink(entry.key, entry.size)


def _write(sink: SegmentSink, offset: int, memory: Bytes, length: int) -> None:
    whole = -(-length // BLOCK) * BLOCK
    memory[length:whole] = 0
    sink.write(offset, memory[:whole].data)


def _tensors(reader: SegmentReader) -> Iterable[TensorEntry]:
    return [tensor for step in reader.doc.steps for tensor in reader.doc.tensors.get(step, {}).values()]


class _Checking:
    """The chunks of a segment, hashed as its bytes come by from first to last.

    All of them come by: a header is refused whose chunks end elsewhere than the segment does.
    """

    def __init__(self, key: str, found: Sequence[Sequence[Piece]]) -> None:
        self._key = key
        self._pieces = [piece for extent in found for piece in extent if piece.chunk.length]
        self._next = 0
        self._sum = xxhash.xxh3_64()

    def take(self, offset: int, data: Bytes) -> None:
        """The bytes from `offset` on. Raises `CorruptSegmentError` naming tensor and offset."""
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
