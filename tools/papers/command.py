"""The command: runs experiments, prints their tables, and writes NAME.json and NAME.png into ``--out``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from tools.bench import machine
from tools.papers import registry, report
from tools.papers.picture import draw
from tools.papers.registry import Experiment, chosen
from tools.papers.result import Asked, Result

__all__ = ["main", "measured"]

EXAMPLE: Final = """\b
Examples:
  python -m tools.papers --list
  python -m tools.papers lowdiff-7
  python -m tools.papers all --quick --out bench-out/papers
  python -m tools.papers 'xor-*' --quick --json
"""


def measured(experiment: Experiment, asked: Asked) -> tuple[Result, dict[str, Any]]:
    """Run an experiment -> its result, and the document of its JSON file."""
    described = machine.describe(asked.scratch)
    before = machine.busy_cores()
    began = time.monotonic()
    result = experiment.run(asked)
    took = time.monotonic() - began
    busy = max(before, machine.busy_cores())  # nothing of the experiment computes any more
    document = {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "figure": experiment.figure,
        "title": experiment.title,
        "quick": asked.quick,
        "smoke": asked.smoke,
        "seed": asked.seed,
        "seconds": took,
        "machine": described | {"busy_cores": busy},
        "result": result.document(),
    }
    return result, document


@click.command(help=__doc__, epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.argument("names", nargs=-1, metavar="NAME|all...")
@click.option("--quick", is_flag=True, help="The short form: about a minute or less each on two cores.")
@click.option("--smoke", is_flag=True, help="Only see that they run: tiny models, numbers that mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the documents as one JSON array instead of tables.")
@click.option("--out", default=Path("bench-out/papers"), show_default=True, type=click.Path(path_type=Path))
@click.option("--dir", "parent", type=click.Path(path_type=Path), help="Where to write checkpoints; default: --out.")
@click.option("--seed", default=1, show_default=True, help="Of models, data and times of failures.")
@click.option("--list", "listing", is_flag=True, help="Print the experiments, and about how long --quick takes.")
def main(names: tuple[str, ...], out: Path, parent: Path | None, as_json: bool, listing: bool, **asked: Any) -> None:
    """Run the command: see the module."""
    if listing:
        for one in registry.EXPERIMENTS:
            click.echo(f"{one.name:16}{one.paper:12}{one.figure:22}{one.quick_seconds:4} s  {one.title}")
        return
    try:
        wanted = chosen(names)
    except KeyError as error:
        raise click.UsageError(f"no experiment is called {error}; --list prints them") from None
    if not wanted:
        raise click.UsageError("name an experiment, or all; --list prints them")
    # Before anything imports torch: half of the cores train, as in the processes of `tools.bench.training`.
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)
    for folder in (out, parent or out):
        folder.mkdir(parents=True, exist_ok=True)
    documents, failed = [], []
    for experiment in wanted:
        console.rule(f"{experiment.name}: {experiment.heading}", align="left")
        try:
            result, document = _one(experiment, (parent or out).resolve(), console, asked)
        except Exception:  # noqa: BLE001  # the other experiments still run; the command fails in the end
            traceback.print_exc()
            failed.append(f"{experiment.name} failed")
            continue
        documents.append(document)
        failed += [f"{experiment.name}: {one}" for one in result.failed]
        (out / f"{experiment.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        draw(result.figures, experiment.heading, out / f"{experiment.name}.png")
        if not as_json:
            report.show(console, result)
        console.print(report.machine_line(document["machine"]), highlight=False)
        console.print(f"{document['seconds']:.1f} s; {out / experiment.name}.json, .png", highlight=False)
    if as_json:
        click.echo(json.dumps(documents))
    if failed:
        console.print("\n".join(failed), style="red", highlight=False, markup=False)
        sys.exit(1)


def _one(
    experiment: Experiment, parent: Path, console: Console, asked: dict[str, Any]
) -> tuple[Result, dict[str, Any]]:
    """Run one in a scratch folder of its own."""
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent))  # processes start in other folders
    before = os.environ.get("CKPTSTORE_RUNTIME_DIR")
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(scratch / "runtime")  # agents of this run, not those of the user

    def told(line: str) -> None:
        console.print(line, style="dim", highlight=False, markup=False)

    try:
        return measured(experiment, Asked(scratch=scratch, told=told, **asked))
    finally:
        if before is None:
            del os.environ["CKPTSTORE_RUNTIME_DIR"]
        else:
            os.environ["CKPTSTORE_RUNTIME_DIR"] = before
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
