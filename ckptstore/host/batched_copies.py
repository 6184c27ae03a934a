"""Many pieces of memory copied to one place: by address, without a Python object for each, beside other threads.

Copying ten thousand small tensors one by one costs more for the calls than for the copies, and holds the interpreter
lock meanwhile. A compiled loop (`formats.uncached_copy.moves`) copies them nearly as fast as one piece. Where there is
none, Linux copies a thousand pieces in one call (``process_vm_readv``, of the process itself), which takes several
times as long; where it may not, or does not, each is copied by itself, as large pieces always are then.
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

__all__ = ["Gathering", "shared_out"]

_MOST: Final = 1024
"""Pieces that one call takes (``IOV_MAX``)."""
_LARGE: Final = 64 << 10
"""From here on a copy of its own is quicker: the system call looks at every page."""
_JOB: Final = 4 << 20
_JOBS: Final = 32
"""Of less than so many times `_JOB` each job is smaller, for who is ready waits for the other's last one."""
_ALONE: Final = 1 << 20
"""So much is copied before another thread has woken up."""
_MUCH: Final = 16 << 20
"""So much is out of the next caches again before anybody reads it: its large pieces are stored past them."""
_PAST: Final = 8 << 10
_NEVER: Final = 1 << 62

_libc: Final = ctypes.CDLL(None, use_errno=True)  # its calls let other threads of Python run
_readv: Final = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, *([ctypes.c_void_p, ctypes.c_ulong] * 2), ctypes.c_ulong)


class Gathering:
    """One set of copies, which may be done again and again.

    The memory must be there as long as this is used: who makes it keeps both sides alive, and their addresses.
    """

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """
        Args:
            copies: address to copy to, address to copy from, bytes. Those of no bytes are left out.
        """
        self.nbytes = sum(nbytes for _, _, nbytes in copies)
        size = max(_ALONE, min(_JOB, self.nbytes // _JOBS))
        self._jobs: list[Callable[[], None]] = []
        small: list[tuple[int, int, int]] = []
        large: list[tuple[int, int, int]] = []
        for to, at, nbytes in copies:
            if 0 < nbytes < _LARGE:
                small.append((to, at, nbytes))
            large += [
                (to + start, at + start, min(size, nbytes - start))
                for start in range(0, nbytes if nbytes >= _LARGE else 0, size)
            ]
        self._jobs += [_Moves(part) for part in _parted(large, len(large), size)]
        self._jobs += [_Batch(part) for part in _parted(small, _MOST, size)]
        past = _PAST if self.nbytes >= _MUCH else _NEVER
        self._compiled = [_Compiled(part, past) for part in _parted(large + small, len(copies), size)]

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Copy everything, with the threads of `pool` if it is much."""
        jobs: Sequence[Callable[[], None]] = self._compiled if uncached_copy.ready() else self._jobs
        shared_out(pool, jobs, self.nbytes)


def shared_out(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], None]], nbytes: int = _NEVER) -> None:
    """Do every job, here and with whichever threads of the pool have woken up by then; raises what one raised.

    Args:
        nbytes: that all of them copy: little is copied here alone.
    """
    if nbytes <= _ALONE:
        for job in jobs:
            job()
        return
    numbers = itertools.count()  # each is taken once: a call of C that no thread interrupts

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


def _parted(copies: Sequence[tuple[int, int, int]], most: int, job: int) -> list[list[tuple[int, int, int]]]:
    """In parts of about `job` bytes, and `most` copies."""
    parts: list[list[tuple[int, int, int]]] = []
    size = job
    for copy in copies:
        if size + copy[2] > job or len(parts[-1]) == most:
            parts.append([])
            size = 0
        parts[-1].append(copy)
        size += copy[2]
    return parts


class _Moves:
    """Copies, one after the other."""

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._copies = copies

    def __call__(self) -> None:
        for to, at, nbytes in self._copies:
            ctypes.memmove(to, at, nbytes)


class _Compiled:
    """Copies by the compiled loop."""

    def __init__(self, copies: Sequence[tuple[int, int, int]], past: int) -> None:
        rows = np.array(copies, np.int64).reshape(-1, 3)
        self._to, self._at, self._lengths = (np.ascontiguousarray(rows[:, column]) for column in range(3))
        self._past = past

    def __call__(self) -> None:
        uncached_copy.moves(self._to, self._at, self._lengths, self._past)


class _Batch:
    """Copies in one call of the system."""

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._each = _Moves(copies)
        self._nbytes = sum(nbytes for _, _, nbytes in copies)
        self._to = _vectors([(to, nbytes) for to, _, nbytes in copies])
        self._at = _vectors([(at, nbytes) for _, at, nbytes in copies])
        to, at = (one.__array_interface__["data"][0] for one in (self._to, self._at))
        self._arguments = (to, len(copies), at, len(copies), 0)
        self._alone = _readv is None

    def __call__(self) -> None:
        if not self._alone and _readv(os.getpid(), *self._arguments) == self._nbytes:  # type: ignore[misc]
            return
        self._alone = True  # not allowed here, or memory that it cannot read (a device's): it would not be next time
        self._each()


def _vectors(pieces: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """``struct iovec[]``."""
    return np.array(pieces, np.uint64).reshape(-1, 2)
