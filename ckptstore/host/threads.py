"""Pools of threads: jobs that are done together or in order, and pools whose threads run from the beginning."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ckptstore.host.cancellable_calls import scope_here, within

__all__ = [
    "WORTH_THREADS",
    "SleepingPool",
    "Workers",
    "default_threads",
    "let_go",
    "run_all",
    "started_pool",
    "workers",
]

_T = TypeVar("_T")
WORTH_THREADS: Final = 1 << 20
"""Bytes of a state from which on threads copy, hash and write it. Below, waking them takes longer than the work."""


@dataclass(frozen=True, slots=True)
class Workers:
    """A pool, and how many threads it has: so much may be under way at once, and one job more to take next."""

    pool: ThreadPoolExecutor
    threads: int

    @classmethod
    def sleeping(cls, threads: int, name: str) -> Workers:
        """See `SleepingPool`."""
        return cls(SleepingPool(threads, name), threads)

    def wake(self) -> None:
        """Start the threads of a pool that sleeps."""
        if isinstance(self.pool, SleepingPool):
            self.pool.wake()

    def in_order(self, jobs: Iterable[Callable[[], _T]]) -> Generator[_T]:
        """What each job returns, in the order of the jobs, which are taken as results are; `threads` + 1 of them are
        under way at most. None runs any more once this is exhausted, closed, or has raised what a job raised.
        """
        window: deque[Future[_T]] = deque()
        scope = scope_here()
        try:
            for job in jobs:
                window.append(self.pool.submit(within(scope, job)))
                if len(window) > self.threads:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        except (KeyboardInterrupt, SystemExit):
            if scope is not None:
                scope.abandon()
            raise
        finally:  # closed early: nobody may go on reading the state once the save has failed
            let_go(window)


def let_go(futures: Iterable[Future[Any]]) -> None:
    """Wait until none of them runs any more; those that have not begun never do."""
    futures = list(futures)
    for future in futures:
        future.cancel()
    wait(futures)


def default_threads() -> int:
    """How many threads read, decode or code where nobody says it: one for each core, and no more than four.

    That many keep a disk busy; each has a chunk or two in memory.
    """
    return min(4, os.cpu_count() or 1)


@contextmanager
def workers(threads: int, name: str) -> Iterator[Workers]:
    """Threads for the length of a ``with``, each of which begins when a job finds none idle.

    Args:
        name: how its threads are named, after ``ckptstore-``.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix=f"ckptstore-{name}") as pool:
        yield Workers(pool, threads)


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of `threads` threads, all running.

    A pool of Python's starts a thread when a job finds none idle. That fails on 3.12 while the interpreter ends, and
    anywhere in a training run once the machine's limit of threads is reached.

    Args:
        name: how its threads are named.

    Raises:
        RuntimeError: so many threads are not to be had. None is left.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        _start_all(pool, threads)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool


def _start_all(pool: ThreadPoolExecutor, threads: int) -> None:
    together = threading.Barrier(threads)  # a thread that waits for the others takes no second job
    try:
        for job in [ThreadPoolExecutor.submit(pool, together.wait) for _ in range(threads)]:
            job.result()
    except BaseException:
        together.abort()
        raise


class SleepingPool(ThreadPoolExecutor):
    """A pool without threads until `wake`: till then `submit` does the work at once, in the thread that calls it.

    To copy, hash and write a small state takes less time than to wake a thread for it.
    """

    def __init__(self, threads: int, name: str) -> None:
        """
        Args:
            threads: how many it has once it is awake.
            name: how they are named.
        """
        super().__init__(threads, thread_name_prefix=name)
        self._count = threads
        self._awake = False
        self._closed = False
        self._waking = threading.Lock()

    def wake(self) -> None:
        """Start all threads. A second time does nothing.

        Raises:
            RuntimeError: so many threads are not to be had, or it was shut down.
        """
        with self._waking:
            if not self._awake:
                _start_all(self, self._count)
                self._awake = True

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """See `concurrent.futures.Executor.submit`."""
        if self._awake or self._closed:
            return super().submit(fn, *args, **kwargs)  # closed: raises
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # whoever asks for the result gets it
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def run_all(pool: ThreadPoolExecutor, work: Sequence[Callable[[], None]]) -> None:
    """Run every job on the pool; after the first error start no more, wait for the running ones, raise it."""
    if len(work) == 1:
        work[0]()
        return
    scope = scope_here()
    futures: list[Future[None]] = [pool.submit(within(scope, job)) for job in work]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:  # Ctrl-C: those that run do not wait for their medium any more
        if scope is not None:
            scope.abandon()
        raise
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
