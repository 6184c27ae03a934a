"""Thread pools that run jobs in parallel or in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ckptstore.host.cancellable_calls import current_scope, in_scope

__all__ = [
    "WORTH_THREADS",
    "SleepingPool",
    "Workers",
    "asleep",
    "cancel_and_wait",
    "default_threads",
    "run_all",
    "started_pool",
    "workers",
]

_T = TypeVar("_T")
WORTH_THREADS: Final = 1 << 20
"""States of at least this many bytes are copied, hashed and written by threads. For smaller ones, waking the threads
takes longer than the work."""


@dataclass(frozen=True, slots=True)
class Workers:
    """A pool and its number of threads. That many jobs run at once, and one more is queued."""

    pool: ThreadPoolExecutor
    threads: int

    @classmethod
    def sleeping(cls, threads: int, name: str) -> Workers:
        """Make a pool that has no threads yet (`SleepingPool`)."""
        return cls(SleepingPool(threads, name), threads)

    def wake(self) -> None:
        """Start the threads if this is a `SleepingPool`."""
        if isinstance(self.pool, SleepingPool):
            self.pool.wake()

    def in_order(self, jobs: Iterable[Callable[[], _T]]) -> Generator[_T]:
        """Yield the result of each job, in the order of the jobs.

        At most `threads` + 1 jobs are submitted and not yet consumed: the next job is taken from `jobs` when a result
        is. No job runs any more when this generator is exhausted, is closed, or raises the error of a job. A pool that
        sleeps runs each job in the calling thread when its result is taken.
        """
        if asleep(self.pool):
            for job in jobs:
                yield job()
            return
        window: deque[Future[_T]] = deque()
        scope = current_scope()
        try:
            for job in jobs:
                window.append(self.pool.submit(in_scope(scope, job)))
                if len(window) > self.threads:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        except (KeyboardInterrupt, SystemExit):
            if scope is not None:
                scope.abandon()
            raise
        finally:  # when closed early: once the save has failed, no thread may continue to read the state
            cancel_and_wait(window)


def cancel_and_wait(futures: Iterable[Future[Any]]) -> None:
    """Cancel the futures that have not begun, and wait for those that run."""
    futures = list(futures)
    for future in futures:
        future.cancel()
    wait(futures)


def default_threads() -> int:
    """The default number of threads for reading, decoding and encoding: one per core, at most four.

    Four threads keep a disk busy. Each holds one or two chunks in memory.
    """
    return min(4, os.cpu_count() or 1)


@contextmanager
def workers(threads: int, name: str) -> Iterator[Workers]:
    """A pool that lives as long as the ``with`` block. A thread is started when a job finds no idle one.

    Args:
        name: name of the threads, without the prefix ``ckptstore-``.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix=f"ckptstore-{name}") as pool:
        yield Workers(pool, threads)


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of `threads` threads, all of them started.

    `ThreadPoolExecutor` starts a thread when a job finds no idle one. On Python 3.12 that fails while the interpreter
    exits. It can also fail at any point of a training run when the machine's thread limit is reached.

    Args:
        name: prefix of the thread names.

    Raises:
        RuntimeError: the threads could not be started. None of them is left running.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        _start_all(pool, threads)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool


def _start_all(pool: ThreadPoolExecutor, threads: int) -> None:
    together = threading.Barrier(threads)  # a thread that waits for the others cannot take a second job
    try:
        for job in [ThreadPoolExecutor.submit(pool, together.wait) for _ in range(threads)]:
            job.result()
    except BaseException:
        together.abort()
        raise


class SleepingPool(ThreadPoolExecutor):
    """A pool that has no threads until `wake`. Until then `submit` runs the job at once in the calling thread.

    Copying, hashing and writing a small state takes less time than waking a thread for it.
    """

    def __init__(self, threads: int, name: str) -> None:
        """
        Args:
            threads: number of threads after `wake`.
            name: prefix of their names.
        """
        super().__init__(threads, thread_name_prefix=name)
        self._count = threads
        self._awake = False
        self._closed = False
        self._waking = threading.Lock()

    def wake(self) -> None:
        """Start all threads. A second call does nothing.

        Raises:
            RuntimeError: the threads could not be started, or the pool was shut down.
        """
        with self._waking:
            if not self._awake:
                _start_all(self, self._count)
                self._awake = True

    @property
    def asleep(self) -> bool:
        """Whether jobs run in the thread that submits them."""
        return not (self._awake or self._closed)

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """See `concurrent.futures.Executor.submit`."""
        if not self.asleep:
            return super().submit(fn, *args, **kwargs)  # closed: raises
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # `result` raises it
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def asleep(pool: ThreadPoolExecutor) -> bool:
    """Whether this is a `SleepingPool` that sleeps: a future for each job would then cost more than a small job."""
    return isinstance(pool, SleepingPool) and pool.asleep


def run_all(pool: ThreadPoolExecutor, work: Sequence[Callable[[], None]]) -> None:
    """Run all jobs on the pool. After the first error: start no more jobs, wait for the running ones, raise it."""
    if len(work) == 1 or asleep(pool):
        for job in work:
            job()
        return
    scope = current_scope()
    futures: list[Future[None]] = [pool.submit(in_scope(scope, job)) for job in work]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:  # Ctrl-C: running jobs stop waiting for their medium
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
