"""A state that the thread which trains copies unit by unit, as the committer's thread codes it: under a byte budget.

What is coded needs two things at once: the new bytes and the base's. With whole copies that is twice the state. Here
the committer's thread says, when its turn has come, in which *units* it will look at the state; the thread that trains
copies one after the other into memory under a budget, and waits while that is spent. A unit that is coded takes its
place in the base, if the new state is to be a base, and its memory is free for another.
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
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.arenas import ArenaLease, Arenas
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK
from ckptstore.host.threads import SleepingPool
from ckptstore.segments.staged_units import StagedUnits, copy_now

__all__ = ["Feed", "Feeding", "Piece", "Unit", "Window"]

_LINE: Final = 64
"""Pieces begin at multiples of that: of cache lines, and of every dtype."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor.

    Attributes:
        place: where they go once they are coded; None: nowhere.
    """

    source: TensorSource
    start: int
    length: int
    place: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """What is coded at once.

    Attributes:
        name: a tensor of it, for errors.
    """

    name: str
    pieces: tuple[Piece, ...]

    @property
    def space(self) -> int:
        """Bytes of memory that it needs: whole pages."""
        return -(-sum(-(-piece.length // _LINE) * _LINE for piece in self.pieces) // BLOCK) * BLOCK


class Window:
    """A unit in memory, as whoever codes it sees it."""

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
        """Bytes of a tensor, which begin where one of the unit's pieces does. A view: nothing is copied."""
        part = self._parts[id(source), start]
        assert length <= len(part), (start, length)
        return part[:length]

    def done(self) -> None:
        """It is coded: its bytes take their place in the base, and its memory is free."""
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
    """One state on its way. Two threads share it: `run` is for the one that trains, all else for the committer's.

    Attributes:
        flat: the state, in training's own memory: to be read within `reading` alone.
        told: `run` raises what went wrong, so that nobody else has to be told.
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
        self._turn: float | None = None  # when it began
        self._reads = threading.Lock()

    # -- the thread that trains

    def run(self) -> float:
        """Copy what is asked for, in turn -> seconds that were waited, for the turn and for memory.

        When it returns nobody reads the state any more.

        Raises:
            UsageError: the budget is too small for a unit.
            whatever copying raised.
        """
        began = time.monotonic()
        waited: list[float] = []
        try:
            wanted = self._wanted.result()
            waited.append((self._turn or time.monotonic()) - began)
            submit = copy_now if len(wanted) == 1 else self._copiers.submit
            copies = ((unit.space, partial(_copied, submit, unit)) for unit in wanted)
            # If a unit is not wanted any more it has failed, which its saver hears of otherwise.
            self._arrivals.bring(copies, self._memory, waited.append)
        except BaseException as error:
            self._give_up(error)
            raise
        return sum(waited)

    def _give_up(self, error: BaseException) -> None:
        self.told = True
        self._gone = error
        self._arrivals.fail(error)
        with self._reads:  # Prevents: training's tensors read after the call that lent them has raised.
            pass

    # -- the committer's thread

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The state may be read within this ``with``, by any thread; what goes wrong there `run` raises, too.

        Raises:
            what ended `run`: the state is not to be had any more.
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
        """What `copy` makes of the state, all at once. Training may go on when this returns."""
        with self.reading():
            copied = copy()
        self._wanted.set_result(())
        return copied

    def windows(self, units: Sequence[Unit]) -> Iterator[Window]:
        """The units of the state, each once it is copied.

        Raises:
            UsageError: the budget is too small for one of them; `run` raises it, too.
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
        """Whether a unit could not be copied, which `run` raises."""
        return self._arrivals.spoiled

    def finish(self) -> None:
        """Nothing is read any more, whatever came of it: memory is free, and training goes on."""
        if not self._wanted.done():
            self._wanted.set_result(())
        self._arrivals.discard()


class Feeding:
    """The memory that the states of a writer are fed through."""

    def __init__(self, budget: int, copiers: SleepingPool, background: Callable[[Callable[[], None]], object]) -> None:
        """
        Args:
            budget: bytes of host memory.
            copiers: threads that copy.
            background: has memory touched while others work.
        """
        self.memory = Arenas(budget)
        self._budget = budget
        self._copiers = copiers
        self._background = background

    def prepare(self, nbytes: int) -> None:
        """Touch memory for a state of so many bytes in the background. A second time does nothing."""
        if not self.memory.held:
            self.memory.expect(min(nbytes + nbytes // 2, self._budget), 1)  # gradients, and what two tensors share
        with contextlib.suppress(RuntimeError):  # closed meanwhile: that is no reason to fail a save
            for run in self.memory.touch():
                self._background(run)

    def wake(self) -> None:
        """Start the threads that copy. Raises `RuntimeError`: there are no more."""
        self._copiers.wake()

    def feed(self, flat: FlatState) -> Feed:
        """A state to be fed."""
        return Feed(flat, self.memory, self._budget, self._copiers)

    def close(self) -> None:
        """Let go of memory. May be repeated."""
        self._copiers.shutdown()
        self.memory.close()
