"""A copy of a state in memory, so that training continues while the copy is made durable.

It has the layout of its segments: bytes that are written uncompressed need no second copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from ckptstore.backends.base import SEGMENT_BYTES
from ckptstore.formats import uncached_copy
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, aligned
from ckptstore.host.prefault import Prefault
from ckptstore.host.threads import run_all
from ckptstore.segments.aligned_regions import LaidOutState, RegionPlan, plan_regions

__all__ = ["HostTensor", "Snapshot", "SnapshotPool", "copy_jobs", "copy_queued"]

_PIECE: Final = 8 << 20
_PASSED: Final = 4
_OVERHEAD: Final = 16 << 10
"""The overhead of one tensor, in bytes that could be copied in the same time."""
_NEW: Final = 16
"""If more than one byte in `_NEW` belongs to tensors whose size has changed, the state gets a new layout."""


class HostTensor:
    """A tensor's bytes in host memory that nothing else changes (a `TensorSource`)."""

    __slots__ = ("_data", "dtype", "global_shape", "identity", "nbytes", "offset", "origin", "shape")

    def __init__(self, source: TensorSource, data: Bytes) -> None:
        self.dtype: str = source.dtype
        self.shape: tuple[int, ...] = source.shape
        self.nbytes: int = source.nbytes
        self.origin: Literal["torch", "numpy"] = source.origin
        self.identity: Hashable = id(self)
        self.global_shape, self.offset = place_of(source)
        self._data = data

    def view(self) -> Bytes:
        """The bytes themselves."""
        return self._data

    def read(self, offset: int, out: Bytes) -> None:
        """Copy bytes from `offset` on into `out`."""
        out[:] = self._data[offset : offset + len(out)]


class Snapshot:
    """A copied state. `land` it when it is durable or lost; `free` its memory when it is not needed. Each acts once."""

    def __init__(self, flat: LaidOutState, landed: Callable[[], None], free: Callable[[], None]) -> None:
        self.flat = flat
        self._arrive: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._landed: Callable[[], None] | None = landed
        self._free: Callable[[], None] | None = free
        self._readers = 0
        self._freed: Callable[[], None] | None = None  # called when the last reader is done
        self._lock = threading.Lock()

    def land(self) -> None:
        """End its time in flight: another snapshot may be taken."""
        landed, self._landed = self._landed, None
        if landed is not None:
            landed()

    def arrives(self, wait: Callable[[], None], stop: Callable[[], None] | None = None) -> None:
        """Note that a device, or threads, still copy to it.

        Args:
            wait: waits until all is copied; raises the error of a copy.
            stop: ends the copies early, and returns when none runs any more; None: they cannot be ended.
        """
        self._arrive, self._stop = wait, stop

    def arrive(self) -> None:
        """Wait until all is copied. Raises the error of a copy."""
        arrive = self._arrive  # another thread may wait, too
        if arrive is not None:
            arrive()
            self._arrive = self._stop = None

    def completed_with(self, done: Future[None]) -> Callable[[], None]:
        """Note that the copy is complete when `done` is -> a function that waits for what was begun before."""
        before = self._arrive
        self.arrives(done.result)
        return before or (lambda: None)

    def held(self) -> Callable[[], None]:
        """Keep the memory as it is, also after `free` -> a function that ends this."""
        with self._lock:
            self._readers += 1
        return self._release

    def _release(self) -> None:
        with self._lock:
            self._readers -= 1
            freed = None
            if not self._readers:
                freed, self._freed = self._freed, None
        if freed is not None:
            freed()

    def free(self) -> None:
        """Return the memory to the pool, once nothing holds it any more."""
        free, self._free = self._free, None
        if free is not None:
            # Prevents: giving the memory to the next save while a device, or a thread, still copies to it.
            if self._stop is not None:
                self._stop()
            else:
                with contextlib.suppress(Exception):  # a failed device copies no more; the save has raised its error
                    self.arrive()
            with self._lock:
                if self._readers:
                    self._freed = free
                    return
            free()

    def room(self, flat: FlatState) -> dict[str, Bytes] | None:
        """The memory in which each tensor of `flat` may replace a tensor of this state; None: too much of it is new.

        A tensor that has another size here gets fresh memory.
        """
        new = {name: source.nbytes for name, source in flat.tensors.items() if not self._has(name, source)}
        if sum(new.values()) * _NEW > sum(source.nbytes for source in flat.tensors.values()):
            return None
        return {name: aligned(new[name]) if name in new else _view(self.flat.tensors[name]) for name in flat.tensors}

    def _has(self, name: str, source: TensorSource) -> bool:
        mine = self.flat.tensors.get(name)
        return mine is not None and (mine.dtype, mine.nbytes) == (source.dtype, source.nbytes)

    def turned(self, flat: FlatState, room: Mapping[str, Bytes]) -> Snapshot:
        """The snapshot of `flat` in this memory: every tensor is in `room`. This snapshot is invalid after that."""
        tensors: dict[str, TensorSource] = {name: HostTensor(one, room[name]) for name, one in flat.tensors.items()}
        # Without regions it is written through staging blocks, like any state.
        regions = self.flat.regions if _specs(self.flat) == _specs(flat) else ()
        turned = LaidOutState(flat.tree, tensors, regions)
        free, self._free = self._free, None
        return Snapshot(turned, lambda: None, free or (lambda: None))


