"""Copy many pieces of memory by address, in parallel, without a Python object for each piece.

When ten thousand small tensors are copied one by one, the calls cost more than the copies, and they hold the
interpreter lock. A compiled loop (`formats.uncached_copy.moves`) is nearly as fast as copying one large piece. Without
it, Linux copies a thousand pieces in one call (``process_vm_readv`` on the process itself), which takes several times
as long. Where that call is forbidden or fails, each piece is copied with its own call. Without the compiled loop,
large pieces are always copied with their own calls.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.formats import uncached_copy
from ckptstore.host.threads import default_threads

__all__ = ["BatchedCopies", "run_shared"]

_MOST_PIECES: Final = 1024
"""Most pieces that one call takes (``IOV_MAX``)."""
_LARGE_PIECE: Final = 64 << 10
"""Bytes of a piece from which its own call is faster: the system call looks at every page."""
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

_libc: Final = ctypes.CDLL(None, use_errno=True)  # its calls let other threads of Python run
_readv: Final = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, *([ctypes.c_void_p, ctypes.c_ulong] * 2), ctypes.c_ulong)


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
        self._jobs: list[Callable[[], None]] = []
        small: list[tuple[int, int, int]] = []
        large: list[tuple[int, int, int]] = []
        for to, at, nbytes in copies:
            if 0 < nbytes < _LARGE_PIECE:
                small.append((to, at, nbytes))
            large += [
                (to + start, at + start, min(size, nbytes - start))
                for start in range(0, nbytes if nbytes >= _LARGE_PIECE else 0, size)
            ]
        self._jobs += [_SingleCopies(part) for part in _split(large, len(large), size)]
        self._jobs += [_BatchedCall(part) for part in _split(small, _MOST_PIECES, size)]
        past = _UNCACHED_PIECE if self.nbytes >= _LARGE_COPY else _NEVER
        self._compiled = [_CompiledCopies(part, past) for part in _split(large + small, len(copies), size)]

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Copy everything. A large copy also uses the threads of `pool`."""
        jobs: Sequence[Callable[[], None]] = self._compiled if uncached_copy.ready() else self._jobs
        run_shared(pool, jobs, self.nbytes)


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


def _split(copies: Sequence[tuple[int, int, int]], most: int, job: int) -> list[list[tuple[int, int, int]]]:
    """Split the copies into parts of about `job` bytes and at most `most` copies."""
    parts: list[list[tuple[int, int, int]]] = []
    size = job
    for copy in copies:
        if size + copy[2] > job or len(parts[-1]) == most:
            parts.append([])
            size = 0
        parts[-1].append(copy)
        size += copy[2]
    return parts


class _SingleCopies:
    """Copies pieces one after another."""

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._copies = copies

    def __call__(self) -> None:
        for to, at, nbytes in self._copies:
            ctypes.memmove(to, at, nbytes)


class _CompiledCopies:
    """Copies pieces with the compiled loop."""

    def __init__(self, copies: Sequence[tuple[int, int, int]], past: int) -> None:
        rows = np.array(copies, np.int64).reshape(-1, 3)
        self._to, self._at, self._lengths = (np.ascontiguousarray(rows[:, column]) for column in range(3))
        self._past = past

    def __call__(self) -> None:
        uncached_copy.moves(self._to, self._at, self._lengths, self._past)


class _BatchedCall:
    """Copies pieces with one system call."""

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._each = _SingleCopies(copies)
        self._nbytes = sum(nbytes for _, _, nbytes in copies)
        self._to = _vectors([(to, nbytes) for to, _, nbytes in copies])
        self._at = _vectors([(at, nbytes) for _, at, nbytes in copies])
        to, at = (one.__array_interface__["data"][0] for one in (self._to, self._at))
        self._arguments = (to, len(copies), at, len(copies), 0)
        self._alone = _readv is None

    def __call__(self) -> None:
        if not self._alone and _readv(os.getpid(), *self._arguments) == self._nbytes:  # type: ignore[misc]
            return
        # The call is not allowed, or cannot read this memory (a device's). It would fail the next time, too.
        self._alone = True
        self._each()


def _vectors(pieces: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """The pieces as a ``struct iovec[]``."""
    return np.array(pieces, np.uint64).reshape(-1, 2)
