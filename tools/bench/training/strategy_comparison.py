"""Checkpoint strategies in a real training loop: ``python -m tools.bench.training``.

For each strategy and interval: the slowdown of training relative to no saves, the loop's stall per save, the time until
a save is durable, peak memory, bytes, and steps lost to a SIGKILL. Every measurement is a separate process
(`training_worker`); a round measures every case once, the next one in a rotated order; medians count. Every restored
state is compared bit by bit with the trained one.
"""

from __future__ import annotations

import fnmatch
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ckptstore.errors import UsageError
from ckptstore.tuning.quantity_units import seconds as parse_seconds
from tools.bench import machine
from tools.bench.training import training_report
from tools.bench.training.training_cases import STRATEGIES, Case, Plan, Results, run_round

INTERVALS: Final = (1, 10, 50, 100)
GRID: Final = ((10, 20, 50, 100), (1, 2, 3, 4, 5, 6))
"""Rows and columns of LowDiff's Table I."""
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

LABELS: Final = {
    "none": "none",
    "torch.save": "torch.save + fsync",
    "dcp-async": "DCP async_save",
    "checkfreq": "CheckFreq-like",
    "naive-diff": "naive differences",
    "ckptstore-1": "ckptstore, 1 in flight",
    "ckptstore-2": "ckptstore, 2 in flight",
    "ckptstore-4": "ckptstore, 4 in flight",
    "layer-host": "ckptstore layer-wise, host",
    "layer-device": "ckptstore layer-wise, device",
    "layer-direct": "ckptstore layer-wise, direct",
    "gradient-diffs": "ckptstore step diffs",
}


def numbers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``1,10,100`` as an option."""
    return None if value is None else _numbers(value)


def _numbers(value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r}: write whole numbers from 1 on, as in 1,10,100")
    return found


def duration(_ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """``30min`` as seconds."""
    try:
        return None if value is None else parse_seconds(value)
    except UsageError as error:
        raise click.BadParameter(str(error), param=param) from None


def parameters(_ctx: click.Context, param: click.Parameter, value: str) -> int:
    """``25M``, ``300K``."""
    unit = value[-1:].upper()
    try:
        return int(float(value[:-1]) * _UNITS[unit]) if unit in _UNITS else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}: write a number as in 25M or 300K", param=param) from None


def cases(intervals: Sequence[int], grid: tuple[Sequence[int], Sequence[int]], only: Sequence[str]) -> list[Case]:
    """Every case, or those that a pattern names. Raises `click.BadParameter` if none is left."""
    found = [Case("loop", strategy, interval) for interval in intervals for strategy in STRATEGIES]
    found += [Case("kill", strategy, interval) for interval in intervals for strategy in STRATEGIES]
    found += [Case("table", "none", 1)]
    found += [Case("table", "gradient-diffs", interval, batch) for interval in grid[0] for batch in grid[1]]
    chosen = [case for case in found if not only or any(fnmatch.fnmatch(case.name, each) for each in only)]
    if not chosen:
        names = ", ".join(case.name for case in found)
        raise click.BadParameter(f"nothing matches; the cases are {names}", param_hint="--only")
    return chosen


def shape_of(count: int) -> tuple[int, int]:
    """(width, layers): see `training_loop.Shape.of`, which imports torch."""
    layers = 6 if count >= 1_000_000 else 2
    return max(32, round((count / (12 * layers)) ** 0.5 / 32) * 32), layers


EXAMPLE = """\b
Examples:
  python -m tools.bench.training --parameters 25M --rounds 3
  python -m tools.bench.training --only 'loop/*' --intervals 1,10 --rounds 1
  python -m tools.bench.training --only 'kill/ckptstore-*' --only 'table/*'
  python -m tools.bench.training --quick
