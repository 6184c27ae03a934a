"""Tables for ``docs/benchmarks.md``: ``python -m tools.bench.storage.markdown bench-out/save_load.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

_TITLES = {"save": "Save", "cold": "Cold load, every byte touched", "warm": "Warm load, every byte touched"}
_SAVE = ("", "durable s (quartiles)", "/ raw", "/ safetensors", "stall s", "loop loss s", "CPU s", "peak +MB")
_LOAD = ("", "ready s (quartiles)", "/ raw", "/ safetensors", "call s", "CPU s", "peak +MB")


def _number(value: float | None, text: str, suffix: str = "") -> str:
    return "" if value is None else format(value, text) + suffix


def _cells(entry: Mapping[str, Any]) -> list[str]:
    if "samples" not in entry:
        return [entry["label"], "failed"]
    middle, (low, high) = entry["median"], entry["seconds_quartiles"]
    cells = [
        entry["label"],
        f"{middle['seconds']:.3f} ({low:.3f}-{high:.3f})",
        _number(entry["over_raw"], ".2f", "x"),
        _number(entry["over_safetensors"], ".2f", "x"),
    ]
    if entry["phase"] == "save":
        cells += [_number(middle["stall_s"], ".3f"), _number(middle.get("loop_loss_s"), ".3f")]
    else:
        cells += [_number(middle["load_s"], ".3f")]
    return [*cells, _number(middle["cpu_s"], ".2f"), _number(middle["peak_rss"] / 1e6, ".0f")]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: the machine, then one table for each phase."""
    machine, settings = document["machine"], document["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    yield (
        f"{settings['size'] / 1e6:.0f} MB, {settings['rounds']} rounds; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, {machine['filesystem']}; "
        f"Python {machine['python']}, {versions}."
    )
    for phase, columns in (("save", _SAVE), ("cold", _LOAD), ("warm", _LOAD)):
        rows = [_cells(entry) for entry in document["results"] if entry["phase"] == phase]
        if rows:
            yield from ("", f"### {_TITLES[phase]}", "", _line(columns), _line(["---"] + ["---:"] * (len(columns) - 1)))
            yield from (_line([*row, *[""] * (len(columns) - len(row))]) for row in rows)


@click.command()
@click.argument("report", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(report: Path) -> None:
    """Print a run of save_load as Markdown."""
    for line in tables(json.loads(report.read_text())):
        click.echo(line)


if __name__ == "__main__":
    main()
