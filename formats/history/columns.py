"""Tables of the catalog as columns: immutable rows, sorted by their key.

A number takes 8 bytes and a hash 16, where a Python object takes hundreds. Entries are created when they are read.
Only the standard library is used, so that listing a store does not wait for the import of numpy.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import Any, ClassVar, Final, Generic, Self, TypeAlias, TypeVar

from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, Node, SegmentEntry

__all__ = [
    "DIGEST",
    "TIME",
    "CheckpointRows",
    "Column",
    "EncodingRows",
    "NodeRows",
    "SegmentRows",
    "SlotRows",
    "TableRows",
    "ascending",
    "empty",
    "packed",
]

DIGEST: Final = 16
"""Bytes of a hash or uuid."""
TIME: Final = 3
"""Index of the column of `CheckpointRows` that has the times."""

Column: TypeAlias = Any
"""``q``: 64-bit integers, ``b``: small ones, ``d``: doubles (each an `array`); ``x``: hashes, joined (`bytes`)."""

K = TypeVar("K", bound=Any)
V = TypeVar("V")
_Extras: TypeAlias = Mapping[Any, Mapping[int, Mapping[str, Any]]]


def empty(letter: str) -> Column:
    """Return a column without rows."""
    return b"" if letter == "x" else array(letter)


def packed(text: str) -> bytes | None:
    """Return the bytes of a hash or uuid; None if `text` is not one."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        return None
    return data if len(data) == DIGEST and data.hex() == text else None


def ascending(column: Sequence[Any]) -> bool:
    """Whether each entry is greater than the previous one."""
    return all(map(operator.lt, column, islice(column, 1, None)))


class TableRows(Generic[K, V]):
    """Rows in ascending order of their keys. A value takes one row or, in `EncodingRows`, several.

    Attributes:
        SHAPE: one letter for each column (see `Column`).
        columns: the columns, all of the same length.
        extras: key -> index among the rows of its value -> members that this version does not know.
    """

    SHAPE: ClassVar[str]

    def __init__(self, columns: Sequence[Column] | None = None, extras: _Extras | None = None) -> None:
        self.columns = tuple(map(empty, self.SHAPE) if columns is None else columns)
        self.extras: _Extras = {} if extras is None else extras

    def __len__(self) -> int:
        return len(self.columns[-1]) // (DIGEST if self.SHAPE[-1] == "x" else 1)

    @property
    def count(self) -> int:
        """Number of keys."""
        return len(self)

    def find(self, key: K) -> tuple[int, int]:
        """Return the rows of `key` as (first, one after the last); both are the insertion point if it has none."""
        raise NotImplementedError

    def keys(self, start: int = 0, stop: int | None = None) -> Iterator[K]:
        """Iterate over the keys of these rows, each once."""
        raise NotImplementedError

    def values(self, start: int = 0, stop: int | None = None) -> Iterator[V]:
        """Iterate over the values of these rows, which are created on demand."""
        raise NotImplementedError

    def value(self, start: int, stop: int) -> V:
        """Return the value of the rows of one key."""
        return next(self.values(start, stop))

    def _encoded(self, items: Sequence[tuple[K, V]]) -> Self:
        """Encode `items`, whose keys ascend, as rows."""
        raise NotImplementedError

    def with_changes(self, changes: Mapping[K, V | None]) -> Self:
        """Return new rows in which each key of `changes` has its new value, or is removed (None)."""
        order = sorted(changes.items(), key=operator.itemgetter(0))
        fresh = self._encoded([(key, value) for key, value in order if value is not None])
        pieces: list[tuple[Self, int, int]] = []
        place = used = 0
        for key, value in order:
            start, stop = self.find(key)
            pieces.append((self, place, start))
            place = stop
            if value is not None:
                start, stop = fresh.find(key)
                pieces.append((fresh, start, stop))
                used = stop
        assert used == len(fresh)
        pieces.append((self, place, len(self)))
        kept = {key: extra for key, extra in self.extras.items() if key not in changes}
        return fresh._joined(_runs(pieces), {**kept, **fresh.extras})

    def _joined(self, pieces: Sequence[tuple[Self, int, int]], extras: _Extras) -> Self:
        return type(self)(self._columns(pieces), extras)

    def _columns(self, pieces: Sequence[tuple[Self, int, int]]) -> list[Column]:
        joined: list[Column] = []
        for index, letter in enumerate(self.SHAPE):
            if letter == "x":
                joined.append(
                    b"".join(rows.columns[index][start * DIGEST : stop * DIGEST] for rows, start, stop in pieces)
                )
                continue
            column = array(letter)
            for rows, start, stop in pieces:
                column += rows.columns[index][start:stop]
            joined.append(column)
        return joined

    def _extra(self, key: K, place: int = 0) -> Mapping[str, Any]:
        return self.extras.get(key, {}).get(place, {}) if self.extras else {}


