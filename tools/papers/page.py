"""``python -m tools.papers.page OUT docs/papers.md``: the results in OUT, as the second part of the page.

The first part, up to the mark, is prose and stays. An experiment whose JSON is not in OUT keeps its present section.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from tools.papers import registry, report
from tools.papers.result import Result

__all__ = ["MARK", "main", "section"]

MARK: Final = "<!-- Below this line python -m tools.papers.page writes. -->"


def section(document: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one experiment."""
    form = " --quick" if document["quick"] else ""
    yield f"### {document['title']} (`{document['experiment']}`)"
    yield ""
    busy = document["machine"]["busy_cores"]
    loaded = (
        f" **The machine was busy** (other processes took {busy:.1f} cores): the times are not final."
        if busy > BUSY
        else ""
    )
    yield (
        f"{document['paper']}, {document['figure']}. `python -m tools.papers {document['experiment']}{form}`, "
        f"{document['seconds']:.0f} s.{loaded}"
    )
    yield ""
    yield from report.markdown(Result.read(document["result"]))


BUSY: Final = 0.2
"""Cores that compute before or after an experiment, above which it was not on an idle machine."""


def _sections(text: str) -> dict[str, str]:
    """The sections that are on the page, by experiment."""
    parts = re.split(r"^(?=### .*\(`[\w.-]+`\)$)", text.partition(MARK)[2], flags=re.MULTILINE)
    found = {}
    for part in parts[1:]:
        name = re.search(r"\(`([\w.-]+)`\)", part)
        assert name is not None
        found[name[1]] = re.split(r"^## ", part, flags=re.MULTILINE)[0].strip()
    return found


@click.command(help=__doc__)
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(out: Path, target: Path) -> None:
    """Run the command: see the module."""
    text = target.read_text(encoding="utf-8")
    if MARK not in text:
        raise click.ClickException(f"{target} has no line {MARK}")
    sections = _sections(text)
    machines = set()
    for one in registry.EXPERIMENTS:
        path = out / f"{one.name}.json"
        if path.exists():
            document = json.loads(path.read_text())
            if document.get("smoke"):
                raise click.ClickException(f"{path} is of --smoke: its numbers mean nothing")
            sections[one.name] = "\n".join(section(document)).strip()
            machines.add(_plain_machine(document["machine"]))
    lines = [text.partition(MARK)[0].rstrip(), "", MARK, ""]
    if machines:
        lines += [f"Measured on {' and on '.join(sorted(machines))}.", ""]
    paper = None
    for one in registry.EXPERIMENTS:
        if one.paper != paper:
            paper = one.paper
            lines += [f"## {paper}", ""]
        lines += [sections.get(one.name, f"### {one.title} (`{one.name}`)\n\n{one.figure}. Not measured yet."), ""]
    target.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _plain_machine(machine: Mapping[str, Any]) -> str:
    return report.machine_line(machine).partition("; other")[0]


if __name__ == "__main__":
    main()
