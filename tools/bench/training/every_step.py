"""Measures the cost of saving after every step, and the recovery time of a killed trainer.

``python -m tools.bench.training.every_step`` takes ten minutes on an idle machine.

The demo's language model in the loop of `training`, with trainer and savers pinned to separate cores; every case is a
separate process, and rounds are interleaved. *Overhead* is the loop's time relative to the same loop without saves in
the same round; strategies that compress gradients (top-k, 0.01) are compared with a loop that compresses them and does
not save. It includes the loop's waits, the computation of the trainer's thread, and the slowdown by the shared bus and
caches.

Where a machine's pace changes from round to round, `every_step_turns` measures differences of a few per cent that this
tool cannot.

*Recovery*: the trainer is killed (SIGKILL) after a step, and another process brings a state to that step again: from
the agent that has survived; from the store, replaying step diffs, if the agent died as well; from the newest full of a
store with a full every 50 steps, half a distance back, training the lost steps again. The result is reported twice:
from where the new trainer has its model to where it has that step; and from the SIGKILL, including the start of the new
process, which is the same in all cases (`every_step_recovery` explains it).

Processes are forked by one that has imported torch (`tools.warm`); with ``--cold`` each imports it itself. Every
restored or recovered state is compared bit by bit with the trained one. A line is printed as soon as a case is
measured, the tables in the end.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from tools.bench import machine
from tools.bench.training.every_step_recovery import RECOVERIES, recovered
from tools.bench.training.strategy_comparison import parameters, shape_of
from tools.bench.training.training_cases import Case, Plan, Results, environment, finished, rotated
from tools.warm import MODULES, Warm

LABELS: Final = {
    "none": "none",
    "dcp-async": "DCP async_save",
    "checkfreq": "CheckFreq-like",
    "ckptstore-2": "ckptstore fulls, 2 in flight",
    "full-agent": "Checkpointer, fulls, agent",
    "dense": "Checkpointer, step diffs",
    "dense-agent": "Checkpointer, step diffs, agent",
    "dense-replica": "Checkpointer, replica",
    "none-topk": "none, gradients compressed",
    "topk": "Checkpointer, top-k step diffs",
    "topk-agent": "Checkpointer, top-k step diffs, agent",
    "topk-replica": "Checkpointer, top-k, replica",
}
DISTANCE: Final = 50
"""Steps between two fulls where lost steps are trained again."""
_QUICK: Final = ("loop/topk-agent", "recover/dense-agent")
_MEGABYTE: Final = 1e6
_PARTS: Final = {
    "restore": "restore_s",
    "train again": "recompute_s",
    "both": "recover_s",
    "from the kill": "from_kill_s",
}
_COLUMNS: Final = (
    *("ms/it", "overhead", "of medians", "CPU ms/it", "stall ms", "worst ms", "durable s", "MB/save", "equal"),
)


def base_of(strategy: str) -> str:
    """The loop without saves that a strategy is compared with."""
    return "none-topk" if "topk" in strategy else "none"


def cases(only: Sequence[str], distance: int) -> list[Case]:
    """Every case, or those that a pattern names (and the loops without saves that they need)."""
    found = [Case("loop", strategy, 1) for strategy in LABELS]
    found += [Case("recover", strategy, distance if strategy == "fulls-50" else 1) for strategy in RECOVERIES]
    chosen = [
        one for one in found if not only or any(fnmatch.fnmatch(f"{one.kind}/{one.strategy}", each) for each in only)
    ]
    if not chosen:
        names = ", ".join(f"{one.kind}/{one.strategy}" for one in found)
        raise click.BadParameter(f"nothing matches; the cases are {names}", param_hint="--only")
    needed = {Case("loop", base_of(one.strategy), 1) for one in chosen if one.kind == "loop"}
    return [one for one in found if one in needed or one in chosen]


def run(plan: Plan, results: Results, rounds: int, distance: int, told: Callable[[str], None]) -> None:
    """Measure every case in every round."""
    for turn in range(rounds):
        for case in rotated(list(results.samples), turn):
            told(f"round {turn + 1}/{rounds} {case.kind}/{case.strategy} ...")
            folder = plan.scratch / "run"
            try:
                if case.kind == "loop":
                    results.take(case, partial(finished, plan, "loop", case, folder))
                else:
                    results.take(case, partial(recovered, plan, case, folder, distance))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            told(line(results, case))


def overheads(results: Results, case: Case, name: str = "iteration_s") -> list[float]:
    """The slowdown of the loop relative to the loop without saves, round by round."""
    plain = results.samples.get(Case("loop", base_of(case.strategy), 1), [])
    return [mine[name] / its[name] - 1 for mine, its in zip(results.samples[case], plain, strict=False)]


def _median(results: Results, case: Case, name: str) -> float | None:
    values = [one[name] for one in results.samples[case] if name in one]
    return statistics.median(values) if values else None


def document(results: Results) -> list[dict[str, Any]]:
    """Every case with its samples and their medians."""
    found: list[dict[str, Any]] = []
    for case, samples in results.samples.items():
        entry: dict[str, Any] = {"kind": case.kind, "strategy": case.strategy, "samples": samples}
        for name, why in (("error", results.errors), ("absent", results.absent)):
            if case in why:
                entry[name] = why[case]
        if samples:
            names = [name for name, value in samples[0].items() if isinstance(value, int | float)]
            entry["median"] = {name: _median(results, case, name) for name in names}
            if case.kind == "loop" and (slowed := overheads(results, case)):
                entry["overhead"] = statistics.median(slowed)
            if case.kind == "recover":
                entry["faster"] = {name: faster(results, case, name) for name in ("recover_s", "from_kill_s")}
        found.append(entry)
    return found


def line(results: Results, case: Case) -> str:
    """The result of the last measurement of a case, or why there is none."""
    samples = results.samples[case]
    if not samples:
        return f"  {results.errors.get(case) or results.absent.get(case)}"
    last = samples[-1]
    if case.kind == "loop":
        return f"  {last['iteration_s'] * 1e3:.1f} ms an iteration"
    parts = ", ".join(f"{name} {last[key]:.3f} s" for name, key in _PARTS.items())
    return f"  {last['lost']} steps lost; {parts}"


def show(console: Console, results: Results) -> None:
    """Print both tables."""
    loops = Table(title="A save after every step", title_justify="left")
    loops.add_column("strategy", no_wrap=True)
    for name in _COLUMNS:
        loops.add_column(name, justify="right", no_wrap=True)
    back = Table(title="From SIGKILL to the step that was trained last, in seconds", title_justify="left")
    back.add_column("recovery", no_wrap=True)
    for name in ("steps lost", "restore", "train again", "both", "faster", "start", "from the kill", "faster", "equal"):
        back.add_column(name, justify="right", no_wrap=True)
    for case, samples in results.samples.items():
        table, label = (loops, LABELS) if case.kind == "loop" else (back, RECOVERIES)
        if not samples:
            why = "absent" if case in results.absent else "[red]failed[/red]"
            table.add_row(label[case.strategy], why)
        else:
            row = _loop_row if case.kind == "loop" else _recovery_row
            table.add_row(label[case.strategy], *row(results, case))
    for table in (loops, back):
        if table.row_count:
            console.print(table)
    for case, reason in results.absent.items():
        console.print(f"{case.kind}/{case.strategy} is absent: {reason}", highlight=False)
    for case, error in results.errors.items():
        console.print(f"[red]{case.kind}/{case.strategy} failed[/red]: {error}", highlight=False)


def faster(results: Results, case: Case, name: str) -> float | None:
    """How many times faster than the last full and training again; None: not measured."""
    slowest = next((one for one in results.samples if one.strategy == "fulls-50"), None)
    whole = _median(results, case, name)
    most = None if slowest is None else _median(results, slowest, name)
    return None if most is None or whole is None or case is slowest else most / whole


def _recovery_row(results: Results, case: Case) -> list[str]:
    found = [number(_median(results, case, "lost"), "g")]
    for names in (("restore_s", "recompute_s", "recover_s"), ("start_s", "from_kill_s")):
        found += [number(_median(results, case, name), ".3f") for name in names]
        found.append(number(faster(results, case, names[-1]), ".1fx"))
    return [*found, "yes"]


def _loop_row(results: Results, case: Case) -> list[str]:
    plain = case.strategy == base_of(case.strategy)
    slowed = [overheads(results, case, name) for name in ("iteration_s", "median_iteration_s")]
    return [
        number(_median(results, case, "iteration_s"), ".1f", 1e-3),
        *("-" if plain or not each else f"{statistics.median(each):.1%}" for each in slowed),
        number(_median(results, case, "thread_s"), ".1f", 1e-3),
        *("-" if plain else number(_median(results, case, f"{kind}stall_s"), ".1f", 1e-3) for kind in ("", "worst_")),
        number(_median(results, case, "durable_s"), ".3f"),
        "-" if plain else number(_median(results, case, "bytes_per_save"), ".2f", _MEGABYTE),
        "-" if plain else "yes",
    ]


def number(value: float | None, text: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, text.removesuffix("x")) + "x" * text.endswith("x")


EXAMPLE: Final = """\b
Examples:
  python -m tools.bench.training.every_step
  python -m tools.bench.training.every_step --only 'loop/topk*' --only 'loop/dense*' --rounds 3
  python -m tools.bench.training.every_step --only 'recover/*'
  python -m tools.bench.training.every_step --quick
