"""Text that fits a terminal: broken between words, never within a command in backticks, a REF or a range.

In a pipe nothing is broken: a line is a line there, so that it can be searched.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import click

__all__ = ["columns", "fitted", "say", "say_all", "width"]

_UNIT: Final = r"(?:[KMGTP]?i?B(?:/s)?|ms|s|min|h|d|times)\b[^\s\w]*"
_WORD: Final = re.compile(rf"(\s*)((?:`[^`\n]*`|\S)+(?:(?<=[0-9]) (?:by [0-9]+\S*|{_UNIT}))?)")
"""A gap, and what stays in one piece after it: a command, a range with its distance, a number with its unit, a word."""


def columns(*, err: bool = False) -> int | None:
    """How wide the terminal is that stdout (or stderr) is; None: it is none."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def width(text: str) -> int:
    """Columns that a text takes: colours take none."""
    return len(click.unstyle(text)) if "\x1b" in text else len(text)


def fitted(text: str, room: int | None, hanging: int = 2) -> str:
    """The text in lines of at most `room` columns, those that go on indented by `hanging`; None: as it is.

    What stays in one piece and is wider has a line of its own.
    """
    if room is None or width(text) <= room:
        return text
    return "\n".join(line for whole in text.split("\n") for line in _lines(whole, room, hanging))


def _lines(text: str, room: int, hanging: int) -> Iterator[str]:
    line, empty = "", True
    for gap, word in _WORD.findall(text):
        if empty or width(line) + len(gap) + width(word) <= room:
            line += gap + word
        else:
            yield line
            line = " " * hanging + word
        empty = False
    yield line


def say(text: str, *, hanging: int = 2, err: bool = False) -> None:
    """Print a line; on a terminal in as many as it takes."""
    click.echo(fitted(text, columns(err=err), hanging), err=err)


def say_all(blocks: Iterable[str]) -> None:
    """Print sentences and tables, one below the other.

    What has several lines is a table, which was made to fit; what is indented is to be copied. Both stay as they are.
    """
    for block in blocks:
        if "\n" in block or block.startswith("  "):
            click.echo(block)
        else:
            say(block)
