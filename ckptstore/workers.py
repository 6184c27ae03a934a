"""Pools whose threads run from the beginning, so that none has to be started when it may be too late for that."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["started_pool"]


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
