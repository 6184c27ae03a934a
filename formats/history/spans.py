"""A set of integers whose memory depends on its gaps, not on its members: evenly spaced integers are one span.

A term records such sets for as long as it lasts: the steps that were used, and those that were retired. A run saves
every step, or every tenth, for weeks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableSet
from typing import Self

__all__ = ["Spans"]


class Spans(MutableSet[int]):
    """A set of integers from 0 to 2^63 - 1, in ascending order.

    A span has a first and a last number and the distance between neighbors. Spans do not overlap. Adding and testing
    take time logarithmic in the number of spans.
    """

    __slots__ = ("_apart", "_count", "_first", "_last")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """Create a set of `numbers`, given in any order."""
        ascending = sorted(set(numbers))
        self._first, self._last, self._apart = array("q"), array("q"), array("q")
        self._count = len(ascending)
        if not ascending:
            return
        first = last = ascending[0]
        apart = 1
        for number in ascending[1:]:
            if number - last == apart or first == last:
                last, apart = number, number - last
                continue
            self._insert(len(self._first), first, last, apart)
            first = last = number
            apart = 1
        self._insert(len(self._first), first, last, apart)

    def copy(self) -> Self:
        """Return a copy. The cost is that of copying the spans."""
        twin = type(self)()
        twin._first, twin._last, twin._apart = self._first[:], self._last[:], self._apart[:]
        twin._count = self._count
        return twin

    @property
    def spans(self) -> int:
        """Number of spans, each of which takes 24 bytes."""
        return len(self._first)

    @property
    def highest(self) -> int | None:
        """The highest number; None: there is none."""
        return self._last[-1] if self._last else None

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        place = bisect_right(self._first, number) - 1
        return place >= 0 and self._holds(place, number)

    def _holds(self, place: int, number: int) -> bool:
        return number <= self._last[place] and not (number - self._first[place]) % self._apart[place]

    def __iter__(self) -> Iterator[int]:
        for first, last, apart in zip(self._first, self._last, self._apart, strict=True):
            yield from range(first, last + 1, apart)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def add(self, value: int) -> None:
        """Add a number."""
        place = bisect_right(self._first, value) - 1
        if place >= 0:
            if self._holds(place, value):
                return
            if value < self._last[place]:  # between two numbers of a span
                self._part(place, value, value)
        self._count += 1
        place += 1
        self._insert(place, value, value)
        if place and self._joined(place - 1):
            place -= 1
        if place + 1 < len(self._first):
            self._joined(place)

    def discard(self, value: int) -> None:
        """Remove a number if it is in the set."""
        place = bisect_right(self._first, value) - 1
        if place < 0 or not self._holds(place, value):
            return
        self._count -= 1
        first, last, apart = self._first[place], self._last[place], self._apart[place]
        if first == last:
            del self._first[place], self._last[place], self._apart[place]
        elif value == first:
            self._set(place, first + apart, last)
        elif value == last:
            self._set(place, first, last - apart)
        else:
            self._part(place, value, value + 1)

    def clear(self) -> None:
        """Remove all numbers."""
        self._first, self._last, self._apart = array("q"), array("q"), array("q")
        self._count = 0

    def _part(self, place: int, below: int, above: int) -> None:
        """Split a span into the numbers below `below` and those from `above` on. Neither part may be empty."""
        first, last, apart = self._first[place], self._last[place], self._apart[place]
        end = first + (below - 1 - first) // apart * apart
        begin = first + -((first - above) // apart) * apart
        self._insert(place + 1, begin, last, apart)
        self._set(place, first, end)

    def _set(self, place: int, first: int, last: int) -> None:
        self._first[place], self._last[place] = first, last
        if first == last:
            self._apart[place] = 1

    def _insert(self, place: int, first: int, last: int, apart: int = 1) -> None:
        self._first.insert(place, first)
        self._last.insert(place, last)
        self._apart.insert(place, apart if first < last else 1)

    def _joined(self, place: int) -> bool:
        """Combine this span and the next if together they are evenly spaced. Returns whether it did."""
        gap = self._first[place + 1] - self._last[place]
        for one in (place, place + 1):
            if self._first[one] != self._last[one] and self._apart[one] != gap:
                return False
        self._last[place], self._apart[place] = self._last[place + 1], gap
        del self._first[place + 1], self._last[place + 1], self._apart[place + 1]
        return True
