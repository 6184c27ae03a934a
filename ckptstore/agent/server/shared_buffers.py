"""The agent's buffers: the trainer fills them; then the writer and the keeper of the newest state hold them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptstore.agent.protocol.shared_memory import SharedMemory
from ckptstore.errors import AgentError
from ckptstore.host.prefault import populate

__all__ = ["SharedBuffer", "SharedBuffers"]

_PASSED: Final = 4
_MOST_BESIDE: Final = 8
"""Buffers that may be lent beside those of states: areas of two replicas, a state that is computed, whole tensors."""


@dataclass(slots=True, eq=False)
class SharedBuffer:
    """A piece of shared memory.

    Attributes:
        number: its identity; never used again.
        lent: the trainer may write to it, so its contents are not trusted.
        in_flight: it holds, or will hold, a state in flight.
        holders: how many need its contents.
        passed: how many requests it was idle for and did not fit.
    """

    number: int
    shared: SharedMemory
    lent: bool = False
    in_flight: bool = False
    holders: int = 0
    passed: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.shared.memory)

    @property
    def idle(self) -> bool:
        """Whether it may be lent."""
        return not self.lent and not self.holders


class SharedBuffers:
    """Buffers for states, of which a limited number may be in flight, and buffers for gradients.

    A state is in flight from the moment its buffer is lent until it is durable or lost.
    """

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: states in flight.
        """
        self._limit = limit
        self._in_flight = 0
        self._buffers: dict[int, SharedBuffer] = {}
        self._next = 0
        self._waiting: deque[tuple[int, Callable[[SharedBuffer | MemoryError], None]]] = deque()
        self._lock = threading.RLock()

    def lend(self, nbytes: int, lent: Callable[[SharedBuffer | MemoryError], None]) -> None:
        """Lend a buffer for a state: now, or once fewer than the limit are in flight.

        Args:
            lent: called with the buffer, or with the error; by any thread.
        """
        with self._lock:
            self._waiting.append((nbytes, lent))
        self._serve()

    def lend_beside(self, nbytes: int) -> SharedBuffer:
        """Lend a buffer for gradients.

        Raises:
            AgentError: too many buffers are lent.
            MemoryError: there is not enough memory.
        """
        with self._lock:
            if sum(one.lent for one in self._buffers.values()) > 2 * self._limit + _MOST_BESIDE:
                raise AgentError("too many buffers are lent: give back or save what was lent")
            return self._taken(nbytes)

    def take(self, nbytes: int) -> SharedBuffer:
        """A buffer for a state that this process computes. It counts as lent until it is taken back or given back.

        Raises:
            MemoryError: there is not enough memory.
        """
        with self._lock:
            return self._taken(nbytes)

    def has(self, number: int) -> bool:
        """Whether the buffer of this number still exists."""
        return number in self._buffers

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._in_flight >= self._limit:
                    return
                nbytes, lent = self._waiting.popleft()
                found: SharedBuffer | MemoryError
                try:
                    found = self._taken(nbytes)
                except MemoryError as error:
                    found = error
                else:
                    found.in_flight = True
                    self._in_flight += 1
            lent(found)

    def _taken(self, nbytes: int) -> SharedBuffer:
        fitting = [one for one in self._buffers.values() if one.idle and nbytes <= one.nbytes <= 2 * nbytes + (1 << 20)]
        buffer = min(fitting, key=lambda one: one.nbytes) if fitting else self._made(nbytes)
        # Buffers unused for a while belong to an old state size: free them.
        for one in list(self._buffers.values()):
            if one.idle and one is not buffer:
                one.passed += 1
                if one.passed > _PASSED * (self._limit + 1):
                    self._buffers.pop(one.number).shared.close()
        buffer.lent, buffer.passed = True, 0
        return buffer

    def _made(self, nbytes: int) -> SharedBuffer:
        buffer = SharedBuffer(self._next, SharedMemory.made(nbytes))
        self._next += 1
        self._buffers[buffer.number] = buffer
        return buffer

    def prepare(self, nbytes: int, count: int) -> None:
        """Allocate and touch buffers until there are `count`, so that filling one costs no more than a copy."""
        with self._lock:
            there = sum(one.nbytes >= nbytes for one in self._buffers.values())
            fresh = [self._made(nbytes) for _ in range(there, count)]
        for one in fresh:
            try:
                populate(one.shared.memory)
            except MemoryError:
                return  # the request that needs the memory reports it

    def lent(self, number: int) -> SharedBuffer:
        """The buffer of this number, which is lent. Raises `AgentError` if it is not."""
        buffer = self._buffers.get(number)
        if buffer is None or not buffer.lent:
            raise AgentError(f"buffer {number} is not lent")
        return buffer

    def take_back(self, buffer: SharedBuffer) -> None:
        """The trainer has filled a buffer, and no longer writes to it."""
        with self._lock:
            buffer.lent = False

    def hold(self, buffer: SharedBuffer) -> Callable[[], None]:
        """Hold the contents of a buffer -> a function that releases them; calling it again does nothing."""
        with self._lock:
            buffer.holders += 1

        done = False

        def free() -> None:
            nonlocal done
            with self._lock:
                if not done:
                    done = True
                    buffer.holders -= 1

        return free

    def landed(self, buffer: SharedBuffer) -> None:
        """The state in a buffer is no longer in flight."""
        with self._lock:
            if not buffer.in_flight:
                return
            buffer.in_flight = False
            self._in_flight -= 1
        self._serve()

    def give_back(self, buffer: SharedBuffer) -> None:
        """Return a lent buffer that was not filled."""
        self.take_back(buffer)
        self.landed(buffer)

    def recall(self) -> None:
        """The trainer is gone: drop every lent buffer, and forget its waiting requests.

        They are not lent again. A killed process leaves its device for seconds, which may still copy to them.
        """
        with self._lock:
            self._waiting.clear()
            lent = [one for one in self._buffers.values() if one.lent]
            # Prevents: a state that the next trainer gives, over which a device of the last one copies.
            for one in lent:
                self._buffers.pop(one.number).shared.close()
        for one in lent:
            self.give_back(one)

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for one in self._buffers.values():
                one.shared.close()
            self._buffers.clear()