def _runs(pieces: Iterable[tuple[Any, int, int]]) -> list[tuple[Any, int, int]]:
    """Return the non-empty pieces, with adjacent pieces of the same rows combined."""
    found: list[tuple[Any, int, int]] = []
    for rows, start, stop in pieces:
        if start == stop:
            continue
        if found and found[-1][0] is rows and found[-1][2] == start:
            found[-1] = (rows, found[-1][1], stop)
        else:
            found.append((rows, start, stop))
    return found


def _texts(digests: bytes, start: int, stop: int) -> list[str]:
    text = digests[start * DIGEST : stop * DIGEST].hex()
    return [text[place : place + 2 * DIGEST] for place in range(0, len(text), 2 * DIGEST)]


def _joined_digests(texts: Iterable[str]) -> bytes:
    return bytes.fromhex("".join(texts))


def _numbers(letter: str, values: Iterable[Any]) -> array[Any]:
    return array(letter, values)


class NodeRows(TableRows[Node, V]):
    """Rows with key (term, step), in the first two columns."""

    def find(self, key: Node) -> tuple[int, int]:
        """See `TableRows.find`."""
        terms, steps = self.columns[0], self.columns[1]
        start, stop = bisect_left(terms, key[0]), bisect_right(terms, key[0])
        return bisect_left(steps, key[1], start, stop), bisect_right(steps, key[1], start, stop)

    def upto(self, term: int, step: int | None) -> tuple[int, int]:
        """Return the rows of `term` with a step of at most `step` (None: all) as (first, one after the last)."""
        terms, steps = self.columns[0], self.columns[1]
        start, stop = bisect_left(terms, term), bisect_right(terms, term)
        return start, stop if step is None else bisect_right(steps, step, start, stop)

    def keys(self, start: int = 0, stop: int | None = None) -> Iterator[Node]:
        """See `TableRows.keys`."""
        return zip(self.columns[0][start:stop], self.columns[1][start:stop], strict=True)

    def sorted_strictly(self) -> bool:
        """Whether the (term, step) of each row is greater than that of the previous row."""
        terms, steps = self.columns[0], self.columns[1]
        one_term = terms.count(terms[0]) == len(terms) if len(terms) else True  # the usual case: avoids making pairs
        return ascending(steps) if one_term else ascending(list(self.keys()))

    def _node_columns(self, nodes: Sequence[Node]) -> list[Column]:
        return [_numbers("q", [term for term, _ in nodes]), _numbers("q", [step for _, step in nodes])]