"""


@click.command(epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--parameters", "count", default="25M", show_default=True, callback=parameters, help="Of the model.")
@click.option("--tokens", default=(2, 64), show_default=True, type=int, nargs=2, help="Batch and context of a step.")
@click.option("--intervals", callback=numbers, metavar="F,F...", help="Iterations between saves; default: 1,10,50,100.")
@click.option("--grid", nargs=2, type=str, metavar="1/F,... B,...", help="Rows and columns of the table of (1/f, b).")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(1), help="Measured steps, at least.")
@click.option("--full-every", default=100, show_default=True, type=click.IntRange(1), help="Fulls among differences.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Measurements and kills of each.")
@click.option("--limit", callback=duration, metavar="TIME", help="Begin nothing after this time, as 5min.")
@click.option("--mtbf", callback=duration, default="30min", show_default=True, help="M of the wasted time.")
@click.option("--only", multiple=True, metavar="GLOB", help="Cases, as 'loop/torch.save/10' or 'kill/*'; repeatable.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--pin/--no-pin", "pinned", default=True, show_default=True, help="Other cores for saving than for training."
)
@click.option("--quick", is_flag=True, help="Smoke test: a tiny model and few steps.")
@click.option("--out", default=Path("bench-out"), show_default=True, type=click.Path(path_type=Path))
@click.option("--dir", "parent", type=click.Path(path_type=Path), help="Where to write checkpoints; default: --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def main(
    out: Path, parent: Path | None, rounds: int, quick: bool, as_json: bool, only: tuple[str, ...], **asked: Any
) -> None:
    """Compare ways to checkpoint in a training loop.

    Writes training.json, training.png and training_table.png into --out.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)
    rows, columns = (_numbers(part) for part in asked["grid"]) if asked["grid"] else GRID
    intervals = asked["intervals"] or INTERVALS
    if quick:
        intervals, rows, columns, rounds = asked["intervals"] or (2,), (4,), (1, 2), 1
    results = Results({case: [] for case in cases(intervals, (rows, columns), only)})
    for folder in (out, parent or out):
        folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent or out))
    try:
        plan = _plan(asked, quick, scratch)
        _check_space(plan, results, scratch)
        described = machine.describe(scratch)
        _run(plan, results, rounds, console, asked["limit"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tables = training_report.Tables(results, asked["mtbf"])
    pinning = next((one["pinning"] for some in results.samples.values() for one in some if "pinning" in one), "")
    settings = {
        **{name: getattr(plan, name) for name in ("width", "layers", "batch", "context", "steps", "full_every")},
        "device": plan.device,
        "rounds": rounds,
        "mtbf": tables.mtbf,
        "pinning": pinning,
    }
    document = {"benchmark": "training", "machine": described, "settings": settings, "results": tables.document()}
    (out / "training.json").write_text(json.dumps(document, indent=1) + "\n")
    title = f"{_state_bytes(plan) / 1e6:.0f} MB of state, {plan.device}, {described['filesystem']}"
    drawn = training_report.draw(tables, LABELS, title, out)
    if as_json:
        click.echo(json.dumps(document))
    else:
        console.print(f"[bold]{title}[/bold], {described['cpu']}, {described['cores']} cores, medians of {rounds}")
        console.print(pinning, highlight=False)
        console.print(_REMARK, highlight=False)
        training_report.show(console, tables, LABELS)
        console.print(f"wrote {', '.join(str(path) for path in [out / 'training.json', *drawn])}", highlight=False)
    if results.errors:
        sys.exit(1)


_REMARK: Final = (
    "slowdown: an iteration over one of 'none' in the same round; CPU: of the training thread alone; stall: what the "
    "loop stood still for one interval; durable: from the call until files and folder are synced; on a GPU this "
    "benchmark never ran"
)


def _plan(asked: dict[str, Any], quick: bool, scratch: Path) -> Plan:
    width, layers = shape_of(100_000 if quick else asked["count"])
    batch, context = asked["tokens"]
    device = asked["device"]
    if device == "auto":
        device = "cuda" if _has_cuda() else "cpu"
    plan = Plan(width, layers, batch, context, asked["steps"], asked["full_every"], device, asked["pinned"], scratch)
    return replace(plan, context=32, steps=6, full_every=4) if quick else plan


def _has_cuda() -> bool:
    """Without torch in this process: whether the driver has made a device."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _state_bytes(plan: Plan) -> int:
    return 12 * (12 * plan.layers * plan.width**2 + (256 + plan.context) * plan.width)


def _check_space(plan: Plan, results: Results, scratch: Path) -> None:
    """Raise `click.ClickException` if the largest case does not fit: every checkpoint of a process is kept."""
    saves = [
        (plan.measured_steps(case) // case.interval if case.kind == "loop" else 4 * case.interval + 16) + 4
        for case in results.samples
    ]
    needed, free = max(saves, default=0) * _state_bytes(plan), shutil.disk_usage(scratch).free
    if needed > free:
        raise click.ClickException(f"{needed / 1e9:.1f} GB are needed for checkpoints, {free / 1e9:.1f} GB are free")


def _run(plan: Plan, results: Results, rounds: int, console: Console, limit: float | None) -> None:
    end = math.inf if limit is None else time.monotonic() + limit
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=rounds * len(results.samples))
        for turn in range(rounds):

            def begun(name: str, turn: int = turn) -> None:
                progress.update(bar, description=f"round {turn + 1}/{rounds} {name:32}", advance=1)

            run_round(plan, results, turn, begun, end)
    if left := sum(len(samples) < rounds for samples in results.samples.values() if time.monotonic() >= end):
        console.print(f"the time was up: {left} cases have fewer than {rounds} measurements", highlight=False)


if __name__ == "__main__":
    main()
