"""How many threads hash at once: it depends on which side waits for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ckptstore.host.buffers import aligned
from ckptstore.host.threads import Workers
from ckptstore.segments.block_stream import BlockWrites


class Sink:
    """A medium that takes a block when the test permits it."""

    def __init__(self, broken: bool = False) -> None:
        self.open = threading.Event()
        self.broken = broken

    def write(self, offset: int, data: memoryview) -> None:
        assert self.open.wait(120)
        if self.broken:
            raise OSError(5, "gone")

    def seal(self, size: int) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class Jobs:
    """Jobs that send a block, and how many of them ran at once."""

    def __init__(self, writes: BlockWrites) -> None:
        self.writes = writes
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def one(self, number: int, sends: bool = True, seconds: float = 0.02) -> int:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if sends:
                self.writes.send(4096 * number, aligned(4096))
            time.sleep(seconds)
        finally:
            with self._lock:
                self.running -= 1
        return number


@contextmanager
def writing(sink: Sink) -> Iterator[tuple[BlockWrites, Workers]]:
    with ThreadPoolExecutor(1) as blocks, ThreadPoolExecutor(3) as pool, BlockWrites(sink, blocks, 16) as writes:
        yield writes, Workers(pool, 3)
        sink.open.set()


def test_one_thread_at_a_time_while_the_medium_is_busy() -> None:
    with writing(Sink()) as (writes, workers):
        jobs = Jobs(writes)
        jobs.one(0)  # the medium is busy from now on
        work = (lambda number=number: jobs.one(number) for number in range(1, 9))
        assert list(workers.in_order(writes.paced(work))) == list(range(1, 9))
        assert jobs.most == 1


def test_several_threads_while_the_medium_waits() -> None:
    with writing(Sink()) as (writes, workers):
        jobs = Jobs(writes)
        meet = threading.Barrier(3)

        def work() -> None:
            jobs.one(0, sends=False)
            meet.wait(120)  # breaks unless three run at once

        assert list(workers.in_order(writes.paced([work] * 6))) == [None] * 6
        assert jobs.most == 3


def test_a_waiting_thread_continues_when_the_medium_is_done() -> None:
    sink = Sink()
    with writing(sink) as (writes, workers):
        jobs = Jobs(writes)
        jobs.one(0)
        met = threading.Barrier(2)

        def work() -> None:
            sink.open.set()  # the second job begins while the first still runs
            met.wait(120)

        assert list(workers.in_order(writes.paced([work, work]))) == [None, None]


def test_a_failed_job_or_medium_blocks_no_thread() -> None:
    sink = Sink(broken=True)
    with writing(sink) as (writes, workers):
        jobs = Jobs(writes)

        def fails() -> None:
            raise ValueError("no")

        jobs.one(0)
        with pytest.raises(ValueError, match="no"):
            list(workers.in_order(writes.paced([fails, *[lambda: None] * 4])))
        sink.open.set()
        writes.wait()
        with pytest.raises(OSError, match="gone"):
            writes.check()
        assert list(workers.in_order(writes.paced([lambda: 1] * 5))) == [1] * 5
