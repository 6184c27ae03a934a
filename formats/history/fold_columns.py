"""The large tables of a fold: columns of fixed width, one after the other, little-endian.

A number takes 8 bytes, a flag 1, a time 8 (a double), a hash or uuid 16. The JSON in front of the columns has the
number of rows and the rare members that this version does not know.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats.history import metadata
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.columns import (
    DIGEST,
    CheckpointRows,
    Column,
    EncodingRows,
    NodeRows,
    SegmentRows,
    SlotRows,
    TableRows,
    ascending,
)
from ckptstore.formats.history.members import MAX_INT, MAX_TERM, Members, hexadecimal
from ckptstore.formats.history.records import ref_of

__all__ = ["ColumnReader", "Tables", "columns_size", "write_tables"]

_WIDTHS: Final = {"q": 8, "d": 8, "b": 1, "x": DIGEST}
_SHAPES: Final = {
    "checkpoints": CheckpointRows.SHAPE + "q",
    "held": CheckpointRows.SHAPE,
    "segments": SegmentRows.SHAPE,
    "encodings": EncodingRows.SHAPE,
}
"""The columns of each table, in order. Behind those of the encodings is one more, with a number for each use."""
_TERMS: Final = {"term": 1, "base's term": 0}
"""Columns of terms -> the smallest value; 0 means: there is no term."""
_NO_STATE: Final = bytes(DIGEST)
_BELOW_LIMIT: Final = bytes(range(MAX_INT >> 48))


# ------------------------------------------------------------------------------------------------ writing


def write_tables(catalog: Catalog) -> tuple[dict[str, Any], list[bytes]]:
    """Encode the large tables of `catalog` -> (their JSON members, their columns in order)."""
    checkpoints, slots = catalog.checkpoints.settled(), catalog.slots.settled()
    held, segments, encodings = catalog.held.settled(), catalog.segments.settled(), catalog.encodings.settled()
    assert isinstance(encodings, EncodingRows)
    assert len(slots) == len(checkpoints)
    kinds, used = _kinds(encodings)
    place = {name: row for row, name in enumerate(_slices(segments.columns[0]))}
    uses = _slices(encodings.uses)
    loose = sorted({name for name in uses if name not in place})  # only after damage: no intact record adds these
    place.update((name, len(segments) + row) for row, name in enumerate(loose))
    meta: dict[str, Any] = {
        "checkpoints": _described(checkpoints),
        "held": _described(held),
        "segments": _described(segments),
        "encodings": _described(encodings) | {"kinds": used, "uses": len(uses), "loose": b"".join(loose).hex()},
    }
    columns = [*checkpoints.columns, slots.columns[2], *held.columns, *segments.columns]
    columns += [*encodings.columns[:2], kinds, *encodings.columns[3:], array("q", map(place.__getitem__, uses))]
    return meta, [_little(column).tobytes() if isinstance(column, array) else column for column in columns]


def _slices(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST] for start in range(0, len(digests), DIGEST)]


def _kinds(rows: EncodingRows) -> tuple[array[int], list[str]]:
    """Return the kinds as indexes in a sorted list of those in use, so that equal catalogs have equal folds."""
    column = rows.columns[2]
    used = sorted({rows.kinds[code] for code in set(column)})
    place = [used.index(kind) if kind in used else 0 for kind in rows.kinds]
    return array("q", map(place.__getitem__, column)), used


def _described(rows: TableRows[Any, Any]) -> dict[str, Any]:
    extras = {
        str(rows.find(key)[0] + place): dict(members)
        for key in sorted(rows.extras)
        for place, members in sorted(rows.extras[key].items())
    }
    return {"rows": len(rows)} | ({"extra": extras} if extras else {})


def _little(column: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped


# ------------------------------------------------------------------------------------------------ reading


def columns_size(found: Members, what: str) -> int:
    """Return the bytes of the columns of the tables in a fold's JSON. The members are not taken.

    Raises:
        FormatError: the description of a table is missing or invalid.
    """
    size = 0
    for name, shape in _SHAPES.items():
        table = Members(found.rest().get(name), f"{what}, {name}")
        size += table.number("rows") * sum(map(_WIDTHS.__getitem__, shape))
        if name == "encodings":
            size += table.number("uses") * _WIDTHS["q"]
    return size


class Tables:
    """The large tables of a fold as checked rows."""

    def __init__(self, found: Members, columns: ColumnReader, what: str) -> None:
        """
        Args:
            found: the fold's members; those of the tables are taken.
            columns: the reader of the columns; it has as many bytes as `columns_size` says.
            what: names the fold in errors.

        Raises:
            FormatError: a table is invalid, or its rows are not in order.
        """
        members = [_FoldTable(found.rest().pop(name, None), f"{what}, {name}", columns) for name in _SHAPES]
        self.checkpoints = members[0].checkpoints()
        self.slots = SlotRows([*self.checkpoints.columns[:2], members[0].column("q", "slot")])
        self.held = members[1].checkpoints()
        nodes = self.held.keys()
        for node in nodes:
            start, stop = self.checkpoints.find(node)
            if start < stop:  # Prevents: a checkpoint that is promised to one reader and retired to another.
                raise FormatError(f"{what}: checkpoint {ref_of(node)} is promised and held")
        self.segments, ids = members[2].segments()
        self.encodings = members[3].encodings(ids)


class ColumnReader:
    """Reads columns one by one from the bytes behind a fold's JSON, which are exactly those of its tables."""

    def __init__(self, data: memoryview) -> None:
        """
        Args:
            data: as many bytes as `columns_size` says.
        """
        self._data = data

    def take(self, letter: str, rows: int, what: str) -> Column:
        """Return the next column.

        Raises:
            FormatError: a number, time or flag out of range.
        """
        size = rows * _WIDTHS[letter]
        part, self._data = bytes(self._data[:size]), self._data[size:]
        if letter == "x":
            return part
        column = _little(array(letter, part))
        if not _IN_RANGE[letter](part, column):
            raise FormatError(f"{what}: a number out of range")
        return column


