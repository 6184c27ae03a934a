"""The tables of the catalog: mappings whose copies share unchanged data.

A table has immutable rows (`columns`) and a few changes on top. A copy shares the rows and copies the
changes. When there are many changes, `Table.consolidate` turns them into rows. So the cost of a catalog that does not
change depends on recent changes, not on the size of the store.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from heapq import merge
from itertools import groupby
from typing import Any, Final, Generic, Self, TypeVar, overload

from ckptstore.formats.history.columns import NodeRows, TableRows
from ckptstore.formats.history.records import Node

__all__ = ["MANY", "NodeTable", "Table"]

MANY: Final = 1024
"""Number of changes above which `Table.consolidate` makes rows of them (for a large table, a 64th of its rows). A copy
costs at most that many entries; new rows cost a copy of all columns."""

_BATCH: Final = 256
"""Rows that are read together when iterating downwards."""

_RAISE: Final[Any] = object()
"""The default of `Table.pop` that stands for none."""

K = TypeVar("K", bound=Any)
V = TypeVar("V")
D = TypeVar("D")


class Table(MutableMapping[K, V], Generic[K, V]):
    """A mapping in ascending order of its keys.

    Attributes:
        rows: the rows before the changes; shared with copies.
        changes: key -> its value now, or None if it is gone.
    """

    __slots__ = ("_longer", "changes", "rows")

    def __init__(self, rows: TableRows[K, V]) -> None:
        self.rows = rows
        self.changes: dict[K, V | None] = {}
        self._longer = 0  # keys added minus keys removed

    def copy(self) -> Self:
        """Return a table that later changes of this one do not affect. The cost is that of copying the changes."""
        twin = type(self)(self.rows)
        twin.changes = self.changes.copy()
        twin._longer = self._longer
        return twin

    def settled(self) -> TableRows[K, V]:
        """Return the whole table as rows."""
        return self.rows.with_changes(self.changes) if self.changes else self.rows

    def consolidate(self) -> bool:
        """Turn the changes into rows if there are many. Returns whether it did."""
        if len(self.changes) <= max(MANY, len(self.rows) // 64):
            return False
        self.rows, self.changes, self._longer = self.settled(), {}, 0
        return True

    def _among_rows(self, key: K) -> bool:
        if not self.rows.columns[0]:  # a run that retires has no rows: its catalog stays small
            return False
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
        """Return the value of `key`, or `default`."""
        if key in self.changes:
            value = self.changes[key]
            return default if value is None else value
        if not self.rows.columns[0]:
            return default
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
        if self.pop(key, None) is None:
            raise KeyError(key)

    def pop(self, key: K, default: Any = _RAISE) -> Any:
        """See `dict.pop`. Looks the key up once."""
        start, stop = self.rows.find(key) if self.rows.columns[0] else (0, 0)
        value = self.changes.get(key)
        if value is None and key not in self.changes and start < stop:
            value = self.rows.value(start, stop)
        if value is None:
            if default is _RAISE:
                raise KeyError(key)
            return default
        self._longer -= 1
        if start < stop:
            self.changes[key] = None
        else:
            del self.changes[key]
        return value

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
        """Yield keys and values in one pass over the rows."""
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
        """Yield one column of numbers in the order of the keys, without creating entries. Each key has one row.

        Args:
            place: index of the column.
            of: returns the column's number of a changed value.
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
        """Return key -> the members of its first row that this version does not know, for keys that have any."""
        found = {key: places[0] for key, places in self.rows.extras.items() if 0 in places and key not in self.changes}
        recent: Mapping[K, Any] = self.changes
        return found | {key: value.extra for key, value in recent.items() if value is not None and value.extra}

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
    """A table whose keys are (term, step)."""

    __slots__ = ()

    rows: NodeRows[V]

    def highest(self, term: int, step: int | None = None) -> Node | None:
        """Return the highest step of `term` up to `step` (None: no limit) as (term, step); None: there is none."""
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
        """Return the number of keys of `term`."""
        start, stop = self.rows.upto(term, None)
        recent = [(node, value is not None) for node, value in self.changes.items() if node[0] == term]
        several = self.rows.count < len(self.rows)  # some keys have several rows
        among_rows = sum(1 for _ in self.rows.keys(start, stop)) if several else stop - start
        return among_rows + sum(there - self._among_rows(node) for node, there in recent)

    def __reversed__(self) -> Iterator[Node]:
        """Iterate from the highest key down. Rows are read in batches, so stopping early costs little."""
        rows = (
            node
            for stop in range(len(self.rows), 0, -_BATCH)
            for node in reversed(list(self.rows.keys(max(0, stop - _BATCH), stop)))
        )
        for node, _ in groupby(merge(rows, sorted(self.changes, reverse=True), reverse=True)):
            if self.changes.get(node, node) is not None:
                yield node
