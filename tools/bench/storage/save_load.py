"""Save and load against torch.save, safetensors, DCP and the raw disk: ``python -m tools.bench.storage.save_load``.

Every measurement runs in a separate process (`worker`); a round measures every case once, the next round in a rotated
order, so that drift of the machine affects all alike. `docs/benchmarks.md` explains the measurements.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.bench import machine
from tools.bench.measure import Ballast
from tools.bench.storage import chart, report
from tools.bench.storage.rounds import CASES, SEED, Bench, Case, Results, measure_once

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of ``500MB``, ``64MiB`` or a plain number.

    Raises:
        click.BadParameter: not a number with one of the units KB MB GB KiB MiB GiB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size like 500MB or 64MiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _selected(patterns: Sequence[str]) -> list[Case]:
    chosen = [case for case in CASES if not patterns or any(fnmatch.fnmatch(case.name, each) for each in patterns)]
    if not chosen:
        names = ", ".join(case.name for case in CASES)
        raise click.BadParameter(f"nothing matches; the cases are {names}", param_hint="--only")
    return chosen


EXAMPLE = """\b
Examples:
  python -m tools.bench.storage.save_load --size 500MB --rounds 5 --out bench-out/
  python -m tools.bench.storage.save_load --size 64MB --rounds 1 --only 'save/*' --only 'cold/ckptstore*'
"""


@click.command(epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--size", default="500MB", show_default=True, help="Weights and two moments together, in bytes.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Measurements of each case.")
@click.option(
    "--out", default=Path("bench-out"), show_default=True, type=click.Path(path_type=Path), help="For results."
)
@click.option("--dir", "parent", type=click.Path(path_type=Path), help="Where to write states; default: --out.")
@click.option("--only", multiple=True, metavar="GLOB", help="Cases to run, as 'save/torch' or 'cold/*'; repeatable.")
@click.option("--settle/--no-settle", default=True, show_default=True, help="Touch memory before each measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def main(
    size: str, rounds: int, out: Path, parent: Path | None, only: tuple[str, ...], settle: bool, as_json: bool
) -> None:
    """Compare saving and loading with torch.save, safetensors, DCP and the raw disk.

    Writes save_load.json and save_load.png into --out. Needs about 12 times --size on disk while it runs.
    """
    nbytes = parse_size(size)
    results = Results({case: [] for case in _selected(only)}, {})
    for folder in (out, parent or out):
        folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)  # a log file is wide enough for whole tables
    with _scratch(parent or out) as scratch:
        described = machine.describe(scratch)
        bench = Bench(nbytes, scratch, Ballast(int(2.5 * nbytes) + (1 << 30) if settle else 0))
        _run(bench, rounds, results, console)
    rows = results.rows()
    settings = {"size": nbytes, "rounds": rounds, "seed": SEED, "settle": settle}
    document = {"benchmark": "save_load", "machine": described, "settings": settings, "results": report.as_json(rows)}
    (out / "save_load.json").write_text(json.dumps(document, indent=1) + "\n")
    title = f"{size} of fp32 weights and moments, {described['cores']} cores, {described['filesystem']}"
    chart.draw(rows, title, out / "save_load.png")
    if as_json:
        click.echo(json.dumps(document))
    else:
        console.print(f"[bold]{title}[/bold], {described['cpu']}, medians of {rounds}")
        report.show(console, rows)
        console.print(f"wrote {out}/save_load.json and {out}/save_load.png", highlight=False)
    if results.errors:
        sys.exit(1)


def _run(bench: Bench, rounds: int, results: Results, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("expected hashes", total=rounds * len(results.samples))
        bench.worker("expect", "state", bench.scratch)
        for turn in range(rounds):

            def begun(name: str, turn: int = turn) -> None:
                progress.update(bar, description=f"round {turn + 1}/{rounds} {name:30}", advance=1)

            # Each round begins with another case, so that no case always follows the same quiet or busy moment.
            measure_once(results, 7 * turn, bench, begun)


if __name__ == "__main__":
    main()
