"""The tables of the catalog: mappings that are shared, not copied.

A table is rows that never change (`ckptstore.formats.columns`) under a few changes that do. A copy shares the rows and
copies the changes; now and then, when there are many, the changes become rows (`Table.settle`). So a catalog that stays
as it is costs what changed lately, not what the store holds.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from heapq import merge
from itertools import groupby
from typing import Any, Final, Generic, Self, TypeVar, overload

from ckptstore.formats.columns import NodeRows, Rows
from ckptstore.formats.records import Node

__all__ = ["MANY", "NodeTable", "Table"]

MANY: Final = 1024
"""Changes above which `Table.settle` makes rows of them (big tables: a 64th of the rows): a copy costs at most so many
entries, and new rows cost a copy of all columns."""

_TAKEN: Final = 256
"""Rows that are looked at together on the way down."""

K = TypeVar("K", bound=Any)
V = TypeVar("V")
D = TypeVar("D")


class Table(MutableMapping[K, V], Generic[K, V]):
    """A mapping in ascending order of its keys.

    Attributes:
        rows: what was there before the changes; shared with copies.
        changes: key -> its value now, or None if it is gone.
    """

    __slots__ = ("_longer", "changes", "rows")

    def __init__(self, rows: Rows[K, V]) -> None:
        self.rows = rows
        self.changes: dict[K, V | None] = {}
        self._longer = 0  # keys added less keys removed

    def copy(self) -> Self:
        """A table that stays as it is whatever becomes of this one. Costs the changes."""
        twin = type(self)(self.rows)
        twin.changes = self.changes.copy()
        twin._longer = self._longer
        return twin

    def settled(self) -> Rows[K, V]:
        """All of it as rows."""
        return self.rows.with_changes(self.changes) if self.changes else self.rows

    def consolidate(self) -> bool:
        """Make rows of the changes if there are many -> whether there were."""
        if len(self.changes) <= max(MANY, len(self.rows) // 64):
            return False
        self.rows, self.changes, self._longer = self.settled(), {}, 0
        return True

    def _among_rows(self, key: K) -> bool:
        start, stop = self.rows.find(key)
        return start < stop

    def __contains__(self, key: object) -> bool:
        if key in self.changes:
            return self.changes[key] is not None
        return self._among_rows(key)  # type: ignore[arg-type]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        if key in self.changes:
            value = self.changes[key]
            return default if value is None else value
        start, stop = self.rows.find(key)
        return self.rows.value(start, stop) if start < stop else default

    def __getitem__(self, key: K) -> V:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._longer += 1
        self.changes[key] = value

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self._longer -= 1
        if self._among_rows(key):
            self.changes[key] = None
        else:
            del self.changes[key]

    def __len__(self) -> int:
        return self.rows.count + self._longer

    def __iter__(self) -> Iterator[K]:
        place = 0
        for key, value in self._ordered():
            start, stop = self.rows.find(key)
            yield from self.rows.keys(place, start)
            place = stop
            if value is not None:
                yield key
        yield from self.rows.keys(place)

    def _ordered(self) -> list[tuple[K, V | None]]:
        return [(key, self.changes[key]) for key in sorted(self.changes)]

    def _each(self) -> Iterator[tuple[K, V]]:
        """Keys and values in one pass over the rows."""
        rows = self.rows
        place = 0
        for key, value in self._ordered():
            start, stop = rows.find(key)
            yield from zip(rows.keys(place, start), rows.values(place, start), strict=True)
            place = stop
            if value is not None:
                yield key, value
        yield from zip(rows.keys(place), rows.values(place), strict=True)

    def column(self, place: int, of: Callable[[V], Any]) -> Iterator[Any]:
        """One column of numbers, in the order of the keys, each of which has one row; no entries are made of the rows.

        Args:
            place: which of the rows' columns.
            of: what it holds of a value.
        """
        numbers = self.rows.columns[place]
        begin = 0
        for key, value in self._ordered():
            start, stop = self.rows.find(key)
            yield from numbers[begin:start]
            begin = stop
            if value is not None:
                yield of(value)
        yield from numbers[begin:]

    def extras(self) -> dict[K, Mapping[str, Any]]:
        """Key -> the first row's members that this version does not know, where there are any."""
        found = {key: places[0] for key, places in self.rows.extras.items() if 0 in places and key not in self.changes}
        lately: Mapping[K, Any] = self.changes
        return found | {key: value.extra for key, value in lately.items() if value is not None and value.extra}

    def items(self) -> ItemsView[K, V]:
        """See `dict.items`."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """See `dict.values`."""
        return _Values(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table) and other.rows is self.rows and other.changes == self.changes:
            return True
        return dict(self.items()) == dict(other.items()) if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())!r})"


class _Items(ItemsView[K, V]):
    def __init__(self, table: Table[K, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._table._each()


class _Values(ValuesView[V]):
    def __init__(self, table: Table[Any, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._table._each())


class NodeTable(Table[Node, V]):
    """A table by (term, step)."""

    __slots__ = ()

    rows: NodeRows[V]

    def highest(self, term: int, step: int | None = None) -> Node | None:
        """The highest step of `term`, if `step` is given the highest up to that one; None: there is none."""
        found = [
            node
            for node, value in self.changes.items()
            if value is not None and node[0] == term and (step is None or node[1] <= step)
        ]
        start, stop = self.rows.upto(term, step)
        while start < stop:
            node = next(self.rows.keys(stop - 1, stop))
            if self.changes.get(node, node) is not None:
                found.append(node)
                break
            stop -= 1
        return max(found, default=None)

    def holds(self, term: int) -> int:
        """How many keys are of `term`."""
        start, stop = self.rows.upto(term, None)
        lately = [(node, value is not None) for node, value in self.changes.items() if node[0] == term]
        several = self.rows.count < len(self.rows)  # rows of one key
        among_rows = sum(1 for _ in self.rows.keys(start, stop)) if several else stop - start
        return among_rows + sum(there - self._among_rows(node) for node, there in lately)

    def __reversed__(self) -> Iterator[Node]:
        """From the highest key down; who stops early pays for what was taken."""
        rows = (
            node
            for stop in range(len(self.rows), 0, -_TAKEN)
            for node in reversed(list(self.rows.keys(max(0, stop - _TAKEN), stop)))
        )
        for node, _ in groupby(merge(rows, sorted(self.changes, reverse=True), reverse=True)):
            if self.changes.get(node, node) is not None:
                yield node
