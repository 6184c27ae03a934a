"""Memory for what is under way, under a budget of bytes: pieces of any length, taken and given back in any order.

It is mapped in *arenas* as it is needed, each about as large as what comes at once, and kept: touching fresh memory
costs more than the copy. Within an arena the lowest piece that fits is taken, so what is used little is never touched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.formats.layout import CHUNK
from ckptstore.host.buffers import Bytes, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.prefault import Touching

__all__ = ["LEAST", "Arenas", "Lease"]

LEAST: Final = 3 * CHUNK
"""The smallest budget: a chunk is copied, one is hashed and one is written."""

_PASSED: Final = 4


class _Arena:
    """One mapping, and which ranges of it are free: ascending, none touching another."""

    def __init__(self, nbytes: int) -> None:
        self.memory = aligned(nbytes)
        self.touching = Touching(self.memory)
        self.asked = False  # to be touched
        self.free = [(0, len(self.memory))]

    @property
    def idle(self) -> bool:
        return self.free == [(0, len(self.memory))]

    def take(self, nbytes: int) -> int | None:
        """The lowest free range of so many bytes, which is not free any more -> where it begins."""
        for number, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[number : number + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        number = bisect_left(self.free, (start, end))
        after = number < len(self.free) and self.free[number][0] == end
        before = number > 0 and self.free[number - 1][1] == start
        low = self.free[number - 1][0] if before else start
        high = self.free[number][1] if after else end
        self.free[number - before : number + after] = [(low, high)]


@dataclass(slots=True, eq=False)
class Lease:
    """A piece of memory that was taken.

    Attributes:
        memory: at a multiple of 4096; with arbitrary contents at first.
        waited: seconds that it was waited for.
    """

    memory: Bytes
    _give: Callable[[], None] | None
    waited: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def free(self) -> None:
        """Give it back; nobody may use `memory` any more. A second time does nothing."""
        with self._lock:
            give, self._give = self._give, None
        if give is not None:
            give()


class Arenas:
    """Arenas under a budget; `take` waits while it is spent.

    Attributes:
        most: the most bytes that were taken at once.
    """

    def __init__(self, budget: int | None = None) -> None:
        """
        Args:
            budget: bytes of host memory at most; None: as `expect` says.

        Raises:
            UsageError: the budget is below `LEAST`.
        """
        if budget is not None and budget < LEAST:
            raise UsageError(f"memory: {budget} bytes for what is in flight, at least {LEAST} are needed")
        self._budget = budget
        self._limit = 0
        self._at_once = 0
        self._cap = 0
        self._passed = 0
        self._woken = 0
        self._arenas: list[_Arena] = []
        self._used = 0
        self.most = 0
        self._turn = threading.Lock()  # who came first is served first, however small the others' pieces are
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    @property
    def held(self) -> int:
        """Bytes that are mapped; what was never used of them takes no memory."""
        return sum(len(arena.memory) for arena in self._arenas)

    def mappings(self) -> list[Bytes]:
        """The memory that is mapped at present."""
        with self._changed:
            return [arena.memory for arena in self._arenas]

    def expect(self, at_once: int, times: int) -> None:
        """So many bytes will be taken at once, so often: all of that may be taken, if the budget allows it."""
        limit = at_once * times
        # Without a budget pieces of states that change their sizes may lie so that others do not fit between them.
        self_chosen = limit + limit // 4 + LEAST
        with self._changed:
            self._at_once = at_once
            self._limit = limit if self._budget is None else min(limit, self._budget)
            self._cap = self_chosen if self._budget is None else self._budget
            self._passed = self._passed + 1 if self.held > 2 * self._limit + LEAST else 0
            if self._passed > _PASSED:
                # What nobody has wanted for long is of a state that has changed its size.
                self._passed = 0
                for arena in [arena for arena in self._arenas if arena.idle]:
                    self._drop(arena)

    def touch(self) -> list[Callable[[], None]]:
        """See that there is one arena more than are in use, if there may be -> what touches those that are new.

        That is to be run in the background; each is told of once. Raises nothing: who asks for memory hears of it.
        """
        with self._changed:
            if all(not arena.idle for arena in self._arenas) and self.held < self._limit:
                with contextlib.suppress(MemoryError):
                    self._grow(min(self._at_once, self._limit - self.held))
            untold = [arena for arena in self._arenas if not arena.asked]
            for arena in untold:
                arena.asked = True
            return [arena.touching.run for arena in untold]

    def take(self, nbytes: int, short: Callable[[], None] = lambda: None) -> Lease:
        """A piece of memory; waits while there is none.

        Args:
            nbytes: a multiple of 4096, at most a chunk and two pages.
            short: called before waiting, and again after `wake` and whenever what was given back does not suffice;
                raises what ends the wait.

        Raises:
            MemoryError: the system has not so much.
        """
        assert nbytes % BLOCK == 0, nbytes
        with self._turn:
            lease = self._try(nbytes)
            if lease is not None:
                return lease
            began = time.monotonic()
            while lease is None:
                woken = self._woken
                short()
                with self._changed:
                    if woken != self._woken:
                        continue
                    lease = self._try(nbytes)
                    if lease is None:
                        self._changed.wait()
            lease.waited = time.monotonic() - began
            return lease

    def wake(self) -> None:
        """Let who waits call `short` again."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Touch nothing any more, and let go of what is not taken."""
        with self._changed:
            for arena in list(self._arenas):
                arena.touching.stop()
                if arena.idle:
                    self._drop(arena)

    def _try(self, nbytes: int) -> Lease | None:
        with self._changed:
            for arena in self._arenas:
                if (start := arena.take(nbytes)) is not None:
                    break
            else:
                if not self._grow(nbytes) and not self._begin_anew(nbytes):
                    return None
                arena = self._arenas[-1]
                start = arena.take(nbytes)
                assert start is not None
            arena.touching.use()
            self._used += nbytes
            self.most = max(self.most, self._used)
        return Lease(arena.memory[start : start + nbytes], lambda: self._give(arena, start, nbytes))

    def _grow(self, nbytes: int) -> bool:
        """One more arena, in which `nbytes` fit, if there may be one."""
        if self._used + nbytes > self._limit:
            return False
        left = self._limit - self.held
        size = max(nbytes, min(self._at_once, left))
        if size < left < size + LEAST:
            size = left  # prevents a rest in which no chunk fits, and that nobody can use
        size = min(size, self._cap - self.held)
        if size < nbytes:
            return False
        self._arenas.append(_Arena(size))
        return True

    def _begin_anew(self, nbytes: int) -> bool:
        """With nothing taken there is always space, whatever was expected, and however the arenas were cut."""
        if self._used:
            return False
        for arena in list(self._arenas):
            self._drop(arena)
        size = max(self._at_once, nbytes)
        self._arenas.append(_Arena(size if self._budget is None else min(size, self._budget)))
        return True

    def _drop(self, arena: _Arena) -> None:
        arena.touching.stop()
        self._arenas.remove(arena)

    def _give(self, arena: _Arena, start: int, nbytes: int) -> None:
        with self._changed:
            arena.give(start, nbytes)
            self._used -= nbytes
            self._changed.notify_all()
