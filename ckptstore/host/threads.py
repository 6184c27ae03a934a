"""Pools of threads: jobs that are done together, and pools whose threads run from the beginning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

__all__ = ["run_all", "started_pool"]


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
    together = threading.Barrier(threads)  # a thread that waits for the others takes no second job
    try:
        for job in [pool.submit(together.wait) for _ in range(threads)]:
            job.result()
    except BaseException:
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool


def run_all(pool: ThreadPoolExecutor, work: Sequence[Callable[[], None]]) -> None:
    """Run every job on the pool; after the first error start no more, wait for the running ones, raise it."""
    if len(work) == 1:
        work[0]()
        return
    futures: list[Future[None]] = [pool.submit(job) for job in work]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
