"""Finds unordered accesses without waiting for a seed that shows them: vector clocks over streams and the host.

Each job knows up to where every other queue is done before it runs: by its queue, by events it waits for, and by what
the host had waited for when it was queued. Two jobs that touch the same memory, one of them writing, are ordered if one
knows of the other. (Accesses of host code to host memory are not seen.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tools.device.queues import Position, Queue

__all__ = ["Access", "Accesses", "Clock", "Order"]

Clock: TypeAlias = dict[Queue, int]
"""How many jobs of each queue are known to be done."""


class Order:
    """The clocks of all queues and of the host. Used under the scheduler's lock."""

    def __init__(self) -> None:
        self._known: dict[Queue, Clock] = {}
        self._at: dict[Position, Clock] = {}
        self._host: Clock = {}

    def pushed(self, position: Position, waits: Iterable[Position]) -> None:
        """Note that a job was queued."""
        queue, count = position
        clock = self._known.setdefault(queue, {})
        for other in (self._host, *(self._of(one) for one in waits)):
            _merge(clock, other)
        clock[queue] = count
        self._at[position] = dict(clock)

    def seen(self, position: Position | None) -> None:
        """Note that the host knows a position to be done; None: everything."""
        for clock in self._known.values() if position is None else (self._of(position),):
            _merge(self._host, clock)

    def at(self, *positions: Position) -> Clock:
        """The clock after all of these positions, joined with the host's."""
        clock = dict(self._host)
        for one in positions:
            _merge(clock, self._of(one))
        return clock

    def _of(self, position: Position) -> Clock:
        return self._at.get(position, {})


def _merge(clock: Clock, other: Clock) -> None:
    for queue, count in other.items():
        if clock.get(queue, 0) < count:
            clock[queue] = count


@dataclass(frozen=True, slots=True)
class Access:
    """A job reads or writes the bytes from `start` to before `end`."""

    position: Position
    writes: bool
    start: int
    end: int
    where: tuple[str, ...]

    def known_to(self, clock: Clock) -> bool:
        """Whether the access is done according to a clock."""
        return clock.get(self.position[0], 0) >= self.position[1]

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two accesses matters."""
        return self.start < other.end and other.start < self.end and (self.writes or other.writes)


class Accesses:
    """The accesses to one piece of memory that some queue may not know of yet."""

    def __init__(self) -> None:
        self.found: list[Access] = []

    def add(self, access: Access, clock: Clock) -> list[Access]:
        """Add an access -> the accesses that are not ordered with it."""
        unordered = [one for one in self.found if one.conflicts(access) and not one.known_to(clock)]
        # An access that is ordered with the new one is also ordered with those that the new one replaces.
        self.found = [
            one
            for one in self.found
            if not (one.known_to(clock) and access.start <= one.start and one.end <= access.end)
            or (one.writes and not access.writes)
        ]
        self.found.append(access)
        return unordered
