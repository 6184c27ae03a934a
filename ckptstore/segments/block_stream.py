"""Writes aligned blocks into a segment by several threads, and cuts a stream of bytes into such blocks.

The producer fills a block while the disk writes the one before: with two blocks in flight the copy, the hash and the
write overlap, and the memory in use is the staging budget, whatever the size of the state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from ckptstore.backends.base import SegmentSink
from ckptstore.host.buffers import BLOCK_BYTES, Bytes, Staging
from ckptstore.host.crash_points import crash_point
from ckptstore.host.pages import BLOCK
from ckptstore.host.threads import asleep

__all__ = ["BlockStream", "BlockWrites"]

_T = TypeVar("_T")


class BlockWrites:
    """Blocks that the threads of a pool write into a sink. Any thread may send them, in any order.

    Call `wait`, or leave the ``with``, before the sink is sealed or aborted: no thread may write into it any more.
    """

    def __init__(self, sink: SegmentSink, pool: ThreadPoolExecutor, most: int) -> None:
        """
        Args:
            most: maximum number of blocks in flight: other jobs of the pool must not wait behind a whole state.
        """
        self._sink = sink
        self._pool = pool
        self._direct = asleep(pool)
        if self._direct:  # a small state: nothing is in flight when `send` returns
            return
        self._free = threading.Semaphore(most)
        self._in_flight: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._busy = 0
        self._filling = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def block(self, length: int) -> Bytes | None:
        """Memory of the sink, which is sent without a copy; None: it has none (`SegmentSink.block`)."""
        return self._sink.block(length)

    @property
    def refers(self) -> bool:
        """Whether the sink sends memory without copying it first (`SegmentSink.refer`)."""
        return self._sink.refers

    def refer(self, offset: int, data: Bytes) -> None:
        """See `SegmentSink.refer`."""
        self._sink.refer(offset, data.data)

    def send(self, offset: int, data: Bytes, written: Callable[[], None] = lambda: None) -> None:
        """Write `data` at `offset` by a thread of the pool; waits while the maximum number of blocks is in flight.

        If the pool slept when this object was made, the data is written when this returns.

        Args:
            offset: position in the file, a multiple of 4096, as are the length and the address of `data`.
            written: called when `data` may change, also if this raises.

        Raises:
            the error of an earlier write, or of this one if it is done.
        """
        if self._direct:
            self._write(offset, data, written)
            return
        self._free.acquire()
        self._count_busy(1)
        try:
            self.check()
            future = self._pool.submit(self._write, offset, data, written)
        except BaseException:
            self._count_busy(-1)
            self._free.release()
            written()
            raise
        with self._lock:
            self._in_flight.append(future)

    def paced(self, jobs: Iterable[Callable[[], _T]]) -> Iterator[Callable[[], _T]]:
        """Yield the jobs, which call `send`, one by one: the next one when no job runs, or when no block is in flight.

        Threads that hash in parallel compete for memory bandwidth, also with training. So a second job starts only if
        the medium would otherwise wait for the first.
        """
        if self._direct:
            yield from jobs
            return
        for job in jobs:
            with self._changed:
                while self._filling and self._busy:
                    self._changed.wait()
                self._filling += 1
            yield partial(self._fill, job)

    def _fill(self, job: Callable[[], _T]) -> _T:
        try:
            return job()
        finally:
            with self._changed:
                self._filling -= 1
                self._changed.notify()

    def check(self) -> None:
        """Raise the error of a finished write, and forget finished ones: a segment may have many thousands."""
        if self._direct:
            return
        with self._lock:
            while self._in_flight and self._in_flight[0].done():
                self._in_flight[0].result()
                self._in_flight.popleft()

    def wait(self) -> None:
        """Wait until no write is in flight. Raises nothing: `check` does."""
        if self._direct:
            return
        with self._lock:
            under_way = list(self._in_flight)
        for write in under_way:
            write.exception()

    def _write(self, offset: int, data: Bytes, written: Callable[[], None]) -> None:
        try:
            for start in range(0, len(data), BLOCK_BYTES):
                self._sink.write(offset + start, data[start : start + BLOCK_BYTES].data)
            crash_point("save.first-block")
        finally:
            written()
            if not self._direct:
                self._count_busy(-1)
                self._free.release()

    def _count_busy(self, count: int) -> None:
        with self._changed:
            self._busy += count
            self._changed.notify()


class BlockStream:
    """Bytes appended one after the other from file offset `start` (a multiple of 4096).

    Use: fill `space(n)`, then `advance(k)`; at the end `finish()`. After an error call `drain()`, or leave the
    ``with``, before the sink is aborted, so that no thread writes into it any more.
    """

    def __init__(self, sink: SegmentSink, staging: Staging, pool: ThreadPoolExecutor, start: int) -> None:
        assert start % BLOCK == 0, start
        self._staging = staging
        self._block: Bytes | None = None
        self._used = 0
        self._offset = start
        self._writes = BlockWrites(sink, pool, staging.blocks)

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
            self._writes.check()
            self._block = self._staging.take()
        return self._block[self._used : min(self._used + wanted, self._staging.block_bytes)]

    def advance(self, count: int) -> None:
        """Mark `count` bytes of the last `space` as filled."""
        self._used += count
        assert self._used <= self._staging.block_bytes
        if self._used == self._staging.block_bytes:
            self._send(self._used)

    def append(self, data: Bytes) -> None:
        """Copy `data` (1-D uint8) to the stream."""
        done, end = 0, self._used + len(data)
        if self._block is not None and end < self._staging.block_bytes:  # most payloads are small
            self._block[self._used : end] = data
            self._used = end
            return
        while done < len(data):
            part = self.space(len(data) - done)
            part[:] = data[done : done + len(part)]
            self.advance(len(part))
            done += len(part)

    def finish(self) -> int:
        """Send the last, padded block and wait for every write -> the end offset. Raises the error of a write."""
        end = self.position
        if self._block is not None and self._used:
            padded = -(-self._used // BLOCK) * BLOCK
            self._block[self._used : padded] = 0
            self._send(padded)
        self.drain()
        self._writes.check()
        return end

    def drain(self) -> None:
        """Wait until no write is in flight, and return all memory. Raises nothing."""
        if self._block is not None:
            self._staging.give(self._block)
            self._block = None
        self._writes.wait()

    def _send(self, count: int) -> None:
        block, offset = self._block, self._offset
        assert block is not None
        self._block = None
        self._offset += count
        self._used = 0
        self._writes.send(offset, block[:count], lambda: self._staging.give(block))
