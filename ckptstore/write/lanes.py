"""The threads that make fulls durable: so many at once as there are lanes, each with writing threads of its own."""

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
    """Jobs begin in the order in which they were submitted, and may end in any."""

    def __init__(
        self, lanes: int, threads: int, begin_save: Callable[[], SaveSpace], ended: Callable[[SaveSpace], object]
    ) -> None:
        """
        Args:
            threads: those that write, of each lane.
            begin_save: `Backend.begin_save` of the medium.
            ended: ends that, when nothing more comes of the job that may free space.
        """
        self._pools = [SleepingPool(threads, f"ckptstore-write-{number}") for number in range(lanes)]
        self._free: SimpleQueue[ThreadPoolExecutor] = SimpleQueue()
        for pool in self._pools:
            self._free.put(pool)
        self._begin_save, self._ended = begin_save, ended
        self._under_way: set[Future[Any]] = set()
        self._jobs = started_pool(lanes, "ckptstore-persist")

    def wake(self) -> None:
        """Start the threads that write. Raises `RuntimeError`: so many are not to be had."""
        for pool in self._pools:
            pool.wake()

    def submit(self, work: Callable[[ThreadPoolExecutor], _T]) -> Future[_T]:
        """Do `work` with the writing threads of a lane, once one is free."""

        def run() -> _T:
            writers = self._free.get()  # there is one: no more jobs run than there are lanes
            space = self._begin_save()
            try:
                with space.within():
                    return work(writers)
            finally:
                self._ended(space)
                self._free.put(writers)

        return self._watched(self._jobs.submit(run))

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """Do `work` when all that was submitted before has ended."""
        earlier = list(self._under_way)

        def run() -> _T:
            wait(earlier)  # they have begun, or this would not have
            return work()

        return self._watched(self._jobs.submit(run))

    def close(self) -> None:
        """Wait for everything. May be repeated."""
        self._jobs.shutdown()
        for pool in self._pools:
            pool.shutdown()

    def _watched(self, future: Future[_T]) -> Future[_T]:
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future
