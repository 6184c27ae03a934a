"""Render objects as HTML for notebooks: tables of escaped text, without scripts, style sheets or remote resources."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Self, SupportsIndex, TypeVar, overload

__all__ = ["HtmlTable", "Rows", "counted", "table", "text"]

_T = TypeVar("_T")

_MOST: Final = 12
"""Maximum items of a list shown in a cell."""
_LONGEST: Final = 200
"""Maximum letters of a text shown in a cell."""
_ROWS: Final = 50
"""Maximum rows of a list. A longer list is shown by its first and last rows."""
_CELL: Final = "text-align:left;vertical-align:top;padding:2px 8px"


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of texts, all of them escaped. Without headings it has no header line."""
    from html import escape  # its table of entities takes a millisecond, which only notebooks need

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    head = f"<thead>{line(headings, 'th')}</thead>" if headings else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>"


def counted(number: int, thing: str) -> str:
    """Return a count with its noun: ``1 term``, ``2 terms``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class HtmlTable:
    """A dataclass that a notebook shows as a table of its fields."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return table(type(self).__name__, (), _fields(self))


class Rows(list[_T]):
    """A list that a notebook shows as a table and an interactive session as lines. A slice of it is shown alike.

    In everything else it behaves as a list: it is equal to a list of the same items.

    Args:
        items: the items of the list, each with the attributes in `columns`.
        thing: the noun for one item.
        columns: names of the attributes to show.
    """

    def __init__(self, items: Iterable[_T], thing: str, columns: Sequence[str]) -> None:
        super().__init__(items)
        self._thing = thing
        self._columns = tuple(columns)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> _T: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> _T | Self:
        """Return one item, or a `Rows` of a slice."""
        if isinstance(index, slice):
            return type(self)(super().__getitem__(index), self._thing, self._columns)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        """Return aligned lines of text, beginning with the title."""
        cells = [self._columns, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([self._title(), *(line.rstrip() for line in (lines if self else ()))])

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copies: a list's own `__reduce__` does not include the columns."""
        return type(self), (list(self), self._thing, self._columns)

    def _repr_html_(self) -> str:
        return self.with_title(self._title())

    def with_title(self, title: str) -> str:
        """Return the table as HTML with this title, instead of the number of items."""
        return table(title, self._columns, self._cells())

    def _title(self) -> str:
        return counted(len(self), self._thing)

    def _cells(self) -> list[tuple[str, ...]]:
        whole = len(self) <= _ROWS
        half = _ROWS // 2
        shown = [self, []] if whole else [list(self)[:half], list(self)[-half:]]
        first, last = (
            [tuple(_named(name, getattr(item, name)) for name in self._columns) for item in some] for some in shown
        )
        more = (f"... and {len(self) - _ROWS:,} more", *("" for _ in self._columns[1:]))
        return first if whole else [*first, more, *last]


def _fields(thing: Any) -> list[tuple[str, str]]:
    """Return names and values of a dataclass's fields as texts."""
    found = []
    for field in fields(thing):
        if field.repr:
            value = getattr(thing, field.name)
            found.append((field.name, _named(field.name, value)))
    return found


def _named(name: str, value: Any) -> str:
    """Format the value of a field. ``time`` is in seconds since 1970; a ``pid`` is shown without separators."""
    if name == "time" and isinstance(value, float):
        return _moment(value)
    return str(value) if name == "pid" and isinstance(value, int) else text(value)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def text(value: Any) -> str:
    """Format a value for a cell: long values are truncated and show their length; numbers get six digits."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({len(value):,} letters)"
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return _row([f"{key}: {text(item)}" for key, item in list(value.items())[:_MOST]], len(value), "; ")
    if isinstance(value, list | tuple):
        nested = any(isinstance(item, list | tuple) or _anonymous(item) for item in value)
        shown = [f"({text(item)})" if isinstance(item, list | tuple) else text(item) for item in value[:_MOST]]
        return _row(shown, len(value), "; " if nested else ", ")
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if _anonymous(value):  # one of many in a cell: only its own fields, without nested tables
        return ", ".join(
            f"{name} {shown}" for name, shown in _fields(value) if not isinstance(getattr(value, name), Mapping)
        )
    name = getattr(value, "ref", None) if is_dataclass(value) else None
    return name if isinstance(name, str) else text(repr(value))


def _anonymous(value: Any) -> bool:
    """Whether `value` is a dataclass without a REF, so not a checkpoint, which is shown by its REF."""
    return is_dataclass(value) and not isinstance(getattr(value, "ref", None), str)


def _row(shown: list[str], count: int, between: str) -> str:
    more = f"{between}... ({count:,} in all)" if count > len(shown) else ""
    return f"{between.join(shown)}{more}" if shown else "none"
