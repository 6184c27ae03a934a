"""A state on its way from the trainer to its segments: unit by unit, through memory that is needed again.

The trainer's side puts units as it copies them, in the order of the segments; the persisting side takes each, hashes
and writes it, and frees its memory. Neither needs the whole state.
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
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import ArenaLease, Arenas
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import cancel_and_wait
from ckptstore.segments.units import Unit, UnitPlan, Units

if TYPE_CHECKING:
    from ckptstore.frameworks.torch_offload import CopyQueue

__all__ = ["Arrivals", "ArrivingState", "Copy", "Described", "copied_now", "copies_of"]

Copy: TypeAlias = tuple[int, Callable[[Bytes], Future[None]]]
"""Bytes of memory that a unit needs, and what begins to copy it there."""
Submit: TypeAlias = Callable[[Callable[[], None]], Future[None]]
"""Has a thread do something."""


class Described:
    """What is known of a tensor whose bytes arrive elsewhere (a `TensorSource` that nobody can read)."""

    __slots__ = ("dtype", "global_shape", "identity", "nbytes", "offset", "origin", "shape")

    def __init__(self, source: TensorSource) -> None:
        self.dtype: str = source.dtype
        self.shape: tuple[int, ...] = source.shape
        self.nbytes: int = source.nbytes
        self.origin: Literal["torch", "numpy"] = source.origin
        self.identity: Hashable = id(self)
        self.global_shape, self.offset = place_of(source)

    def view(self) -> NoReturn:
        """Its bytes were training's, which has changed them by now."""
        raise AssertionError("a tensor that arrives is read as units")

    def read(self, offset: int, out: Bytes) -> NoReturn:
        """As `view`."""
        raise AssertionError(f"a tensor that arrives is read as units: {len(out)} bytes at {offset}")


class Arrivals:
    """Units in order, with the memory that holds them.

    What was put is freed by whoever took it, or by `discard`: that works once for each, in any order.

    Attributes:
        spoiled: a unit could not be copied: whoever copies is told that, too, and says it.
    """

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            stop: called before each unit that is taken; raises why nothing more is wanted.
        """
        self.spoiled = False
        self._stop = stop
        self._taken_over: list[tuple[ArenaLease, Future[None]]] = []
        self._waiting: deque[tuple[ArenaLease, Future[None]]] = deque()
        self._error: BaseException | None = None
        self._discarded = False
        self._changed = threading.Condition()

    def put(self, lease: ArenaLease, copied: Future[None]) -> bool:
        """The next unit is in `lease` once `copied` is done -> whether it is wanted; if not, it is not taken over."""
        with self._changed:
            if self._discarded:
                return False
            self._taken_over.append((lease, copied))
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
        """Copy units one after the other, as there is memory for them, and put each.

        When this returns or raises, nobody reads what they are copied from; a device may, whose streams see to the
        order (`queue`).

        Args:
            waited: told, for each, how many seconds it took to get memory.
            queue: of the copies that devices make.
            short: as for `Arenas.take`.
            unwanted: called where a unit is not wanted any more; raises, or the rest is not copied.

        Raises:
            MemoryError, whatever copying raised, and what `short` and `unwanted` raise.
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
        """No more units come. Whoever waits for one gets `error`; one that is there already is still given."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self) -> ArenaLease:
        """The next unit, copied. Waits for it.

        Raises:
            whatever copying it raised, `fail` was given, or `stop` raises.
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

    def wake(self) -> None:
        """Let who waits ask `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def discard(self) -> None:
        """Free all that was not freed. Nobody takes any more, and nobody may read what he took."""
        with self._changed:
            self._discarded = True
            taken_over, self._taken_over = self._taken_over, []
            self._waiting.clear()
        # Prevents: memory that the next save has been given while a unit of this one is still copied to it.
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
    """The units of a plan, in order, for `Arrivals.bring`.

    Args:
        tensors: what they are copied from.
        submit: has a copy made.
        queue: of the copies that devices make to registered memory; None: none is on a device.
        waiters: has a thread wait for the device; None: as `submit`.
    """
    for _, layout, units in plan.segments:
        source = Units(layout, tensors)
        queued = None if queue is None else Units(layout, queue.sources)
        for unit in units:
            if queue is None or queued is None or not any(queue.queues(spec.name) for spec, _, _ in unit.chunks):
                yield unit.space, partial(_copied, submit, source, unit)
            else:
                yield unit.space, partial(_queued, queue, waiters or submit, submit, source, queued, unit)


def _copied(submit: Submit, source: Units, unit: Unit, memory: Bytes) -> Future[None]:
    return submit(partial(source.fill, unit, memory))


def _queued(
    queue: CopyQueue, waiters: Submit, submit: Submit, source: Units, queued: Units, unit: Unit, memory: Bytes
) -> Future[None]:
    if not bridge.registered(memory):
        return submit(partial(source.fill, unit, memory))
    try:
        with queue.queueing():
            queued.fill(unit, memory)
    except BaseException:
        queue.wait()  # Prevents: memory that is given back while a part of the unit is still copied to it.
        raise
    return queue.copied(waiters)


def copied_now(work: Callable[[], None]) -> Future[None]:
    """A copy that is made here: of a small state, for which it takes longer to wake a thread."""
    done: Future[None] = Future()
    work()
    done.set_result(None)
    return done


@dataclass(frozen=True, slots=True)
class ArrivingState(FlatState):
    """A state whose bytes come unit by unit; its tensors are only described.

    Attributes:
        plan: its segments and their units.
        arrivals: gives the units of all of them, in order.
        digests: state digests of those tensors that a device has computed, by name.
    """

    plan: UnitPlan
    arrivals: Arrivals
    digests: Mapping[str, int]
