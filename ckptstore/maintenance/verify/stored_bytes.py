"""Reads every byte of a segment and compares it with its hash, in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptionError, FormatError, StorageError
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.pages import BLOCK
from ckptstore.host.task_pool import Task
from ckptstore.maintenance.verify.description_check import Descriptions
from ckptstore.maintenance.verify.verify_findings import Findings, is_bad_medium
from ckptstore.segments.segment_reader import SegmentReader, TensorChunk, check_chunk, extents

__all__ = ["scrubbing"]


def scrubbing(
    backend: Backend, run: str, entry: SegmentEntry, staging: Staging, descriptions: Descriptions, found: Findings
) -> Task:
    """Return a task that reads one segment: its header and index, its description, and its chunks in all free threads.

    Args:
        run: the store's run.
        staging: one block for each thread.
        descriptions: takes the segment's description.
        found: collects errors.
    """

    def begin() -> Iterable[Task]:
        try:
            reader = SegmentReader(backend, entry)
        except (CorruptionError, FormatError, StorageError) as error:
            found.add(entry.key, error, entry.id)
            return []
        try:
            doc = reader.doc
            tensors = [tensor for step in doc.steps for tensor in doc.tensors.get(step, {}).values()]
            found.done(entry.size - sum(tensor.stored for tensor in tensors), 1)
            try:
                reader.check_identity(run)
            except CorruptionError as error:
                found.add(entry.key, error, entry.id)
            else:
                descriptions.take(reader)
            shared = _Shared(reader, extents(tensors))
        except BaseException:
            reader.close()
            raise
        return shared.tasks(staging, found)

    return begin


class _Shared:
    """A segment that several threads read. The last one closes it."""

    def __init__(self, reader: SegmentReader, pieces: list[list[TensorChunk]]) -> None:
        self._reader = reader
        self._pieces = pieces
        self._left = len(pieces)
        self._lock = threading.Lock()
        if not pieces:
            reader.close()

    def tasks(self, staging: Staging, found: Findings) -> list[Task]:
        """Return one task for each run of neighboring chunks."""

        def task(extent: list[TensorChunk]) -> Task:
            def work() -> Iterable[Task]:
                with staging.block() as block:
                    _check_extent(self._reader, extent, block, found)
                with self._lock:
                    self._left -= 1
                    last = not self._left
                if last:
                    self._reader.close()
                return ()

            return work

        return [task(extent) for extent in self._pieces]


def _check_extent(reader: SegmentReader, extent: list[TensorChunk], block: Bytes, found: Findings) -> None:
    entry = reader.entry
    begin = extent[0].chunk.offset
    end = extent[-1].chunk.offset + extent[-1].chunk.length
    data = block[begin % BLOCK : begin % BLOCK + end - begin]
    try:
        reader.source.read_into(begin, data.data)
    except (CorruptionError, StorageError) as error:
        if isinstance(error, StorageError) and not is_bad_medium(error):
            found.add(entry.key, error, entry.id)
            return
        if len(extent) > 1:  # one bad sector does not condemn its neighbors: read each chunk separately
            for piece in extent:
                _check_extent(reader, [piece], block, found)
            return
        what = f"tensor {extent[0].tensor.name!r}: bytes {begin}..{end} of the file: {error}"
        found.add(entry.key, CorruptionError(what), entry.id, [begin])
        return
    for piece in extent:
        at = piece.chunk.offset - begin
        try:
            check_chunk(entry.key, piece.tensor, piece.chunk, data[at : at + piece.chunk.length])
        except CorruptionError as error:
            found.add(entry.key, error, entry.id, [piece.chunk.offset])
    found.done(end - begin)
