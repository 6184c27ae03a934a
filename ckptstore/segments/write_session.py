"""Writes one segment in the prescribed order, with the medium, memory and threads that all segment writers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.formats import checksums
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.cancellable_calls import current_scope, in_scope
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers

__all__ = ["Sealing", "SegmentSession"]

Sealing: TypeAlias = Callable[[Callable[[], None]], None]
"""Makes a segment durable, now or soon."""


def _seal_now(seal: Callable[[], None]) -> None:
    seal()


@dataclass(frozen=True, slots=True)
class SegmentSession:
    """What is needed to write segments for one purpose: medium, memory, threads and callbacks.

    Attributes:
        backend: the medium.
        staging: memory between the data and the medium.
        blocks: threads that write blocks.
        workers: threads that copy, hash and encode.
        begun: called with the id of every segment before it exists, so that a failed one can be named in a drop.
        advance: called with the logical bytes of every finished piece, from any thread.
    """

    backend: Backend
    staging: Staging
    blocks: ThreadPoolExecutor
    workers: Workers
    begun: Callable[[str], None]
    advance: Advance

    def write_segment(
        self,
        draft: SegmentDoc,
        size: int,
        data: Callable[[SegmentSink], tuple[bytes, int]],
        sink: SegmentSink | None = None,
        seal: Sealing = _seal_now,
    ) -> SegmentEntry:
        """Write one segment and make it durable (COMMIT step 1): its data, then its header, then the seal.

        Args:
            draft: its document, with its uuid and term.
            size: its approximate number of bytes.
            data: writes everything but the header -> the header, and the length of the file. When it returns or
                raises, no thread writes any more.
            sink: the segment, if it is open already (`mapped_fulls`).
            seal: see `sealing`; without it the segment is durable when this returns.

        Raises:
            StorageError: the medium failed; what was written is removed as far as possible.
        """
        self.begun(draft.segment)
        if sink is None:
            crash_point("save.begin")
            sink = self.backend.open_sink(SegmentEntry(draft.segment, draft.term, 0, 0, "").key, size)
        try:
            header, size = data(sink)
            crash_point("save.before-header")
            # The header is written last: a file without one is recognizably unfinished.
            sink.write(0, _in_pages(header).data)
            seal(partial(_sealed, sink, size))
        except BaseException:
            sink.abort()
            raise
        return SegmentEntry(draft.segment, draft.term, size, len(header), checksums.header_hash(header))

    @contextmanager
    def sealing(self, segments: int) -> Iterator[Sealing]:
        """How to make several segments durable; all of them are when the ``with`` ends.

        If sealing takes most of the time (`Backend.sends_late`), a writing thread seals one segment while the next is
        filled. Raises the error of a seal; when this raises, no seal is running any more.
        """
        if segments < 2 or not self.backend.sends_late:
            yield _seal_now
            return
        last: list[Future[None]] = []

        def wait() -> None:
            while last:
                last.pop().result()

        def seal_in_background(seal: Callable[[], None]) -> None:
            wait()
            last.append(self.blocks.submit(in_scope(current_scope(), seal)))

        try:
            yield seal_in_background
            wait()
        finally:
            for one in last:
                one.exception()


_pages = threading.local()
_MOST: Final = 1 << 20
"""Bytes of page-aligned memory that each thread keeps for headers: to map fresh memory takes longer than a write."""


def _in_pages(header: bytes) -> Bytes:
    """A header in page-aligned memory, which the next header of this thread may overwrite."""
    memory: Bytes | None = getattr(_pages, "memory", None)
    if memory is None or len(memory) < len(header):
        memory = aligned(len(header))
        if len(header) <= _MOST:
            _pages.memory = memory
    memory[: len(header)] = np.frombuffer(header, np.uint8)
    return memory[: len(header)]


def _sealed(sink: SegmentSink, size: int) -> None:
    try:
        crash_point("save.before-seal")
        sink.seal(size)
        crash_point("save.sealed")
    except BaseException:
        sink.abort()
        raise