def _view(tensor: TensorSource) -> Bytes:
    """The memory of a tensor of a snapshot."""
    view = tensor.view()
    assert view is not None  # snapshots are host memory
    return view


class SnapshotPool:
    """Memory for snapshots that is kept and reused: touching fresh memory costs more than the copy.

    A save that requests a copy has a place in flight. So host memory is limited to the size of the state times the sum
    of places and kept copies.
    """

    def __init__(
        self,
        limit: int,
        background: Callable[[Callable[[], None]], object],
        segment_bytes: int = SEGMENT_BYTES,
        *,
        kept: int = 0,
    ) -> None:
        """
        Args:
            limit: the most copies in flight.
            background: submits work that touches memory in the background.
            segment_bytes: `Backend.segment_bytes` of the medium: copies have the layout of their segments.
            kept: how many more copies stay in memory, as bases of later saves, once there are any.
        """
        self._limit = limit
        self._kept = kept
        self._segment_bytes = segment_bytes
        self._background = background
        self._free: list[_Free] = []
        self._out = 0
        self._device: Any = None  # the device of the states: touched memory is then registered with it
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Touch memory for a state of about `nbytes` bytes in the background, if there is none yet."""
        self._prepare(nbytes + nbytes // 512 + (1 << 16), 1)

    def prepare(self, flat: FlatState) -> None:
        """Touch memory for a state like `flat`, and for the copies that stay, once, in the background.

        The copy of the first save stays, so the second save needs other memory: touch it now.
        """
        self._device = self._device or bridge.device_of(flat.tensors)
        self._prepare(self._plan(flat).size, 1 + self._kept)

    def kept(self, flat: FlatState) -> None:
        """Note that a copy of `flat` stays in memory: the next one needs other memory, which is touched now."""
        self._prepare(self._plan(flat).size, self._out + 1)

    def placed(
        self, flat: FlatState, pool: ThreadPoolExecutor, *, queued: bool = False, without: Container[str] = ()
    ) -> Snapshot:
        """Copy every tensor of `flat`, whose save has a place in flight; see `copy`."""
        snapshot = self.copy(flat, pool, queued=queued, without=without)
        size = self._plan(flat).size
        self._prepare(size, self._limit + self._kept)
        return snapshot

    def empty(self, flat: FlatState) -> Snapshot:
        """Memory for a state like `flat`, at once, however many saves are in flight. Nothing is copied."""
        return self._laid_out(flat)[1]

    def copy(
        self, flat: FlatState, pool: ThreadPoolExecutor, *, queued: bool = False, without: Container[str] = ()
    ) -> Snapshot:
        """Copy every tensor of `flat`, at once, however many saves are in flight.

        Args:
            queued: return when the copies of devices are queued. Call `Snapshot.arrive` before you read it.
            without: names of tensors that are not copied. There is memory for them.
        """
        memory, snapshot, copies = self._laid_out(flat)
        copies = {name: one for name, one in copies.items() if name not in without}

        def register(device: Any) -> None:
            self._device = device
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._background(partial(bridge.register, memory, device))

        try:
            arrive = copy_queued(copies, memory, lambda jobs: run_all(pool, jobs), register)
            if arrive is not None:
                snapshot.arrives(arrive)
                if not queued:
                    snapshot.arrive()
        except BaseException:
            snapshot.free()
            raise
        return snapshot

    def _plan(self, flat: FlatState) -> RegionPlan:
        return plan_regions(_specs(flat), self._segment_bytes)

    def _laid_out(self, flat: FlatState) -> tuple[Bytes, Snapshot, dict[str, tuple[TensorSource, Bytes]]]:
        """Memory, an unfilled snapshot in it, and the source and target of each copy, in the order of `flat`."""
        plan = self._plan(flat)
        memory = self._memory(plan.size)
        copies: dict[str, tuple[TensorSource, Bytes]] = {}
        tensors: dict[str, TensorSource] = {}
        for name, source in flat.tensors.items():
            start = plan.offsets[name]
            place = memory[start : start + source.nbytes]
            copies[name] = source, place
            tensors[name] = HostTensor(source, place)
        laid_out = LaidOutState(flat.tree, tensors, plan.regions(memory), limit=plan.limit)
        return memory, Snapshot(laid_out, lambda: None, lambda: self._give(memory)), copies

    def close(self) -> None:
        """Stop touching memory, and free all memory that is not in use."""
        with self._lock:
            for one in self._free:
                one.touching.stop()
            self._free.clear()

    def _prepare(self, nbytes: int, count: int) -> None:
        fresh = []
        with self._lock, contextlib.suppress(MemoryError):  # the save that needs it will raise
            for _ in range(self._out + sum(one.fits(nbytes) for one in self._free), count):
                memory = aligned(nbytes)
                fresh.append((memory, Prefault(memory)))
                self._free.insert(0, _Free(memory, 0, fresh[-1][1]))
        with contextlib.suppress(RuntimeError):  # closed meanwhile, which must not fail a save
            for memory, touching in fresh:
                self._background(touching.run)
                if self._device is not None:
                    self._background(partial(bridge.register, memory, self._device))

    def _give(self, memory: Bytes) -> None:
        with self._lock:
            self._out -= 1
            self._free.append(_Free(memory, 0, Prefault(memory[:0])))

    def _memory(self, nbytes: int) -> Bytes:
        with self._lock:
            fitting = [number for number, one in enumerate(self._free) if one.fits(nbytes)]
            found = self._free.pop(fitting[-1]) if fitting else _Free(aligned(nbytes), 0, Prefault(aligned(0)))
            self._out += 1
            # States and gradients alternate. Buffers unused for a while belong to an old state size: free them.
            self._free = [replace(one, passed=one.passed + 1) for one in self._free if one.passed < _PASSED]
        found.touching.use()
        return found.memory


@dataclass(frozen=True, slots=True, eq=False)
class _Free:
    """Memory that is not in use.

    Attributes:
        passed: how many requests took other memory since it was last used.
        touching: the progress of touching it.
    """

    memory: Bytes
    passed: int
    touching: Prefault

    def fits(self, nbytes: int) -> bool:
        return nbytes <= len(self.memory) <= 2 * nbytes + (1 << 20)


_Spec: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]


def _specs(flat: FlatState) -> tuple[_Spec, ...]:
    return tuple((name, source.dtype, tuple(source.shape), *place_of(source)) for name, source in flat.tensors.items())


def copy_queued(
    copies: Mapping[str, tuple[TensorSource, Bytes]],
    memory: Bytes,
    run: Callable[[list[Callable[[], None]]], None],
    register: Callable[[Any], object],
) -> Callable[[], None] | None:
    """Copy tensors into memory. Devices copy to registered memory without the host: these copies are only queued.

    Args:
        copies: each source, and where in `memory` it is copied to.
        memory: contains all targets.
        run: runs the jobs that copy on the host.
        register: registers `memory` with a device, for the next copy. Called if it is not registered; then this waits
            for the copies of devices.

    Returns:
        A function that waits until devices have copied; None: everything is copied. Until it has returned, do not read
        the memory, and do not use it for anything else.

    Raises:
        the error of a copy. Then nothing writes to `memory` any more.
    """
    sources = {name: source for name, (source, _) in copies.items()} if bridge.uses_devices() else {}
    queue = bridge.copy_queue(sources)
    if queue is not None and not bridge.registered(memory):
        register(bridge.device_of(sources))
        queue = None
    if queue is None:
        run(copy_jobs(list(copies.values())))
        return None
    try:
        try:
            with queue.queueing():
                for name, (_, out) in copies.items():
                    if queue.queues(name):
                        queue.sources[name].read(0, out)
        finally:
            arrive = queue.marked()
            queue.gate()
        run(copy_jobs([one for name, one in copies.items() if not queue.queues(name)]))
    except BaseException:
        # Prevents: giving the memory to the next save while a device still copies to it.
        with contextlib.suppress(Exception):  # a failed device copies no more
            queue.wait()
        raise
    return arrive


def copy_jobs(copies: Sequence[tuple[TensorSource, Bytes]]) -> list[Callable[[], None]]:
    """Jobs that copy about `_PIECE` bytes each: submitting a job to a thread costs as much as copying some 100 KB."""
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
                uncached_copy.copy(view[start : start + len(part)], part)

        return work

    return [copy(start) for start in range(0, source.nbytes, _PIECE)]