"""


@click.command(help=__doc__, epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--parameters", "count", default="8M", show_default=True, callback=parameters, help="Of the model.")
@click.option("--tokens", default=(8, 64), show_default=True, type=int, nargs=2, help="Batch and context of a step.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1), help="Measured steps.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Measurements of each case.")
@click.option("--only", multiple=True, metavar="GLOB", help="Cases, as 'loop/topk-agent' or 'recover/*'; repeatable.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--pin/--no-pin", "pinned", default=True, show_default=True, help="Other cores for saving than training.")
@click.option("--cold", is_flag=True, help="An interpreter for each process, which imports everything.")
@click.option("--quick", is_flag=True, help="Smoke test: a tiny model, few steps, two cases.")
@click.option("--out", default=Path("bench-out"), show_default=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def main(
    count: int,
    tokens: tuple[int, int],
    steps: int,
    rounds: int,
    only: tuple[str, ...],
    device: str,
    pinned: bool,
    cold: bool,
    quick: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Run the command: see the module."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)
    distance = 4 if quick else DISTANCE
    only = only or (_QUICK if quick else ())
    width, layers = shape_of(100_000 if quick else count)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=out.resolve()))  # processes start in other folders
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(scratch / "runtime")
    results = Results({case: [] for case in cases(only, distance)})
    stack = contextlib.ExitStack()
    try:
        nursery = None if cold else stack.enter_context(Warm(MODULES, env=environment()))
        plan = Plan(width, layers, *tokens, steps, 100, device, pinned, scratch, warm=nursery)
        plan = replace(plan, batch=1, context=16, steps=2) if quick else plan
        described = machine.describe(scratch)
        run(plan, results, rounds, distance, lambda text: console.print(text, style="dim", highlight=False))
    finally:
        stack.close()
        shutil.rmtree(scratch, ignore_errors=True)
    pinning = next((one["pinning"] for some in results.samples.values() for one in some if "pinning" in one), "")
    settings = {name: getattr(plan, name) for name in ("width", "layers", "batch", "context", "steps", "device")}
    settings |= {"rounds": rounds, "distance": distance, "pinning": pinning, "cold": cold}
    report = {"benchmark": "every_step", "machine": described, "settings": settings, "results": document(results)}
    (out / "every_step.json").write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    else:
        console.print(pinning, highlight=False)
        show(console, results)
        console.print(f"wrote {out / 'every_step.json'}", highlight=False)
    if results.errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
