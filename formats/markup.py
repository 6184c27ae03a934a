"""Objects as HTML, for notebooks: tables of escaped text, without scripts, styles of others, or anything fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, Final

__all__ = ["HtmlTable", "table"]

_MOST: Final = 12
"""Items of a list that are shown."""
_LONGEST: Final = 200
"""Letters of a text that are shown."""
_CELL: Final = "text-align:left;vertical-align:top;padding:2px 8px"


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, every one of which is escaped. Without headings there is no line for them."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    head = f"<thead>{line(headings, 'th')}</thead>" if headings else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>"


class HtmlTable:
    """A dataclass that a notebook shows as a table of its fields."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        itself: Any = self  # a dataclass, which this class by itself is not
        rows = [(field.name, _text(getattr(self, field.name))) for field in fields(itself) if field.repr]
        return table(type(self).__name__, (), rows)


def _text(value: Any) -> str:
    """A value in a cell: what is long is cut, and says how long it is."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({len(value):,} letters)"
    if isinstance(value, Mapping):
        return _row([f"{key}: {_text(item)}" for key, item in list(value.items())[:_MOST]], len(value))
    if isinstance(value, list | tuple):
        return _row([_text(item) for item in value[:_MOST]], len(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    name = getattr(value, "ref", None) if is_dataclass(value) else None
    return name if isinstance(name, str) else _text(repr(value))


def _row(shown: list[str], count: int) -> str:
    more = f", ... ({count:,} in all)" if count > len(shown) else ""
    return f"{', '.join(shown)}{more}" if shown else "none"