def _naturals(data: bytes, column: array[Any]) -> bool:
    """Whether all are integers in 0..2^53. Two high bytes nearly always decide, without an object for each number."""
    if not data[7::8].strip(b"\0") and not data[6::8].translate(None, _BELOW_LIMIT):
        return True
    return bool(min(column) >= 0 and max(column) <= MAX_INT)


def _times(_: bytes, column: array[Any]) -> bool:
    return all(map(math.isfinite, column)) and not (len(column) and max(map(abs, column)) > MAX_INT)


def _flags(data: bytes, _: array[Any]) -> bool:
    return not data.translate(None, b"\0\1")


_IN_RANGE: Final = {"q": _naturals, "d": _times, "b": _flags}


class _FoldTable:
    """One table: its JSON, and its columns, which must be read in order."""

    def __init__(self, value: Any, what: str, columns: ColumnReader) -> None:
        self._members = Members(value, what)
        self._rows = self._members.number("rows")
        self._columns = columns
        self._what = what

    def column(self, letter: str, name: str, rows: int | None = None) -> Column:
        return self._columns.take(letter, self._rows if rows is None else rows, f"{self._what}, {name}")

    def checkpoints(self) -> CheckpointRows:
        names = ("term", "step", "state", "time", "tensors", "bytes")
        rows = CheckpointRows(self._all(CheckpointRows.SHAPE, names))
        if not rows.sorted_strictly():
            raise FormatError(f"{self._what}: not in the order of term and step, or with one of them twice")
        rows.extras = self._extras(rows, rows.keys)
        for members in rows.extras.values():
            if type(members[0].get(metadata.MEMBER, {})) is not dict:
                self._members.refuse("extra", "metadata that is an object")
        return rows

    def segments(self) -> tuple[SegmentRows, list[bytes]]:
        """Return the rows and their ids."""
        rows = SegmentRows(self._all(SegmentRows.SHAPE, ("id", "term", "size", "header", "hash")))
        ids = _slices(rows.columns[0])
        if not ascending(ids):
            raise FormatError(f"{self._what}: not in the order of their ids, or with one of them twice")
        rows.extras = self._extras(rows, rows.keys)
        return rows, ids

    def encodings(self, segments: list[bytes]) -> EncodingRows:
        """
        Args:
            segments: ids in the table of segments.
        """
        names = ("term", "step", "kind", "base's term", "base's step", "base's state", "count", "lossy", "bytes")
        columns = self._all(EncodingRows.SHAPE, names)
        kinds = self._members.names("kinds")
        loose = self._loose()
        if not ascending(loose) or not set(loose).isdisjoint(segments):
            self._members.refuse("loose", "the ascending ids of segments that are not in the table")
        if not ascending(kinds):
            self._members.refuse("kinds", "a list of strings that ascend")
        ids = [*segments, *loose]
        uses = self._members.number("uses")
        places = self.column("q", "segment", uses)
        if max(columns[2], default=-1) >= len(kinds):
            raise FormatError(f"{self._what}: kind {max(columns[2])} is not among the {len(kinds)} kinds")
        if len(places) and max(places) >= len(ids):
            raise FormatError(f"{self._what}: segment {max(places)} is not among the {len(ids)} segments")
        if sum(columns[6]) != uses:
            raise FormatError(f"{self._what}: {uses} uses of segments, but the rows have {sum(columns[6])}")
        if not _bases_canonical(columns[3], columns[4], columns[5]):
            raise FormatError(f"{self._what}: a base of term 0")
        rows = EncodingRows(columns, {}, kinds, b"".join(map(ids.__getitem__, places)))
        if not rows.sorted_strictly() and (nodes := list(NodeRows.keys(rows))) != sorted(nodes):
            raise FormatError(f"{self._what}: not in the order of term and step")
        rows.extras = self._extras(rows, lambda: NodeRows.keys(rows))
        return rows

    def _all(self, shape: str, names: Sequence[str]) -> list[Column]:
        columns = [self.column(letter, name) for letter, name in zip(shape, names, strict=True)]
        for name, column in zip(names, columns, strict=True):
            # Prevents: a term that is valid in a fold, but not in a slot, a segment or the name of a folder.
            if name in _TERMS and len(column) and not _TERMS[name] <= min(column) <= max(column) <= MAX_TERM:
                raise FormatError(f"{self._what}, {name}: a term out of range, at most {MAX_TERM}")
        return columns

    def _loose(self) -> list[bytes]:
        text = self._members.text("loose")
        if len(text) % (2 * DIGEST) or not hexadecimal(text, len(text)):
            self._members.refuse("loose", "joined groups of 32 lower-case hex digits")
        return _slices(bytes.fromhex(text))

    def _extras(
        self, rows: TableRows[Any, Any], keys: Callable[[], Iterator[Any]]
    ) -> dict[Any, dict[int, dict[str, Any]]]:
        """Return key -> index among the key's rows -> unknown members. `keys` yields the key of each row."""
        extras: dict[Any, dict[int, dict[str, Any]]] = {}
        found = list(self._extra_rows(len(rows)))
        of_row = list(keys()) if found else []
        for row, members in found:
            key = of_row[row]
            extras.setdefault(key, {})[row - rows.find(key)[0]] = members
        return extras

    def _extra_rows(self, rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for text, members in self._members.mapping("extra").items():
            canonical = text.isdecimal() and len(text) <= 16 and str(int(text)) == text
            if not canonical or int(text) >= rows or type(members) is not dict:
                self._members.refuse("extra", "an object of rows to objects")
            yield int(text), members


def _bases_canonical(terms: array[int], steps: array[int], states: bytes) -> bool:
    """Whether every row without a base (term 0) has step 0 and a state of zeros."""
    if not any(terms):
        return not any(steps) and states.count(0) == len(states)
    return all(
        not steps[row] and states[row * DIGEST : (row + 1) * DIGEST] == _NO_STATE
        for row, term in enumerate(terms)
        if not term
    )
