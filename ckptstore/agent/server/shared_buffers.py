"""The agent's buffers: lent to the trainer to be filled, then held by the writer, and by who keeps the newest state."""

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


@dataclass(slots=True, eq=False)
class SharedBuffer:
    """A piece of shared memory.

    Attributes:
        number: by which it is known; never that of another one.
        lent: the trainer fills it, or may: nobody believes what is in it.
        flying: a state is in it, or will be, that is in flight.
        holders: how many others need its contents.
        passed: how often it was not what was wanted.
    """

    number: int
    shared: SharedMemory
    lent: bool = False
    flying: bool = False
    holders: int = 0
    passed: int = 0

    @property
    def nbytes(self) -> int:
        """How much fits."""
        return len(self.shared.memory)

    @property
    def idle(self) -> bool:
        """Whether it may be lent."""
        return not self.lent and not self.holders


class SharedBuffers:
    """Buffers for states, of which so many may be in flight, and buffers for what goes with them (gradients).

    A state is in flight from the moment that its buffer is lent until it has landed: durable or lost.
    """

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: states in flight.
        """
        self._limit = limit
        self._flying = 0
        self._buffers: dict[int, SharedBuffer] = {}
        self._next = 0
        self._waiting: deque[tuple[int, Callable[[SharedBuffer | MemoryError], None]]] = deque()
        self._lock = threading.RLock()

    def lend(self, nbytes: int, lent: Callable[[SharedBuffer | MemoryError], None]) -> None:
        """Lend a buffer for a state: now, or once fewer than the limit are in flight.

        Args:
            lent: is given the buffer, or what it is told in its place, by whichever thread has it.
        """
        with self._lock:
            self._waiting.append((nbytes, lent))
        self._serve()

    def lend_beside(self, nbytes: int) -> SharedBuffer:
        """Lend a buffer for what goes with a state.

        Raises:
            AgentError: more of them are lent than states may be.
            MemoryError: there is not so much.
        """
        with self._lock:
            if sum(one.lent for one in self._buffers.values()) > 2 * self._limit + 2:
                raise AgentError("too many buffers are lent: give back or save what was lent")
            return self._taken(nbytes)

    def take(self, nbytes: int) -> SharedBuffer:
        """A buffer for a state that is made here: as if it were lent, until it is taken or given back.

        Raises:
            MemoryError: there is not so much.
        """
        with self._lock:
            return self._taken(nbytes)

    def has(self, number: int) -> bool:
        """Whether a buffer of that number is here still."""
        return number in self._buffers

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._flying >= self._limit:
                    return
                nbytes, lent = self._waiting.popleft()
                found: SharedBuffer | MemoryError
                try:
                    found = self._taken(nbytes)
                except MemoryError as error:
                    found = error
                else:
                    found.flying = True
                    self._flying += 1
            lent(found)

    def _taken(self, nbytes: int) -> SharedBuffer:
        fitting = [one for one in self._buffers.values() if one.idle and nbytes <= one.nbytes <= 2 * nbytes + (1 << 20)]
        buffer = min(fitting, key=lambda one: one.nbytes) if fitting else self._made(nbytes)
        # What nobody has wanted for long is of a state that has changed its size.
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
        """See that so many buffers are there, and touched, so that filling one costs no more than a copy."""
        with self._lock:
            there = sum(one.nbytes >= nbytes for one in self._buffers.values())
            fresh = [self._made(nbytes) for _ in range(there, count)]
        for one in fresh:
            try:
                populate(one.shared.memory)
            except MemoryError:
                return  # whoever needs it will say so

    def lent(self, number: int) -> SharedBuffer:
        """The buffer of that number, which the trainer has. Raises `AgentError` if it has not."""
        buffer = self._buffers.get(number)
        if buffer is None or not buffer.lent:
            raise AgentError(f"buffer {number} is not lent")
        return buffer

    def take_back(self, buffer: SharedBuffer) -> None:
        """The trainer has filled it, and changes it no more: whoever needs it holds it."""
        with self._lock:
            buffer.lent = False

    def hold(self, buffer: SharedBuffer) -> Callable[[], None]:
        """One more needs its contents -> what says that it needs them no more; a second time does nothing."""
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
        """The state in a buffer is not in flight any more, if it was."""
        with self._lock:
            if not buffer.flying:
                return
            buffer.flying = False
            self._flying -= 1
        self._serve()

    def give_back(self, buffer: SharedBuffer) -> None:
        """The trainer has not filled it."""
        self.take_back(buffer)
        self.landed(buffer)

    def recall(self) -> None:
        """The trainer is gone: take everything back that it was filling, and forget what it waited for."""
        with self._lock:
            self._waiting.clear()
            lent = [one for one in self._buffers.values() if one.lent]
        for one in lent:
            self.give_back(one)

    def close(self) -> None:
        """Let go of every descriptor."""
        with self._lock:
            for one in self._buffers.values():
                one.shared.close()
            self._buffers.clear()
