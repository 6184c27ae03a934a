"""A sequential stream of bytes into a segment, cut into aligned blocks that several threads write.

The producer fills a block while the disk takes the one before: with two blocks in flight the copy, the hash and the
write overlap, and the memory in use is the staging budget, whatever the state's size.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ckptstore.backends.base import SegmentSink
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK

__all__ = ["BlockStream"]


class BlockStream:
    """Bytes appended one after the other from file offset `start` (a multiple of 4096).

    Use: fill `space(n)`, then `advance(k)`; at the end `finish()`. After an error call `drain()`, which leaving a
    ``with`` does, before the sink is aborted, so that no thread still writes into it.
    """

    def __init__(self, sink: SegmentSink, staging: Staging, pool: ThreadPoolExecutor, start: int) -> None:
        assert start % BLOCK == 0, start
        self._sink = sink
        self._staging = staging
        self._pool = pool
        self._block: Bytes | None = None
        self._used = 0
        self._offset = start
        self._writes: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain()

    @property
    def position(self) -> int:
        """File offset of the next byte."""
        return self._offset + self._used

    def space(self, wanted: int) -> Bytes:
        """Memory for the next bytes: at least 1, at most `wanted` of them."""
        if self._block is None:
            self._raise_failed()
            self._block = self._staging.take()
        return self._block[self._used : min(self._used + wanted, self._staging.block_bytes)]

    def advance(self, count: int) -> None:
        """`count` bytes of the last `space` are filled."""
        self._used += count
        assert self._used <= self._staging.block_bytes
        if self._used == self._staging.block_bytes:
            self._send(self._used)

    def append(self, data: Bytes) -> None:
        """Copy `data` (1-D uint8) to the stream."""
        done = 0
        while done < len(data):
            part = self.space(len(data) - done)
            part[:] = data[done : done + len(part)]
            self.advance(len(part))
            done += len(part)

    def finish(self) -> int:
        """Send the last, padded block, wait for every write; the end offset. Raises what a write raised."""
        end = self.position
        if self._block is not None and self._used:
            padded = -(-self._used // BLOCK) * BLOCK
            self._block[self._used : padded] = 0
            self._send(padded)
        self.drain()
        self._raise_failed()
        return end

    def drain(self) -> None:
        """Wait until no write is under way and give all memory back. Raises nothing."""
        if self._block is not None:
            self._staging.give(self._block)
            self._block = None
        for write in self._writes:
            write.exception()

    def _send(self, count: int) -> None:
        assert self._block is not None
        self._writes.append(self._pool.submit(self._write, self._offset, self._block, count))
        self._offset += count
        self._block = None
        self._used = 0

    def _write(self, offset: int, block: Bytes, count: int) -> None:
        try:
            self._sink.write(offset, block[:count].data)
            crash_point("save.first-block")
        finally:
            self._staging.give(block)

    def _raise_failed(self) -> None:
        """Raise what a finished write raised, and forget the others: a stream may have many thousands."""
        while self._writes and self._writes[0].done():
            self._writes[0].result()
            self._writes.popleft()
