"""A copy of state in memory, so that training may go on while the copy is made durable.

It is laid out as its segments will be: what is written as it is needs no second copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, Literal

from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, aligned
from ckptstore.host.threads import run_all
from ckptstore.segments.regions import LaidOutState, plan_regions

__all__ = ["HostTensor", "Snapshot", "SnapshotPool"]

_PIECE: Final = 8 << 20
_PASSED: Final = 4
_OVERHEAD: Final = 16 << 10
"""What looking at a tensor costs, as bytes that could be copied meanwhile."""


class HostTensor:
    """A tensor's bytes in host memory that nobody else changes (a `TensorSource`)."""

    __slots__ = ("_data", "dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TensorSource, data: Bytes) -> None:
        self.dtype: str = source.dtype
        self.shape: tuple[int, ...] = source.shape
        self.nbytes: int = source.nbytes
        self.origin: Literal["torch", "numpy"] = source.origin
        self.identity: Hashable = id(self)
        self._data = data

    def view(self) -> Bytes:
        """The bytes themselves."""
        return self._data

    def read(self, offset: int, out: Bytes) -> None:
        """Copy bytes from `offset` on into `out`."""
        out[:] = self._data[offset : offset + len(out)]


class Snapshot:
    """A copied state. `land` it when it is durable or lost, `free` its memory when nobody needs it; each works once."""

    def __init__(self, flat: LaidOutState, landed: Callable[[], None], free: Callable[[], None]) -> None:
        self.flat = flat
        self._landed: Callable[[], None] | None = landed
        self._free: Callable[[], None] | None = free

    def land(self) -> None:
        """It is no longer in flight: another snapshot may be taken."""
        landed, self._landed = self._landed, None
        if landed is not None:
            landed()

    def free(self) -> None:
        """Give the memory back."""
        free, self._free = self._free, None
        if free is not None:
            free()


class SnapshotPool:
    """Memory for at most `limit` snapshots at once, kept and reused: touching fresh memory costs more than the copy.

    `take` waits while `limit` snapshots are in flight, which bounds host memory to `limit` times the state.
    """

    def __init__(self, limit: int, *, digests: bool = False) -> None:
        """
        Args:
            limit: snapshots in flight.
            digests: have devices compute the state digests of what `take` copies from them. That pays where it will be
                written as it is: coding computes them anew.
        """
        self._digests = digests
        self._slots = threading.BoundedSemaphore(limit)
        self._free: list[tuple[Bytes, int]] = []  # memory, and how often it was not what was wanted
        self._lock = threading.Lock()

    def take(self, flat: FlatState, pool: ThreadPoolExecutor) -> Snapshot:
        """Copy every tensor of `flat`, once fewer than `limit` snapshots are in flight."""
        self._slots.acquire()
        try:
            digests = bridge.device_digests(flat.tensors) if self._digests else {}
            snapshot = self.copy(flat, pool, self._slots.release)
            snapshot.flat = replace(snapshot.flat, digests=digests)
            return snapshot
        except BaseException:
            self._slots.release()
            raise

    def copy(self, flat: FlatState, pool: ThreadPoolExecutor, landed: Callable[[], None] = lambda: None) -> Snapshot:
        """Copy every tensor of `flat` at once, whatever is in flight. `landed` is called by `Snapshot.land`."""
        plan = plan_regions(tuple((name, source.dtype, tuple(source.shape)) for name, source in flat.tensors.items()))
        memory = self._memory(plan.size)
        copies: list[tuple[TensorSource, Bytes]] = []
        tensors: dict[str, TensorSource] = {}
        for name, source in flat.tensors.items():
            start = plan.offsets[name]
            place = memory[start : start + source.nbytes]
            copies.append((source, place))
            tensors[name] = HostTensor(source, place)
        run_all(pool, _jobs(copies))
        laid_out = LaidOutState(flat.tree, tensors, plan.regions(memory))
        return Snapshot(laid_out, landed, lambda: self._give(memory))

    def _give(self, memory: Bytes) -> None:
        with self._lock:
            self._free.append((memory, 0))

    def _memory(self, nbytes: int) -> Bytes:
        with self._lock:
            fitting = [
                number
                for number, (memory, _) in enumerate(self._free)
                if nbytes <= len(memory) <= 2 * nbytes + (1 << 20)
            ]
            found = self._free.pop(fitting[-1])[0] if fitting else None
            # States and gradients take turns. What nobody has wanted for long is of a state that has changed its size.
            self._free = [(memory, passed + 1) for memory, passed in self._free if passed < _PASSED]
        return aligned(nbytes) if found is None else found


def _jobs(copies: Sequence[tuple[TensorSource, Bytes]]) -> list[Callable[[], None]]:
    """Jobs of about `_PIECE` bytes: handing one to a thread costs as much as some hundred kilobytes."""
    jobs: list[Callable[[], None]] = []
    small: list[Callable[[], None]] = []
    size = 0
    for source, out in copies:
        parts = _copies(source, out)
        if source.nbytes >= _PIECE:
            jobs += parts
            continue
        small += parts
        size += source.nbytes + _OVERHEAD
        if size >= _PIECE:
            jobs.append(_in_turn(small))
            small, size = [], 0
    return [*jobs, _in_turn(small)] if small else jobs


def _in_turn(jobs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def work() -> None:
        for job in jobs:
            job()

    return work


def _copies(source: TensorSource, out: Bytes) -> list[Callable[[], None]]:
    view = source.view()

    def copy(start: int) -> Callable[[], None]:
        def work() -> None:
            part = out[start : start + _PIECE]
            if view is None:
                source.read(start, part)
            else:
                part[:] = view[start : start + len(part)]

        return work

    return [copy(start) for start in range(0, source.nbytes, _PIECE)]
