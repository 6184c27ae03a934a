"""Implements ``ckpt doctor``: reports what works here, what is slow, and what to do."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE_OR_NOTHING
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, printable
from ckptstore.cli.spinner import over

if TYPE_CHECKING:
    from ckptstore.doctor.findings import Diagnosis, Finding

_COLOURS = {"works": "green", "slow": "yellow", "careful": "yellow", "absent": "bright_black", "fails": "red"}


@make_command(
    "doctor",
    examples=[
        "ckpt doctor                  # this machine, and the disk of this folder",
        "ckpt doctor runs/gpt         # the disk that runs/gpt is on, and its log",
        "ckpt doctor s3://bucket/gpt  # credentials, conditional writes, speed, clock",
        "ckpt doctor --quick --json",
    ],
    alone=True,
)
@STORE_OR_NOTHING
@click.option("--quick", is_flag=True, help="Measure no speeds; do not import torch.")
def command(store: str | None, quick: bool, as_json: bool) -> int:
    """Report what works on this machine and medium, what is slow, and what to do.

    Examines torch, the kernels, the processor, memory, the file system, O_DIRECT, fsync, the disk's speed, persistent
    memory, credentials, the clock, and the log of STORE. For this it writes up to 512 MiB into the folder of STORE (or
    the working folder; in a bucket one object of 8 MiB), and removes it again. Takes some seconds. Exits with 1 if
    something does not work.
    """
    from ckptstore.doctor.examination import examine

    with _phases() as tell:
        diagnosis = examine(store, quick=quick, tell=tell)
    if as_json:
        emit(_json(diagnosis))
    else:
        _print(diagnosis)
    return 0 if diagnosis.ok else 1


@contextmanager
def _phases() -> Iterator[Callable[[str], None]]:
    """Show the current examination on one line of stderr, if that is a terminal."""
    shown = sys.stderr.isatty()
    try:
        yield lambda what: over(f"examining: {what}") if shown else None
    finally:
        if shown:
            over("")


def _json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "ok": diagnosis.ok,
        "place": diagnosis.place,
        "quick": diagnosis.quick,
        "seconds": diagnosis.seconds,
        "findings": [
            {
                "group": finding.group,
                "name": finding.name,
                "verdict": finding.verdict,
                "what": finding.what,
                "do": finding.do,
                "values": dict(finding.values),
            }
            for finding in diagnosis.findings
        ],
    }


def _print(diagnosis: Diagnosis) -> None:
    wrong = [finding.name for finding in diagnosis.findings if finding.verdict == "fails"]
    slow = [finding.name for finding in diagnosis.findings if finding.verdict in ("slow", "careful")]
    if wrong:
        click.echo(click.style(f"does not work: {', '.join(wrong)}", fg="red", bold=True))
    elif slow:
        click.echo(f"everything works; see {', '.join(slow)}")
    else:
        click.echo(click.style("everything works", fg="green", bold=True))
    width = max(len(finding.name) for finding in diagnosis.findings)
    columns = min(120, _columns()) if sys.stdout.isatty() else None
    group = ""
    for finding in diagnosis.findings:
        if finding.group != group:
            group = finding.group
            click.echo(click.style(group if group != "medium" else f"medium ({diagnosis.place})", bold=True))
        _line(finding, width, columns)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _line(finding: Finding, width: int, columns: int | None) -> None:
    verdict = click.style(f"{finding.verdict:7}", fg=_COLOURS[finding.verdict])
    indent = " " * (2 + width + 2 + 7 + 2)

    def wrapped(text: str) -> str:
        if columns is None or columns < len(indent) + 30:
            return printable(text)
        return f"\n{indent}".join(textwrap.wrap(printable(text), columns - len(indent), break_long_words=False))

    click.echo(f"  {finding.name:{width}}  {verdict}  {wrapped(finding.what)}")
    if finding.do is not None:
        click.echo(f"{indent}{wrapped(f'-> {finding.do}')}")