class SlotRows(NodeRows[int]):
    """(term, step) -> slot."""

    SHAPE = "qqq"

    def values(self, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """See `TableRows.values`."""
        return iter(self.columns[2][start:stop])

    def _encoded(self, items: Sequence[tuple[Node, int]]) -> Self:
        nodes = self._node_columns([node for node, _ in items])
        return type(self)([*nodes, _numbers("q", [slot for _, slot in items])])


class CheckpointRows(NodeRows[CheckpointEntry]):
    """(term, step) -> checkpoint. Columns: term, step, state, time, tensors, bytes."""

    SHAPE = "qqxdqq"

    def values(self, start: int = 0, stop: int | None = None) -> Iterator[CheckpointEntry]:
        """See `TableRows.values`."""
        stop = len(self) if stop is None else stop
        terms, steps, states, times, tensors, sizes = self.columns
        for row in range(start, stop):
            state = states[row * DIGEST : (row + 1) * DIGEST].hex()
            term, step = terms[row], steps[row]
            extra = self._extra((term, step))
            yield CheckpointEntry(term, step, state, times[row], tensors[row], sizes[row], extra)

    def _encoded(self, items: Sequence[tuple[Node, CheckpointEntry]]) -> Self:
        rows = [entry for _, entry in items]
        columns = self._node_columns([node for node, _ in items])
        columns += [
            _joined_digests([row.state for row in rows]),
            _numbers("d", [row.time for row in rows]),
            _numbers("q", [row.tensors for row in rows]),
            _numbers("q", [row.nbytes for row in rows]),
        ]
        return type(self)(columns, {node: {0: row.extra} for node, row in items if row.extra})


class SegmentRows(TableRows[str, SegmentEntry]):
    """id -> segment. Columns: id, term, size, header, hash."""

    SHAPE = "xqqqx"

    def find(self, key: str) -> tuple[int, int]:
        """See `TableRows.find`."""
        ids: Any = self.columns[0]
        wanted = packed(key)
        if wanted is None:
            return 0, 0
        place = bisect_left(range(len(self)), wanted, key=lambda row: ids[row * DIGEST : (row + 1) * DIGEST])
        return place, place + (ids[place * DIGEST : (place + 1) * DIGEST] == wanted)

    def keys(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """See `TableRows.keys`."""
        return iter(_texts(self.columns[0], start, len(self) if stop is None else stop))

    def values(self, start: int = 0, stop: int | None = None) -> Iterator[SegmentEntry]:
        """See `TableRows.values`."""
        stop = len(self) if stop is None else stop
        ids, terms, sizes, headers, hashes = self.columns
        for row in range(start, stop):
            at, end = row * DIGEST, (row + 1) * DIGEST
            name = ids[at:end].hex()
            checksum = hashes[at:end].hex()
            yield SegmentEntry(name, terms[row], sizes[row], headers[row], checksum, self._extra(name))

    def _encoded(self, items: Sequence[tuple[str, SegmentEntry]]) -> Self:
        rows = [entry for _, entry in items]
        columns: list[Column] = [
            _joined_digests([row.id for row in rows]),
            _numbers("q", [row.term for row in rows]),
            _numbers("q", [row.size for row in rows]),
            _numbers("q", [row.header for row in rows]),
            _joined_digests([row.hash for row in rows]),
        ]
        return type(self)(columns, {name: {0: row.extra} for name, row in items if row.extra})


class EncodingRows(NodeRows[tuple[Encoding, ...]]):
    """(term, step) -> its encodings, oldest first, one row each.

    Columns: term, step, kind (index in `kinds`), base's term (0: no base), step, state, number of segments, lossy,
    bytes.

    Attributes:
        kinds: the distinct kinds of encodings.
        uses: ids of the segments that the rows read, joined; as many as the numbers of segments add up to.
    """

    SHAPE = "qqqqqxqbq"

    def __init__(
        self,
        columns: Sequence[Column] | None = None,
        extras: _Extras | None = None,
        kinds: tuple[str, ...] = (),
        uses: bytes = b"",
    ) -> None:
        super().__init__(columns, extras)
        self.kinds = kinds
        self.uses = uses

    @cached_property
    def count(self) -> int:
        """Number of keys."""
        if ascending(self.columns[1]):
            return len(self)
        return sum(1 for _ in groupby(super().keys()))

    @cached_property
    def _starts(self) -> Sequence[int]:
        """Row -> where its segments begin in `uses`; the last entry is where those of the last row end."""
        counts: Any = self.columns[6]
        if counts.count(1) == len(self):
            return range(len(self) + 1)
        return array("q", accumulate(counts, initial=0))

    def keys(self, start: int = 0, stop: int | None = None) -> Iterator[Node]:
        """See `TableRows.keys`."""
        return (node for node, _ in groupby(super().keys(start, stop)))

    def values(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Encoding, ...]]:
        """See `TableRows.values`."""
        row = start
        for node, same in groupby(super().keys(start, stop)):
            edges = [self._edge(node, row + place, place) for place, _ in enumerate(same)]
            row += len(edges)
            yield tuple(edges)

    def _edge(self, node: Node, row: int, place: int) -> Encoding:
        columns: Any = self.columns
        _, _, kinds, terms, steps, states, _, lossy, sizes = columns
        base = None
        if terms[row]:
            base = CheckpointId(terms[row], steps[row], states[row * DIGEST : (row + 1) * DIGEST].hex())
        used = tuple(_texts(self.uses, self._starts[row], self._starts[row + 1]))
        extra = self._extra(node, place)
        return Encoding(node, self.kinds[kinds[row]], base, used, bool(lossy[row]), sizes[row], extra)

    def _encoded(self, items: Sequence[tuple[Node, tuple[Encoding, ...]]]) -> Self:
        kinds = {kind: place for place, kind in enumerate(self.kinds)}
        rows = [edge for _, edges in items for edge in edges]
        columns = self._node_columns([node for node, edges in items for _ in edges])
        columns += [
            _numbers("q", [kinds.setdefault(row.kind, len(kinds)) for row in rows]),
            _numbers("q", [0 if row.base is None else row.base.term for row in rows]),
            _numbers("q", [0 if row.base is None else row.base.step for row in rows]),
            _joined_digests(["0" * 32 if row.base is None else row.base.state for row in rows]),
            _numbers("q", [len(row.segments) for row in rows]),
            _numbers("b", [row.lossy for row in rows]),
            _numbers("q", [row.bytes for row in rows]),
        ]
        extras = {
            node: {place: edge.extra for place, edge in enumerate(edges) if edge.extra}
            for node, edges in items
            if any(edge.extra for edge in edges)
        }
        uses = _joined_digests([segment for row in rows for segment in row.segments])
        return type(self)(columns, extras, tuple(kinds), uses)

    def _joined(self, pieces: Sequence[tuple[Self, int, int]], extras: _Extras) -> Self:
        uses = b"".join(
            rows.uses[rows._starts[start] * DIGEST : rows._starts[stop] * DIGEST] for rows, start, stop in pieces
        )
        return type(self)(self._columns(pieces), extras, self.kinds, uses)

    # -------------------------------------------------------------------------------------------- reverse lookup

    @cached_property
    def _by_use(self) -> array[int]:
        """Indexes in `uses`, sorted by the segment id there."""
        ids = [self.uses[place : place + DIGEST] for place in range(0, len(self.uses), DIGEST)]
        return array("I", sorted(range(len(ids)), key=ids.__getitem__))

    @cached_property
    def _by_base(self) -> array[int]:
        """Rows that have a base, sorted by the base's (term, step)."""
        columns: Any = self.columns
        nodes = list(zip(columns[3], columns[4], strict=True))
        return array("I", sorted((row for row, (term, _) in enumerate(nodes) if term), key=nodes.__getitem__))

    def users(self, segment: str) -> Iterator[Node]:
        """Yield the checkpoints that read `segment`, once for each encoding that does."""
        wanted = packed(segment)
        if wanted is None:
            return
        uses, order = self.uses, self._by_use
        used: Callable[[int], bytes] = lambda place: uses[place * DIGEST : (place + 1) * DIGEST]  # noqa: E731
        for place in order[bisect_left(order, wanted, key=used) : bisect_right(order, wanted, key=used)]:
            yield self._node(bisect_right(self._starts, place) - 1)

    def dependents(self, node: Node) -> Iterator[Node]:
        """Yield the checkpoints that build on `node`, once for each encoding that does."""
        columns: Any = self.columns
        terms, steps = columns[3], columns[4]
        order = self._by_base
        base: Callable[[int], Node] = lambda row: (terms[row], steps[row])  # noqa: E731
        for row in order[bisect_left(order, node, key=base) : bisect_right(order, node, key=base)]:
            yield self._node(row)

    def _node(self, row: int) -> Node:
        return (self.columns[0][row], self.columns[1][row])
