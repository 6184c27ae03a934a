"""Allocate memory for saves in flight under a byte budget: pieces of any length, freed in any order.

Memory is mapped on demand in *arenas*, each about as large as one save, and kept for reuse, because the first touch of
fresh memory costs more than a copy. An arena allocates the lowest piece that fits, so its upper end may stay untouched.
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
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.host.buffers import Bytes, aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.prefault import Prefault

__all__ = ["LEAST", "ArenaLease", "Arenas"]

LEAST: Final = 3 * CHUNK
"""The smallest budget, in bytes: one chunk is copied, one is hashed and one is written."""

_PATIENCE: Final = 4
"""Calls of `expect` after which idle arenas of a larger state are freed."""


class _Arena:
    """One mapping, and its free ranges: ascending, no two adjacent."""

    def __init__(self, nbytes: int) -> None:
        self.memory = aligned(nbytes)
        self.prefault = Prefault(self.memory)
        self.asked = False  # whether `touch` has returned its prefault job
        self.free = [(0, len(self.memory))]

    @property
    def idle(self) -> bool:
        return self.free == [(0, len(self.memory))]

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` in the lowest free range that fits. Returns the offset, or None if there is none."""
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
class ArenaLease:
    """An allocated piece of memory.

    Attributes:
        memory: its address is a multiple of 4096; its initial contents are arbitrary.
        waited: seconds for which the caller waited for it.
    """

    memory: Bytes
    _give: Callable[[], None] | None
    waited: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def free(self) -> None:
        """Return the memory. It must not be used afterwards. A second call does nothing."""
        with self._lock:
            give, self._give = self._give, None
        if give is not None:
            give()


class Arenas:
    """Arenas under a budget. `take` waits while the budget is used up.

    Attributes:
        most: the largest number of bytes that were allocated at once.
    """

    def __init__(self, budget: int | None = None) -> None:
        """
        Args:
            budget: most bytes of host memory; None: `expect` sets the limit.

        Raises:
            UsageError: the budget is below `LEAST`.
        """
        if budget is not None and budget < LEAST:
            raise UsageError(f"memory: {budget} bytes for the saves in flight, at least {LEAST} are needed")
        self._budget = budget
        self._limit = 0
        self._save_bytes = 0
        self._most_held = 0
        self._calls_above_limit = 0
        self._woken = 0
        self._arenas: list[_Arena] = []
        self._used = 0
        self.most = 0
        self._turn = threading.Lock()  # callers are served in order, however small the later requests are
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return self._used

    @property
    def held(self) -> int:
        """Bytes that are mapped. Pages that were never touched take no memory."""
        return sum(len(arena.memory) for arena in self._arenas)

    def mappings(self) -> list[Bytes]:
        """The memory that is mapped at present."""
        with self._changed:
            return [arena.memory for arena in self._arenas]

    def expect(self, at_once: int, times: int) -> None:
        """Set the limit for `times` saves of `at_once` bytes each, as far as the budget allows."""
        limit = at_once * times
        # Without a budget, the extra space allows for fragmentation by states that change their sizes.
        self_chosen = limit + limit // 4 + LEAST
        with self._changed:
            self._save_bytes = at_once
            self._limit = limit if self._budget is None else min(limit, self._budget)
            self._most_held = self_chosen if self._budget is None else self._budget
            above = self.held > 2 * self._limit + LEAST
            self._calls_above_limit = self._calls_above_limit + 1 if above else 0
            if self._calls_above_limit > _PATIENCE:
                # Buffers unused for a while belong to an old state size: free them.
                self._calls_above_limit = 0
                for arena in [arena for arena in self._arenas if arena.idle]:
                    self._drop(arena)

    def touch(self) -> list[Callable[[], None]]:
        """Map a spare arena if all are in use and the limit allows it.

        Raises nothing; `take` reports if there is no memory.

        Returns:
            Jobs that prefault the new arenas, to be run in the background. Each is returned once.
        """
        with self._changed:
            if all(not arena.idle for arena in self._arenas) and self.held < self._limit:
                with contextlib.suppress(MemoryError):
                    self._grow(min(self._save_bytes, self._limit - self.held))
            fresh = [arena for arena in self._arenas if not arena.asked]
            for arena in fresh:
                arena.asked = True
            return [arena.prefault.run for arena in fresh]

    def take(self, nbytes: int, short: Callable[[], None] = lambda: None) -> ArenaLease:
        """Allocate a piece of memory; wait while there is none.

        Args:
            nbytes: a multiple of 4096, at most a chunk and two pages.
            short: called before each wait: at first, after `wake`, and whenever the freed memory does not suffice. May
                raise an exception to end the wait.

        Raises:
            MemoryError: the system does not have enough memory.
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
        """Make waiting callers call `short` again."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop prefaulting, and unmap the idle arenas."""
        with self._changed:
            for arena in list(self._arenas):
                arena.prefault.stop()
                if arena.idle:
                    self._drop(arena)

    def _try(self, nbytes: int) -> ArenaLease | None:
        with self._changed:
            for arena in self._arenas:
                if (start := arena.take(nbytes)) is not None:
                    break
            else:
                if not self._grow(nbytes) and not self._start_over(nbytes):
                    return None
                arena = self._arenas[-1]
                start = arena.take(nbytes)
                assert start is not None
            arena.prefault.use()
            self._used += nbytes
            self.most = max(self.most, self._used)
        return ArenaLease(arena.memory[start : start + nbytes], lambda: self._give(arena, start, nbytes))

    def _grow(self, nbytes: int) -> bool:
        """Map one more arena that holds `nbytes`, if the limit allows it. Returns whether it did."""
        if self._used + nbytes > self._limit:
            return False
        left = self._limit - self.held
        size = max(nbytes, min(self._save_bytes, left))
        if size < left < size + LEAST:
            size = left  # otherwise the rest of the budget would be too small for any chunk
        size = min(size, self._most_held - self.held)
        if size < nbytes:
            return False
        self._arenas.append(_Arena(size))
        return True

    def _start_over(self, nbytes: int) -> bool:
        """Replace all arenas if nothing is allocated. So an unexpected size or fragmentation cannot block forever."""
        if self._used:
            return False
        for arena in list(self._arenas):
            self._drop(arena)
        size = max(self._save_bytes, nbytes)
        self._arenas.append(_Arena(size if self._budget is None else min(size, self._budget)))
        return True

    def _drop(self, arena: _Arena) -> None:
        arena.prefault.stop()
        self._arenas.remove(arena)

    def _give(self, arena: _Arena, start: int, nbytes: int) -> None:
        with self._changed:
            arena.give(start, nbytes)
            self._used -= nbytes
            self._changed.notify_all()
