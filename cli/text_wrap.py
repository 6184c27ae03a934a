"""Wraps text to the terminal: between words, never inside a command in backticks, a REF or a range.

Text in a pipe is not wrapped: a line stays one line, so that it can be searched.
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
"""A gap, and the text after it that is never broken: a command, a range with distance, a number with unit, a word."""


def columns(*, err: bool = False) -> int | None:
    """Return the width of the terminal on stdout (or stderr); None if it is not a terminal."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def width(text: str) -> int:
    """Return the columns that a text takes. Color codes take none."""
    return len(click.unstyle(text)) if "\x1b" in text else len(text)


def fitted(text: str, room: int | None, hanging: int = 2) -> str:
    """Wrap a text at `room` columns and indent continuation lines by `hanging`. None: return it unchanged.

    A unit that is wider than `room` gets a line of its own.
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
    """Print a line. On a terminal it is wrapped."""
    click.echo(fitted(text, columns(err=err), hanging), err=err)


def say_all(blocks: Iterable[str]) -> None:
    """Print sentences and tables, one below the other.

    A block with several lines is a table that already fits; an indented block is meant for copying. Both are printed
    unchanged.
    """
    for block in blocks:
        if "\n" in block or block.startswith("  "):
            click.echo(block)
        else:
            say(block)
