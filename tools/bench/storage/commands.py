"""Times the command's start and listing, and the opening of a store as it ages.

    python -m tools.bench.storage.commands

Three questions. How long does ``ckpt --help`` take compared with ``python -c "import click, rich"``, which it needs?
How long does ``ckpt log`` take on 1,000 checkpoints? How many objects does opening a store read after 100, 1,000 and
5,000 commits (folds bound the number; between two folds it rises by one a commit, so the most of many samples counts)?
Processes are interleaved; medians and quartiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ckptstore.store import Store
from ckptstore.store import open as open_store
from tools.bench import machine
from tools.bench.storage.report import median, quartiles

AGES = (100, 1_000, 5_000)
CHECKPOINTS = 1_000

_CKPT = [sys.executable, "-c", "from ckptstore.cli.main import main; main()"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall seconds of one command line, one entry per run."""

    label: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Age:
    """Reads when opening a store of about `commits` commits: samples while it grew by its last fifth."""

    commits: int
    objects: int
    """Most objects fetched by one READ of the log."""
    seconds: float
    """Median time of a READ; in memory, so only parsing and folding."""


def ckpt() -> list[str]:
    """The installed command, as a user runs it; its module if the script is not installed."""
    script = Path(sys.executable).with_name("ckpt")
    return [str(script)] if script.exists() else _CKPT


def run_interleaved(commands: dict[str, Sequence[str]], runs: int) -> list[Timing]:
    """Run every command `runs` times in turn, after one uncounted run of each.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    seconds: dict[str, list[float]] = {label: [] for label in commands}
    for turn in range(runs + 1):
        for label, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if turn:
                seconds[label].append(time.perf_counter() - started)
    return [Timing(label, tuple(values)) for label, values in seconds.items()]


def fill(store: Store, checkpoints: int) -> Iterator[int]:
    """Commit tiny checkpoints, steps 1, 2, 3 ..., each in its own commit; yields each step once it is durable."""
    with store.writer(parent=None, poll_seconds=None) as writer:
        for step in range(1, checkpoints + 1):
            writer.save({"loss": 1.0 / step, "lr": 1e-3}, step=step)
            yield step


def open_at_age(commits: int, samples: int = 40) -> Age:
    """Commit `commits` times to a store in memory, and READ it now and then during the last fifth."""
    store = open_store(f"memory://bench-{commits}")
    begin = commits - max(1, commits // 5)
    stride = max(1, (commits - begin) // samples)
    objects, seconds = [], []
    for step in fill(store, commits):
        if step > begin and (step - begin) % stride == 0:
            started = time.perf_counter()
            view = store.view()
            seconds.append(time.perf_counter() - started)
            objects.append(view.reads)
    return Age(commits, max(objects), median(seconds))


def _show(console: Console, timings: Sequence[Timing], ages: Sequence[Age]) -> None:
    table = Table(title="Commands, wall time of the whole process", title_justify="left")
    for column in ("command", "median s", "quartiles"):
        table.add_column(column, justify="left" if column == "command" else "right", no_wrap=True)
    for timing in timings:
        low, high = quartiles(timing.seconds)
        table.add_row(timing.label, f"{median(timing.seconds):.3f}", f"{low:.3f}-{high:.3f}")
    console.print(table)
    table = Table(title="Opening a store: READ of its log", title_justify="left")
    for column in ("commits", "objects read, at most", "median ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for age in ages:
        table.add_row(f"{age.commits:,}", str(age.objects), f"{age.seconds * 1e3:.1f}")
    console.print(table)


EXAMPLE = """\b
Example:
  python -m tools.bench.storage.commands --runs 15 --out bench-out/
"""


@click.command(epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--runs", default=15, show_default=True, type=click.IntRange(min=1), help="Runs of each command.")
@click.option("--checkpoints", default=CHECKPOINTS, show_default=True, help="Size of the store that is listed.")
@click.option("--age", "ages", multiple=True, type=int, help=f"Commits of a store to open; default: {AGES}.")
@click.option(
    "--out", default=Path("bench-out"), show_default=True, type=click.Path(path_type=Path), help="For results."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def main(runs: int, checkpoints: int, ages: tuple[int, ...], out: Path, as_json: bool) -> None:
    """Time the command's start, its listing of a long run, and opening a store of growing age.

    Writes commands.json into --out.
    """
    console = Console(stderr=as_json)
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="scratch-", dir=out) as scratch,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("filling a store", total=2 + len(ages or AGES))
        for _ in fill(open_store(Path(scratch) / "store"), checkpoints):
            pass
        progress.update(task, description="running commands", advance=1)
        log = f"ckpt log, {checkpoints:,} checkpoints"
        commands: dict[str, Sequence[str]] = {
            "python -c pass": [sys.executable, "-c", "pass"],
            'python -c "import click, rich"': [sys.executable, "-c", "import click, rich"],
            "ckpt --help": [*ckpt(), "--help"],
            log: [*ckpt(), "log", str(Path(scratch) / "store")],
            f"{log}, --json": [*ckpt(), "log", str(Path(scratch) / "store"), "--json"],
        }
        timings = run_interleaved(commands, runs)
        opened = []
        for commits in ages or AGES:
            progress.update(task, description=f"opening after {commits} commits", advance=1)
            opened.append(open_at_age(commits))
        described = machine.describe(Path(scratch))
    medians = {timing.label: median(timing.seconds) for timing in timings}
    document = {
        "benchmark": "commands",
        "machine": described,
        "settings": {"runs": runs, "checkpoints": checkpoints},
        "commands": [{"label": t.label, "median": medians[t.label], "seconds": t.seconds} for t in timings],
        "help_over_imports": medians["ckpt --help"] / medians['python -c "import click, rich"'],
        "opening": [{"commits": age.commits, "objects": age.objects, "seconds": age.seconds} for age in opened],
    }
    (out / "commands.json").write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(console, timings, opened)
        console.print(f"ckpt --help / (import click, rich): {document['help_over_imports']:.2f}x", highlight=False)
        console.print(f"wrote {out}/commands.json", highlight=False)


if __name__ == "__main__":
    main()
