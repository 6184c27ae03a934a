"""``python -m tools.site.options docs/cli-options.md``: the page of every command's options.

All of it is what ``--help`` says. docs/cli.md says what ``--help`` does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from tools.site.manuals import commands

__all__ = ["options_page"]

_HEAD: Final = """# Options of every command

What `ckpt COMMAND --help` says. [The command](cli.md) says what each command is for, and shows what it prints.
`python -m tools.site.options docs/cli-options.md` writes this page.

Every command also has `--json` (one JSON document instead of text), `--debug` (the traceback of an error) and `--help`.
"""
_OBEYED: Final = re.compile(r"[*]|(?<!\w)_|_(?!\w)")
_SHARED: Final = frozenset({"--json", "--debug", "--help"})


def options_page() -> str:
    """The text of docs/cli-options.md."""
    parts = [_HEAD]
    for command, context in commands():
        if not isinstance(command, click.Group):
            parts += _section(command, context)
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context))).strip()
    yield f"## {context.command_path}\n"
    yield f"```text\n{usage}\n```\n"
    yield from _paragraphs(command.help or "")
    rows = []
    for option in command.get_params(context):
        if not isinstance(option, click.Option) or not _SHARED.isdisjoint(option.opts):
            continue
        if (record := option.get_help_record(context)) is not None:
            rows.append(f"| `{_cell(record[0])}` | {_cell(_prose(record[1]))} |")
    if rows:
        yield "\n".join(["| option | what it does |", "|---|---|", *rows]) + "\n"
    yield from _examples(command.epilog or "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> str:
    """Text with what Markdown would obey escaped, outside of code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [_OBEYED.sub(r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs as click takes them: after a line ``\\b`` the lines stay as they are."""
    for paragraph in cleandoc(text).replace("\f", "").split("\n\n"):
        if "\b" in paragraph:
            yield f"```text\n{_lines(paragraph)}\n```\n"
        elif paragraph.strip():
            yield f"{_prose(paragraph)}\n"


def _examples(epilog: str) -> Iterator[str]:
    for paragraph in cleandoc(epilog).split("\n\n"):
        lines = _lines(paragraph).removeprefix("Examples:\n")
        if lines:
            yield "```sh\n" + cleandoc(re.sub(r" \\\n +", " ", f"\n{lines}")) + "\n```\n"


def _lines(paragraph: str) -> str:
    return paragraph.replace("\b\n", "").replace("\b", "").strip("\n")


@click.command()
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False))
def main(page: Path) -> None:
    """Write the page of options to PAGE."""
    page.write_text(options_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
