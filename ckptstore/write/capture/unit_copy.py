"""The copy of a state unit by unit, under a byte budget, while another thread stores it.

`StagedCopy` copies a state that is written as it is, `bounded_capture` one that is compressed. Writers of one process
and ranks use both.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import Arenas
from ckptstore.host.threads import SleepingPool, default_threads, started_pool
from ckptstore.segments.staged_units import Copy, DescribedTensor, StagedState, StagedUnits, copies_of, copy_now
from ckptstore.segments.units import UnitPlan, plan_units

__all__ = ["CopyMemory", "StagedCopy", "StagedMemory", "UnitCopy"]


class UnitCopy(ABC):
    """A state that is copied unit by unit. The thread that saves it calls `run`; the thread that stores it, the rest.

    Attributes:
        flat: the state, for the thread that stores it.
    """

    flat: FlatState

    def __init__(self, memory: CopyMemory) -> None:
        """
        Args:
            memory: the memory that it is copied to.
        """
        self._memory = memory
        self._told = False
        self._gone: BaseException | None = None
        self._arrivals = StagedUnits(self._check_storing)

    # -- the thread that saves

    def run(self, begin: Callable[[], None]) -> float:
        """Copy every unit -> the seconds waited. When this returns or raises, no thread reads the state any more.

        Args:
            begin: gives the state to the thread that stores it. Called at most once, and always if this returns.

        Raises:
            the error of a copy, of `begin`, or the one that was passed to `stop`.
        """
        try:
            waited = self._copy(begin)
        except BaseException as error:
            self.stop(error)
            raise
        self._expect_next()
        return waited

    @abstractmethod
    def _copy(self, begin: Callable[[], None]) -> float:
        """See `run`."""

    def _expect_next(self) -> None:
        """Touch memory for the next state in the background, while this one is stored."""
        self._memory.expect(self.flat.nbytes)

    def _bring(self, copies: Iterable[Copy], short: Callable[[], None] = lambda: None, queue: Any = None) -> float:
        """Copy units one after the other -> the seconds waited for memory; arguments as for `StagedUnits.bring`."""
        waited: list[float] = []
        # If a unit is no longer wanted, the save has failed: another call reports it, or `stop` was called.
        self._arrivals.bring(copies, self._memory.arenas, waited.append, short=short, unwanted=self._check, queue=queue)
        return sum(waited)

    # -- any thread

    def stop(self, error: BaseException) -> None:
        """Stop, because the save is given up: `run`, and the thread that stores the state, raise `error`."""
        self._told = True
        self._gone = self._gone or error
        self._arrivals.fail(error)
        self._memory.arenas.wake()

    # -- the thread that stores

    @property
    def told(self) -> bool:
        """Whether `run` raises the error of the copy, so that no other call needs to raise it."""
        return self._told or self._arrivals.spoiled

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _check_storing(self) -> None:
        """Raise the reason if nothing more of it is to be stored. Called before each unit."""
        self._check()

    def finish(self) -> None:
        """Free its memory: it is stored, or will not be. May be called repeatedly."""
        self._arrivals.discard()


class CopyMemory(ABC):
    """The memory into which states are copied unit by unit, and the threads that copy.

    Attributes:
        arenas: the memory.
        copiers: the threads.
    """

    def __init__(self, budget: int | None, times: int, background: Callable[[Callable[[], None]], object]) -> None:
        """
        Args:
            budget: bytes of host memory; None: `times` times the state.
            times: how many states may be in memory at once, if the budget allows it.
            background: submits work that touches memory in the background.
        """
        self.arenas = Arenas(budget)
        self.copiers = SleepingPool(default_threads(), "ckptstore-copy")
        self._times = times
        self._background = background

    @abstractmethod
    def copy_of(self, flat: FlatState, digests: Mapping[str, int] | None = None) -> UnitCopy:
        """The copy of a state, which is not begun.

        Args:
            digests: state digests of its tensors that are known already, by name.
        """

    @abstractmethod
    def _space(self, nbytes: int) -> int:
        """Bytes of memory that hold all units of a state of about `nbytes` bytes."""

    def expect(self, nbytes: int) -> None:
        """Touch memory for a state of about `nbytes` bytes in the background, if none was expected before."""
        if not self.arenas.held:
            self.arenas.expect(self._space(nbytes), self._times)
        self.touch()

    def prepare(self, flat: FlatState) -> None:
        """Touch memory for a state like `flat` in the background. A second call does nothing."""
        self.expect(flat.nbytes)

    def touch(self) -> None:
        """Touch memory for the next state in the background, if none is idle and the budget allows it."""
        for run in self.arenas.touch():
            self.later(run)

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` in the background."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile, which must not fail a save
            self._background(work)

    def wake(self) -> None:
        """Start the threads that copy. Raises `RuntimeError` if no more can be started."""
        self.copiers.wake()

    def close(self) -> None:
        """Stop the threads that copy, and free the memory. May be called repeatedly."""
        self.copiers.shutdown()
        self.arenas.close()


class StagedMemory(CopyMemory):
    """The memory for states that are written as they are."""

    def __init__(
        self,
        budget: int | None,
        times: int,
        background: Callable[[Callable[[], None]], object],
        segment_bytes: int,
    ) -> None:
        """
        Args:
            budget, times, background: see `CopyMemory`.
            segment_bytes: `Backend.segment_bytes` of the medium.
        """
        super().__init__(budget, times, background)
        self._segment_bytes = segment_bytes
        self._waiters: ThreadPoolExecutor | None = None  # made for the first state on a device
        self._lock = threading.Lock()

    def copy_of(
        self,
        flat: FlatState,
        digests: Mapping[str, int] | None = None,
        ended: Callable[[], BaseException | None] = lambda: None,
    ) -> StagedCopy:
        """See `CopyMemory.copy_of`.

        Args:
            ended: returns the error that ended the term, so that nothing more of the state needs to be written.
        """
        plan = self._plan(flat)
        self.arenas.expect(plan.space, self._times)
        return StagedCopy(flat, plan, self, digests, ended)

    def _space(self, nbytes: int) -> int:
        # A state divides into units of half a chunk or more, each of which shares a page with the next.
        return nbytes + nbytes // 512 + (1 << 16)

    def _plan(self, flat: FlatState) -> UnitPlan:
        tensors = [
            (name, source.dtype, tuple(source.shape), *place_of(source)) for name, source in flat.tensors.items()
        ]
        return plan_units(tuple(tensors), self._segment_bytes)

    def prepare(self, flat: FlatState) -> None:
        """See `CopyMemory.prepare`."""
        self.arenas.expect(self._plan(flat).space, self._times)
        self.touch()
        if (device := bridge.device_of(flat.tensors)) is not None:
            self.register(device)

    def register(self, device: Any) -> None:
        """Register this memory with the device, so that it copies into it directly from the next save on."""
        for memory in self.arenas.mappings():
            self.later(partial(bridge.register, memory, device))

    def waiter(self, work: Callable[[], None]) -> Future[None]:
        """Run a wait for a device in a thread for such waits, which takes the copies in the device's order.

        The threads that copy must not wait: tensors in host memory, and their caller, would wait for the device, too.
        """
        with self._lock:
            if self._waiters is None:
                self._waiters = started_pool(1, "ckptstore-device")
        return self._waiters.submit(work)

    def close(self) -> None:
        """See `CopyMemory.close`."""
        if self._waiters is not None:
            self._waiters.shutdown()
        super().close()


class StagedCopy(UnitCopy):
    """A state that is written as it is, possibly while it is copied.

    Writing does not begin while everything can still be copied without waiting: two cores that hash would double the
    time of the copy, for which training waits. When memory is short, writing begins at once.
    """

    flat: StagedState
    _memory: StagedMemory

    def __init__(
        self,
        flat: FlatState,
        plan: UnitPlan,
        memory: StagedMemory,
        digests: Mapping[str, int] | None,
        ended: Callable[[], BaseException | None],
    ) -> None:
        """
        Args:
            flat: the state in training's own memory.
            plan: its units.
            memory, digests, ended: see `StagedMemory.copy_of`.
        """
        super().__init__(memory)
        queue = bridge.copy_queue(flat.tensors)
        given = digests or {}
        if queue is not None:
            computed = queue.digests(known=given)
        else:
            computed = bridge.device_digests({name: one for name, one in flat.tensors.items() if name not in given})
        known = ChainMap(given, computed) if given else computed  # type: ignore[arg-type]  # only read
        described: dict[str, TensorSource] = {name: DescribedTensor(one) for name, one in flat.tensors.items()}
        self.flat = StagedState(flat.tree, described, plan, self._arrivals, known)
        self._device = bridge.device_of(flat.tensors)
        self._sources: Any = (flat.tensors, queue)
        self._ended = ended

    def _copy(self, begin: Callable[[], None]) -> float:
        (tensors, queue), self._sources = self._sources, None  # keeps none of the caller's tensors alive
        begun = False

        def write() -> None:
            nonlocal begun
            self._check()
            if not begun:
                begun = True
                begin()

        memory, plan = self._memory, self.flat.plan
        alone = len(plan.segments) == 1 and len(plan.segments[0][2]) <= 1
        copies = copies_of(plan, tensors, copy_now if alone else memory.copiers.submit, queue, memory.waiter)
        waited = self._bring(copies, short=write, queue=queue)
        write()
        return waited

    def _expect_next(self) -> None:
        self._memory.touch()
        if self._device is not None:
            self._memory.register(self._device)

    def _check_storing(self) -> None:
        super()._check_storing()
        if (error := self._ended()) is not None:
            raise error
