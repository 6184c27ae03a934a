"""Passes a state from the trainer to its segments unit by unit, through memory that is reused.

The trainer's side puts units as it copies them, in the order of the segments; the writing side takes each, hashes and
writes it, and frees its memory. Neither needs the whole state at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import ArenaLease, Arenas
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import cancel_and_wait
from ckptstore.segments.units import SegmentBytes, SegmentUnit, UnitPlan

if TYPE_CHECKING:
    from ckptstore.frameworks.torch_offload import CopyQueue

__all__ = ["Copy", "DescribedTensor", "StagedState", "StagedUnits", "copies_of", "copy_now"]

Copy: TypeAlias = tuple[int, Callable[[Bytes], Future[None]]]
"""Bytes of memory that a unit needs, and a function that starts the copy into it."""
Submit: TypeAlias = Callable[[Callable[[], None]], Future[None]]
"""Runs a function on a thread."""


class DescribedTensor:
    """The description of a tensor whose bytes arrive as units (a `TensorSource` that cannot be read)."""

    __slots__ = ("dtype", "global_shape", "identity", "nbytes", "offset", "origin", "shape")

    def __init__(self, source: TensorSource) -> None:
        self.dtype: str = source.dtype
        self.shape: tuple[int, ...] = source.shape
        self.nbytes: int = source.nbytes
        self.origin: Literal["torch", "numpy"] = source.origin
        self.identity: Hashable = id(self)
        self.global_shape, self.offset = place_of(source)

    def view(self) -> NoReturn:
        """Not supported: the bytes belong to training, which has changed them by now."""
        raise AssertionError("a tensor that arrives is read as units")

    def read(self, offset: int, out: Bytes) -> NoReturn:
        """Not supported, as `view`."""
        raise AssertionError(f"a tensor that arrives is read as units: {len(out)} bytes at {offset}")


class StagedUnits:
    """Units in order, with the memory that holds them.

    A unit that was put is freed by the thread that took it, or by `discard`: once each, in any order.

    Attributes:
        spoiled: a unit could not be copied. The copying side gets the same error, and reports it.
    """

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            stop: called before each unit that is taken; raises if no more units are wanted.
        """
        self.spoiled = False
        self._stop = stop
        self._accepted: list[tuple[ArenaLease, Future[None]]] = []
        self._waiting: deque[tuple[ArenaLease, Future[None]]] = deque()
        self._error: BaseException | None = None
        self._discarded = False
        self._changed = threading.Condition()

    def put(self, lease: ArenaLease, copied: Future[None]) -> bool:
        """Put the next unit, in `lease` once `copied` is done -> False: not wanted, the caller keeps it."""
        with self._changed:
            if self._discarded:
                return False
            self._accepted.append((lease, copied))
            self._waiting.append((lease, copied))
            self._changed.notify()
            return True

    def bring(
        self,
        copies: Iterable[Copy],
        memory: Arenas,
        waited: Callable[[float], object],
        *,
        short: Callable[[], None] = lambda: None,
        unwanted: Callable[[], None] = lambda: None,
        queue: CopyQueue | None = None,
    ) -> None:
        """Copy units one after the other, as memory becomes available, and put each.

        When this returns or raises, no thread reads the sources any more; a device may, and its streams keep the order
        (`queue`).

        Args:
            waited: called for each unit with the seconds that it waited for memory.
            queue: the copies that devices make.
            short: as for `Arenas.take`.
            unwanted: called if a unit is no longer wanted; it raises, or the rest is not copied.

        Raises:
            MemoryError, the errors of the copies, and those of `short` and `unwanted`.
        """
        under_way: list[Future[None]] = []
        try:
            for space, copy in copies:
                lease = memory.take(space, short)
                waited(lease.waited)
                try:
                    under_way.append(copy(lease.memory))
                except BaseException:
                    lease.free()
                    raise
                if not self.put(lease, under_way[-1]):
                    cancel_and_wait(under_way)
                    lease.free()
                    unwanted()
                    break
            for copied in under_way:
                if not (copied.cancelled() or (queue is not None and copied in queue.waiting)):
                    copied.result()
        finally:
            if queue is not None:
                queue.gate()
                under_way = [copied for copied in under_way if copied not in queue.waiting]
            cancel_and_wait(under_way)

    def fail(self, error: BaseException) -> None:
        """No more units come. A waiting `take` raises `error`; units that are already there are still returned."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self) -> ArenaLease:
        """The next unit, copied. Waits for it.

        Raises:
            the error of the copy, the one that was passed to `fail`, or that of `stop`.
        """
        with self._changed:
            while not self._waiting:
                self._stop()
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            lease, copied = self._waiting.popleft()
        self._stop()
        try:
            copied.result()
        except BaseException:
            self.spoiled = True
            raise
        return lease

    def discard(self) -> None:
        """Free every unit that was not freed. No thread may take units, or read one that it took, any more."""
        with self._changed:
            self._discarded = True
            taken_over, self._accepted = self._accepted, []
            self._waiting.clear()
        # Prevents: memory that the next save gets while a unit of this one is still being copied into it.
        cancel_and_wait(copied for _, copied in taken_over)
        for lease, _ in taken_over:
            lease.free()


def copies_of(
    plan: UnitPlan,
    tensors: Mapping[str, TensorSource],
    submit: Submit,
    queue: CopyQueue | None = None,
    waiters: Submit | None = None,
) -> Iterator[Copy]:
    """The units of a plan, in order, for `StagedUnits.bring`.

    Args:
        tensors: the sources of the copies.
        submit: runs a copy.
        queue: the copies that devices make to registered memory; None: no tensor is on a device.
        waiters: runs a wait for the device; None: as `submit`.
    """
    for _, layout, units in plan.segments:
        source = SegmentBytes(layout, tensors)
        queued = None if queue is None else SegmentBytes(layout, queue.sources)
        for unit in units:
            if queue is None or queued is None or not any(queue.queues(spec.name) for spec, _, _ in unit.chunks):
                yield unit.space, partial(_copied, submit, source, unit)
            else:
                yield unit.space, partial(_queued, queue, waiters or submit, submit, source, queued, unit)


def _copied(submit: Submit, source: SegmentBytes, unit: SegmentUnit, memory: Bytes) -> Future[None]:
    return submit(partial(source.fill, unit, memory))


def _queued(
    queue: CopyQueue,
    waiters: Submit,
    submit: Submit,
    source: SegmentBytes,
    queued: SegmentBytes,
    unit: SegmentUnit,
    memory: Bytes,
) -> Future[None]:
    if not bridge.registered(memory):
        return submit(partial(source.fill, unit, memory))
    try:
        with queue.queueing():
            queued.fill(unit, memory)
    except BaseException:
        queue.wait()  # Prevents: memory that is returned while a part of the unit is still being copied into it.
        raise
    return queue.copied(waiters)


def copy_now(work: Callable[[], None]) -> Future[None]:
    """A copy that is made at once, for a small state: waking a thread takes longer."""
    done: Future[None] = Future()
    work()
    done.set_result(None)
    return done


@dataclass(frozen=True, slots=True)
class StagedState(FlatState):
    """A state whose bytes arrive unit by unit; its tensors are only described.

    Attributes:
        plan: its segments and their units.
        arrivals: returns the units of all segments, in order.
        digests: state digests of the tensors that a device has computed, by name.
    """

    plan: UnitPlan
    arrivals: StagedUnits
    digests: Mapping[str, int]
