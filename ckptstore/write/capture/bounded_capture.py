"""Copies a state under a byte budget: the training thread copies it unit by unit, as the committer compresses it.

Compression needs the new bytes and those of the base at the same time. With whole copies that is twice the state. Here,
when a save has its turn, the committer's thread lists the *units* in which it will read the state. The training thread
copies one unit after the other into memory with a budget, and waits while the budget is used up. A compressed unit is
copied into the base, if the new state is to be a base, and its memory is free for another unit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.arenas import ArenaLease
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK
from ckptstore.segments.staged_units import copy_now
from ckptstore.write.capture.unit_copy import CopyMemory, UnitCopy

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


class Feed(UnitCopy):
    """One state that is copied as it is compressed. See `UnitCopy`.

    Attributes:
        flat: the state, in training's own memory: read it only within `reading`.
    """

    def __init__(self, flat: FlatState, memory: Feeding) -> None:
        super().__init__(memory)
        self.flat = flat
        self._budget = memory.budget
        self._wanted: Future[Sequence[Unit]] = Future()
        self._turn: float | None = None  # when its turn began
        self._reads = threading.Lock()

    # -- the thread that saves

    def _copy(self, begin: Callable[[], None]) -> float:
        """Copy the requested units in order -> the seconds waited, for the turn and for memory.

        Raises:
            UsageError: the budget is too small for a unit.
            and the error of a copy.
        """
        begin()
        began = time.monotonic()
        wanted = self._wanted.result()
        waited = (self._turn or time.monotonic()) - began
        submit = copy_now if len(wanted) == 1 else self._memory.copiers.submit
        return waited + self._bring((unit.space, partial(_copied, submit, unit)) for unit in wanted)

    def run(self, begin: Callable[[], None]) -> float:
        """See `UnitCopy.run`."""
        try:
            return super().run(begin)
        finally:
            with self._reads:  # Prevents: reading training's tensors after the call that passed them has raised.
                pass

    # -- the thread that compresses

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
                self._told = True
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
            self._told = True
            self._wanted.set_exception(error)
            raise error
        self._memory.arenas.expect(min(sum(unit.space for unit in units), self._budget), 1)
        self._wanted.set_result(units)
        return (Window(unit, self._arrivals.take()) for unit in units)

    def finish(self) -> None:
        """See `UnitCopy.finish`. Training continues."""
        if not self._wanted.done():
            self._wanted.set_result(())
        super().finish()


class Feeding(CopyMemory):
    """The memory with a byte budget for states that are compressed.

    Attributes:
        budget: bytes of host memory.
    """

    def __init__(self, budget: int, background: Callable[[Callable[[], None]], object]) -> None:
        """See `CopyMemory`."""
        super().__init__(budget, 1, background)
        self.budget = budget

    def copy_of(self, flat: FlatState, digests: Mapping[str, int] | None = None) -> Feed:
        """See `CopyMemory.copy_of`."""
        del digests  # they are computed with the hashes, from bytes that are in a core's cache
        return Feed(flat, self)

    def _space(self, nbytes: int) -> int:
        return nbytes + nbytes // 2  # plus gradients and shared bytes
