"""Objects as HTML, for notebooks: tables of escaped text, without scripts, styles of others, or anything fetched."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, Final, Self, SupportsIndex, TypeVar, overload

__all__ = ["HtmlTable", "Rows", "counted", "table", "text"]

_T = TypeVar("_T")

_MOST: Final = 12
"""Items of a list that are shown."""
_LONGEST: Final = 200
"""Letters of a text that are shown."""
_ROWS: Final = 50
"""Rows of a list that are shown: of more, the first and last."""
_CELL: Final = "text-align:left;vertical-align:top;padding:2px 8px"


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, every one of which is escaped. Without headings there is no line for them."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    head = f"<thead>{line(headings, 'th')}</thead>" if headings else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>"


def counted(number: int, thing: str) -> str:
    """``1 term``, ``2 terms``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class HtmlTable:
    """A dataclass that a notebook shows as a table of its fields."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return table(type(self).__name__, (), _fields(self))


class Rows(list[_T]):
    """A list that a notebook shows as a table, and an interactive session as lines; so does a slice of it.

    In all else it is a list: it is equal to one of the same items.

    Args:
        items: what it holds, each with the attributes that are shown.
        thing: what one of them is called.
        columns: names of the attributes.
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
        """One item, or a table of some."""
        if isinstance(index, slice):
            return type(self)(super().__getitem__(index), self._thing, self._columns)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        """Aligned lines of texts, the title first."""
        cells = [self._columns, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([self._title(), *(line.rstrip() for line in (lines if self else ()))])

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies: a list's own way knows nothing of the columns."""
        return type(self), (list(self), self._thing, self._columns)

    def _repr_html_(self) -> str:
        return self.with_title(self._title())

    def with_title(self, title: str) -> str:
        """The table as HTML, under another title than how many there are."""
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
    """Names and values of a dataclass's fields."""
    found = []
    for field in fields(thing):
        if field.repr:
            value = getattr(thing, field.name)
            found.append((field.name, _named(field.name, value)))
    return found


def _named(name: str, value: Any) -> str:
    """The value of a field. ``time`` is one, in seconds since the Unix epoch; a ``pid`` is a name, and no amount."""
    if name == "time" and isinstance(value, float):
        return _moment(value)
    return str(value) if name == "pid" and isinstance(value, int) else text(value)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def text(value: Any) -> str:
    """A value in a cell: what is long is cut, and says how long it is; numbers are rounded to six digits."""
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
    if _anonymous(value):  # one of many, in one cell: what it has of its own, without tables in it
        return ", ".join(
            f"{name} {told}" for name, told in _fields(value) if not isinstance(getattr(value, name), Mapping)
        )
    name = getattr(value, "ref", None) if is_dataclass(value) else None
    return name if isinstance(name, str) else text(repr(value))


def _anonymous(value: Any) -> bool:
    """A dataclass that is no checkpoint: those have a REF by which they are known."""
    return is_dataclass(value) and not isinstance(getattr(value, "ref", None), str)


def _row(shown: list[str], count: int, between: str) -> str:
    more = f"{between}... ({count:,} in all)" if count > len(shown) else ""
    return f"{between.join(shown)}{more}" if shown else "none"
