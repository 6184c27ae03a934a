"""Copies a state under a byte budget: the training thread copies it unit by unit, as the committer compresses it.

Compression needs the new bytes and those of the base at the same time. With whole copies that is twice the state. Here,
when a save has its turn, the committer's thread lists the *units* in which it will read the state. The training thread
copies one unit after the other into memory with a budget, and waits while the budget is used up. A compressed unit is
copied into the base, if the new state is to be a base, and its memory is free for another unit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.arenas import ArenaLease, Arenas
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK
from ckptstore.host.threads import SleepingPool
from ckptstore.segments.staged_units import StagedUnits, copy_now

__all__ = ["Feed", "Feeding", "Piece", "Unit", "Window"]

_LINE: Final = 64
"""Pieces begin at multiples of this: it is the size of a cache line and a multiple of every dtype's size."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor.

    Attributes:
        place: the memory to which they are copied once they are compressed; None: no such copy.
    """

    source: TensorSource
    start: int
    length: int
    place: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The pieces that are compressed together.

    Attributes:
        name: one of its tensors, for error messages.
    """

    name: str
    pieces: tuple[Piece, ...]

    @property
    def space(self) -> int:
        """The bytes of memory that it needs, rounded up to whole pages."""
        return -(-sum(-(-piece.length // _LINE) * _LINE for piece in self.pieces) // BLOCK) * BLOCK


class Window:
    """A copied unit in memory, for the thread that compresses it."""

    def __init__(self, unit: Unit, lease: ArenaLease) -> None:
        self._lease = lease
        self._placed: list[tuple[Bytes, Bytes]] = []
        self._parts: dict[tuple[int, int], Bytes] = {}
        for piece, part in _laid_out(unit, lease.memory):
            if piece.place is not None:
                self._placed.append((piece.place, part))
            key = (id(piece.source), piece.start)
            if key not in self._parts or len(part) > len(self._parts[key]):
                self._parts[key] = part

    def read(self, source: TensorSource, start: int, length: int) -> Bytes:
        """Bytes of a tensor, from the beginning of one of the unit's pieces. A view: nothing is copied."""
        part = self._parts[id(source), start]
        assert length <= len(part), (start, length)
        return part[:length]

    def done(self) -> None:
        """End a unit that is compressed: copy its bytes into the base, and free its memory."""
        for place, part in self._placed:
            place[:] = part
        self._parts.clear()
        self._placed.clear()
        self._lease.free()


def _laid_out(unit: Unit, memory: Bytes) -> Iterator[tuple[Piece, Bytes]]:
    at = 0
    for piece in unit.pieces:
        yield piece, memory[at : at + piece.length]
        at += -(-piece.length // _LINE) * _LINE


def _copy(unit: Unit, memory: Bytes) -> None:
    for piece, part in _laid_out(unit, memory):
        view = piece.source.view()
        if view is None:
            piece.source.read(piece.start, part)
        else:
            part[:] = view[piece.start : piece.start + piece.length]


def _copied(submit: Callable[[Callable[[], None]], Future[None]], unit: Unit, memory: Bytes) -> Future[None]:
    return submit(partial(_copy, unit, memory))


class Feed:
    """One state that is copied unit by unit. The training thread calls `run`; the committer's thread calls the rest.

    Attributes:
        flat: the state, in training's own memory: read it only within `reading`.
        told: `run` raises the error, so no other call needs to raise it.
    """

    def __init__(self, flat: FlatState, memory: Arenas, budget: int, copiers: ThreadPoolExecutor) -> None:
        self.flat = flat
        self.told = False
        self._memory = memory
        self._budget = budget
        self._copiers = copiers
        self._wanted: Future[Sequence[Unit]] = Future()
        self._arrivals = StagedUnits(self._check)
        self._gone: BaseException | None = None
        self._turn: float | None = None  # when its turn began
        self._reads = threading.Lock()

    # -- the training thread

    def run(self) -> float:
        """Copy the requested units in order -> the seconds waited, for the turn and for memory.

        When this returns, nothing reads the state any more.

        Raises:
            UsageError: the budget is too small for a unit.
            and the error of a copy.
        """
        began = time.monotonic()
        waited: list[float] = []
        try:
            wanted = self._wanted.result()
            waited.append((self._turn or time.monotonic()) - began)
            submit = copy_now if len(wanted) == 1 else self._copiers.submit
            copies = ((unit.space, partial(_copied, submit, unit)) for unit in wanted)
            # If a unit is not wanted any more, the save has failed, and another call reports the error.
            self._arrivals.bring(copies, self._memory, waited.append)
        except BaseException as error:
            self._give_up(error)
            raise
        return sum(waited)

    def _give_up(self, error: BaseException) -> None:
        self.told = True
        self._gone = error
        self._arrivals.fail(error)
        with self._reads:  # Prevents: reading training's tensors after the call that passed them has raised.
            pass

    # -- the committer's thread

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the state within this ``with``, in any thread; `run` raises an error in there, too.

        Raises:
            the error that ended `run`: the state cannot be read any more.
        """
        with self._reads:
            self._check()
            self._turn = time.monotonic()
            try:
                yield
            except BaseException as error:
                self.told = True
                self._wanted.set_exception(error)
                raise

    def whole(self, copy: Callable[[], _T]) -> _T:
        """Copy the whole state at once -> the result of `copy`. Training continues when this returns."""
        with self.reading():
            copied = copy()
        self._wanted.set_result(())
        return copied

    def windows(self, units: Sequence[Unit]) -> Iterator[Window]:
        """Request the units of the state -> each of them, once it is copied.

        Raises:
            UsageError: the budget is too small for a unit; `run` raises it, too.
        """
        largest = max(units, key=lambda unit: unit.space, default=None)
        if largest is not None and largest.space > self._budget:
            error = UsageError(
                f"memory: {self._budget} bytes; {largest.name!r} and what is coded with it need {largest.space} at once"
            )
            self.told = True
            self._wanted.set_exception(error)
            raise error
        self._memory.expect(min(sum(unit.space for unit in units), self._budget), 1)
        self._wanted.set_result(units)
        return (Window(unit, self._arrivals.take()) for unit in units)

    @property
    def spoiled(self) -> bool:
        """Whether a unit could not be copied. `run` raises the error."""
        return self._arrivals.spoiled

    def finish(self) -> None:
        """End the feed, after success or failure: free its memory, and let training continue."""
        if not self._wanted.done():
            self._wanted.set_result(())
        self._arrivals.discard()


class Feeding:
    """The memory with a byte budget through which the states of a writer are copied."""

    def __init__(self, budget: int, copiers: SleepingPool, background: Callable[[Callable[[], None]], object]) -> None:
        """
        Args:
            budget: bytes of host memory.
            copiers: threads that copy.
            background: submits work that touches memory in the background.
        """
        self.memory = Arenas(budget)
        self._budget = budget
        self._copiers = copiers
        self._background = background

    def prepare(self, nbytes: int) -> None:
        """Touch memory for a state of `nbytes` bytes in the background. A second call does nothing."""
        if not self.memory.held:
            self.memory.expect(min(nbytes + nbytes // 2, self._budget), 1)  # plus gradients and shared bytes
        with contextlib.suppress(RuntimeError):  # closed meanwhile, which must not fail a save
            for run in self.memory.touch():
                self._background(run)

    def wake(self) -> None:
        """Start the threads that copy. Raises `RuntimeError` if no more can be started."""
        self._copiers.wake()

    def feed(self, flat: FlatState) -> Feed:
        """Make the `Feed` of a state."""
        return Feed(flat, self.memory, self._budget, self._copiers)

    def close(self) -> None:
        """Stop the threads that copy, and free the memory. May be called repeatedly."""
        self._copiers.shutdown()
        self.memory.close()
