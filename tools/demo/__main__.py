"""``python -m tools.demo [--quick]``: exit 0 if the killed run ends with the reference's bits, else 1."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from ckptstore import CkptError
from tools.demo import report
from tools.demo.config import FULL, QUICK, Mode
from tools.demo.corpus import CorpusError
from tools.demo.demo import Demo
from tools.demo.output import OutputFolder
from tools.demo.supervisor import DemoError


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="The short form for CI: under 40 s on two cores.")
@click.option("--mode", type=click.Choice(["save", "save_async", "both"]), default="both", show_default=True,
              help="How the trainer checkpoints; both alternates from term to term.")  # fmt: skip
@click.option("--steps", type=int, help="Optimizer steps.")
@click.option("--kills", type=int, help="SIGKILLs, half of them inside a commit.")
@click.option("--seed", type=int, default=FULL.seed, show_default=True, help="Decides the training and the kills.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-out"), show_default=True,
              help="Folder for the store, the picture and the numbers.")  # fmt: skip
def main(quick: bool, mode: Mode, steps: int | None, kills: int | None, seed: int, out: Path) -> None:
    """Run the demo and exit with its verdict."""
    base = QUICK if quick else FULL
    count = base.kills if kills is None else kills
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = OutputFolder(out)
    in_commit = max(count // 2, min(count, 1))
    try:
        config = replace(base, mode=mode, seed=seed, steps=steps or base.steps, kills=count, kills_in_commit=in_commit)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        outcome = Demo(config, folder, console).run()
    except (DemoError, CorpusError, CkptError) as error:
        raise click.ClickException(str(error)) from error
    report.conclude(console, outcome, folder)
    sys.exit(1 if outcome.failures() else 0)


if __name__ == "__main__":
    main()
