"""Copy many pieces of memory by address, in parallel, without a Python object for each piece.

When ten thousand small tensors are copied one by one, the calls cost more than the copies, and they hold the
interpreter lock. A compiled loop (`formats.uncached_copy.moves`) is nearly as fast as copying one large piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from ckptstore.formats import uncached_copy
from ckptstore.host.threads import default_threads

__all__ = ["BatchedCopies", "run_shared"]

_JOB: Final = 4 << 20
"""Bytes of a job, unless there are fewer than `_JOBS` jobs of this size."""
_JOBS: Final = 32
"""Least number of jobs of a large copy: jobs get smaller, because every thread waits for the others' last job."""
_SINGLE_THREAD: Final = 1 << 20
"""Bytes that one thread copies before another one has woken up."""
_LARGE_COPY: Final = 16 << 20
"""Bytes from which a copy leaves the caches before anything reads it. Its large pieces bypass the caches."""
_UNCACHED_PIECE: Final = 8 << 10
"""Bytes of a piece from which it bypasses the caches."""
_NEVER: Final = 1 << 62


class BatchedCopies:
    """One set of copies, which may be run repeatedly.

    The caller keeps the memory of both sides alive, at the same addresses, as long as it uses this object.
    """

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """
        Args:
            copies: target address, source address, bytes. Copies of zero bytes are left out.
        """
        self.nbytes = sum(nbytes for _, _, nbytes in copies)
        size = max(_SINGLE_THREAD, min(_JOB, self.nbytes // _JOBS))
        pieces = [
            (to + start, at + start, min(size, nbytes - start))
            for to, at, nbytes in copies
            for start in range(0, nbytes, size)
        ]
        past = _UNCACHED_PIECE if self.nbytes >= _LARGE_COPY else _NEVER
        self._jobs = [_Copies(part, past) for part in _split(pieces, size)]

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Copy everything. A large copy also uses the threads of `pool`."""
        run_shared(pool, self._jobs, self.nbytes)


def run_shared(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], None]], nbytes: int = _NEVER) -> None:
    """Run all jobs, in this thread and in the pool's threads as they wake up. Raises the error of a job.

    Args:
        nbytes: bytes that all jobs copy together. A small copy is done in this thread alone.
    """
    if nbytes <= _SINGLE_THREAD:
        for job in jobs:
            job()
        return
    numbers = itertools.count()  # `next` is one C call, which no thread interrupts: each number is taken once

    def work() -> None:
        while (number := next(numbers)) < len(jobs):
            jobs[number]()

    helping = [pool.submit(work) for _ in range(min(len(jobs), default_threads()) - 1)]
    try:
        work()
    finally:
        helped = [one for one in helping if not one.cancel()]
        wait(helped)
    for one in helped:
        one.result()


def _split(copies: Sequence[tuple[int, int, int]], job: int) -> list[list[tuple[int, int, int]]]:
    """Split the copies into parts of about `job` bytes."""
    parts: list[list[tuple[int, int, int]]] = []
    size = job
    for copy in copies:
        if size + copy[2] > job:
            parts.append([])
            size = 0
        parts[-1].append(copy)
        size += copy[2]
    return parts


class _Copies:
    """Copies some of the pieces."""

    def __init__(self, copies: Sequence[tuple[int, int, int]], past: int) -> None:
        rows = np.array(copies, np.int64).reshape(-1, 3)
        self._to, self._at, self._lengths = (np.ascontiguousarray(rows[:, column]) for column in range(3))
        self._past = past

    def __call__(self) -> None:
        uncached_copy.copy_pieces(self._to, self._at, self._lengths, self._past)
