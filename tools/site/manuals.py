"""The man pages of the command, one for each subcommand, from what ``--help`` says.

Not by click-man: it sees no command that is imported when it is called, leaves the examples out, and takes a line that
begins with a dot for an order to the formatter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from ckptstore.cli.main import cli

__all__ = ["commands", "page", "pages", "write"]

_SEE: Final = "docs/cli.md of the repository says more, and docs/json.md describes what --json prints."


def write(target: Path, version: str) -> list[Path]:
    """Write ``ckpt.1``, ``ckpt-log.1``, ... into `target` -> their paths. Older ones there go."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("ckpt*.1"):
        old.unlink()
    written = []
    for name, text in pages(version):
        written.append(target / f"{name}.1")
        written[-1].write_text(text)
    return written


def pages(version: str) -> Iterator[tuple[str, str]]:
    """Name and text of every page: the command, its subcommands, and theirs."""
    for command, context in commands():
        yield context.command_path.replace(" ", "-"), page(command, context, version)


def commands() -> Iterator[tuple[click.Command, click.Context]]:
    """Every command with its context: ``ckpt`` first, each group before its subcommands."""

    def below(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
        yield command, context
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None, name
                yield from below(found, click.Context(found, info_name=name, parent=context))

    return below(cli, click.Context(cli, info_name="ckpt"))


def page(command: click.Command, context: click.Context, version: str) -> str:
    """One page in roff's macros for manuals (man(7))."""
    path, name = context.command_path, context.command_path.replace(" ", "-")
    first, _, rest = cleandoc(command.help or "").replace("\f", "").partition("\n\n")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        f'.TH "{name.upper()}" 1 "{today}" "ckptstore {version}" "ckptstore"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(first.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(f"{first}\n\n{rest}"),
    ]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None, below
            lines += [".TP", f".BR {_text(f'{name}-{below}')} (1)", _text(found.get_short_help_str(300))]
    lines.append(".SH OPTIONS")
    for option in command.get_params(context):
        if isinstance(option, click.Option) and (record := option.get_help_record(context)) is not None:
            lines += [".TP", f".B {_text(record[0])}", _text(record[1])]
    if command.epilog:
        lines += [".SH EXAMPLES AND NOTES", *_paragraphs(command.epilog)]
    lines += [".SH SEE ALSO"]
    if context.parent is not None:
        lines += [f".BR {_text(context.parent.command_path.replace(' ', '-'))} (1)", ".PP"]
    return "\n".join([*lines, _text(_SEE)]) + "\n"


def _text(text: str) -> str:
    """Words that the formatter obeys in nothing."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs as click takes them: after a line ``\\b`` the lines stay as they are."""
    for paragraph in cleandoc(text).split("\n\n"):
        if not paragraph.strip():
            continue
        if "\b" not in paragraph:
            yield from (".PP", _text(paragraph))
            continue
        yield from (".PP", ".nf")
        for line in paragraph.replace("\b\n", "").replace("\b", "").splitlines():
            indent = len(line) - len(line.lstrip())
            yield (
                "\\ " * indent + _text(line).replace("  ", " ")
                if not indent
                else "\\&" + "\\ " * indent + _aligned(line)
            )
        yield ".fi"


def _aligned(line: str) -> str:
    """A line whose spaces count."""
    return line.strip().replace("\\", "\\e").replace("-", "\\-")
