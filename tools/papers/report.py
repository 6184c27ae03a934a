"""Results as text: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from tools.papers.result import Result, Table

__all__ = ["claims", "compared", "machine_line", "markdown", "show"]


def claims(result: Result) -> Table:
    """The paper's figures beside ours."""
    rows = [(one.text, one.paper, one.ours, one.verdict) for one in result.claims]
    return Table("The paper's claims", ("claim", "paper", "here", ""), rows)


def compared(result: Result) -> list[str]:
    """A line for each comparison."""
    return [
        f"{one.what}: {one.equal} of {one.states} equal bit for bit" + (f"; {one.loss}" if one.loss else "")
        for one in result.compared
    ]


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in a line."""
    versions = machine["versions"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['filesystem']}, Linux {machine['kernel']}, Python {machine['python']}, torch {versions['torch']}; "
        f"other processes took {machine['busy_cores']:.1f} cores"
    )


def show(console: Console, result: Result) -> None:
    """Print tables, claims, remarks and comparisons."""
    for one in (*result.tables, claims(result)):
        grid = Grid(title=one.title, title_justify="left")
        for number, column in enumerate(one.columns):
            texts = any(isinstance(row[number], str) for row in one.rows)
            grid.add_column(column, justify="left" if texts else "right")
        for row in one.texts():
            grid.add_row(*row)
        console.print(grid)
    for line in _below(result):
        console.print(line, highlight=False, markup=False)


def _below(result: Result) -> Iterator[str]:
    yield from (f"{one.verdict}: {one.text}: {one.remark}" for one in result.claims if one.remark)
    yield from result.remarks
    yield from compared(result)


def markdown(result: Result) -> Iterator[str]:
    """Tables, claims, remarks and comparisons as lines of Markdown."""
    yield from _grid(claims(result), title=False)
    for one in result.claims:
        if one.remark:
            yield f"- *{one.text}*: **{one.verdict}**. {one.remark}"
    if any(one.remark for one in result.claims):
        yield ""
    for table in result.tables:
        yield from _grid(table)
    for line in (*result.remarks, *(f"Compared: {one}." for one in compared(result))):
        yield from (line, "")


def _grid(table: Table, *, title: bool = True) -> Iterator[str]:
    if title:
        yield from (f"{table.title}:", "")
    yield _line(table.columns)
    sides = [
        "---" if any(isinstance(row[place], str) for row in table.rows) else "---:"
        for place in range(len(table.columns))
    ]
    yield _line(sides)
    yield from (_line(row) for row in table.texts())
    yield ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
