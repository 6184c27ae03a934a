"""The threads that make fulls durable: one full per lane at a time; each lane has its own writing threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptstore.backends.sharing import SaveSpace
from ckptstore.host.threads import SleepingPool, started_pool

__all__ = ["Lanes"]

_T = TypeVar("_T")


class Lanes:
    """A pool of lanes. Jobs begin in the order in which they were submitted, and may end in any order."""

    def __init__(
        self, lanes: int, threads: int, begin_save: Callable[[], SaveSpace], ended: Callable[[SaveSpace], object]
    ) -> None:
        """
        Args:
            threads: how many threads write in each lane.
            begin_save: `Backend.begin_save` of the medium.
            ended: ends the `SaveSpace` of a job, once the job can free no more space.
        """
        self._pools = [SleepingPool(threads, f"ckptstore-write-{number}") for number in range(lanes)]
        self._free: SimpleQueue[ThreadPoolExecutor] = SimpleQueue()
        for pool in self._pools:
            self._free.put(pool)
        self._begin_save, self._ended = begin_save, ended
        self._under_way: set[Future[Any]] = set()
        self._jobs = started_pool(lanes, "ckptstore-persist")

    def wake(self) -> None:
        """Start the threads that write. Raises `RuntimeError` if the system cannot start that many."""
        for pool in self._pools:
            pool.wake()

    def submit(self, work: Callable[[ThreadPoolExecutor], _T]) -> Future[_T]:
        """Run `work` with the writing threads of a lane, once a lane is free."""

        def run() -> _T:
            writers = self._free.get()  # does not block: no more jobs run than there are lanes
            space = self._begin_save()
            try:
                with space.within():
                    return work(writers)
            finally:
                self._ended(space)
                self._free.put(writers)

        return self._watched(self._jobs.submit(run))

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` when all jobs submitted before have ended."""
        earlier = list(self._under_way)

        def run() -> _T:
            wait(earlier)  # they have begun, since jobs begin in order
            return work()

        return self._watched(self._jobs.submit(run))

    def wait(self) -> None:
        """Wait until all jobs submitted before have ended."""
        wait(list(self._under_way))

    def close(self) -> None:
        """Wait for all jobs. May be called repeatedly."""
        self._jobs.shutdown()
        for pool in self._pools:
            pool.shutdown()

    def _watched(self, future: Future[_T]) -> Future[_T]:
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future
