"""What it costs to save after every step, and how fast a killed trainer is back: ``python -m tools.bench.every_step``,
ten minutes where nothing else runs.

The demo's language model in the loop of `training`, trainer and savers pinned to cores of their own; every case is a
process of its own, and rounds are interleaved. *Overhead* is the loop's time over that of the same loop without saves
in the same round; strategies whose gradients are compressed (top-k, 0.01) are compared with a loop that compresses
them and does not save. What the loop waits for, what the trainer's thread computes, and what it loses because a bus and
caches are shared, all are in it.

*Recovery*: the trainer is killed (SIGKILL) after a step, and another process brings a state to that step again: from
the agent that has outlived it; from the store, replaying step diffs, where the agent died as well; from the newest full
of a store with a full every 50 steps, half a distance back, training the lost steps again. It is timed from where the
new trainer has its model to where it has taken that step.

Every state that is restored or recovered is compared bit by bit with the one that was trained.
"""

from __future__ import annotations

import fnmatch
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
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
from tools.bench.rounds import WorkerError
from tools.bench.training import parameters, shape_of
from tools.bench.training_cases import ROOT, Case, Plan, Results, environment, finished, noted_digests, rotated

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
}
RECOVERIES: Final = {
    "dense-agent": "from the agent",
    "dense-replica": "from the agent's replica",
    "storage": "from the store, step diffs replayed",
    "fulls-50": "from the store's full, trained again",
}
DISTANCE: Final = 50
"""Steps from one full to the next where lost steps are trained again."""
_QUICK: Final = ("loop/topk-agent", "recover/dense-agent")
_MEGABYTE: Final = 1e6
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
        raise click.BadParameter(f"nothing matches; the cases are {', '.join(names.values())}", param_hint="--only")
    needed = {Case("loop", base_of(one.strategy), 1) for one in chosen if one.kind == "loop"}
    return [one for one in found if one in needed or one in chosen]


def killed_at(case: Case, distance: int) -> int:
    """After which step a trainer is killed: half-way to the next full, which is what a failure costs on average; where
    an agent keeps the newest state, after a few, for it does not matter.
    """
    half = distance // 2
    return {"fulls-50": distance + half, "storage": 4 + half}.get(case.strategy, 12)


def recovered(plan: Plan, case: Case, folder: Path, target: int) -> dict[str, Any]:
    """Train, SIGKILL after step `target`, recover in another process -> seconds, and what they were spent on.

    Raises:
        WorkerError: it ended by itself, or what is recovered is not what was trained.
    """
    last: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", dir=plan.scratch) as trouble:
        command = replace(plan, full_every=1000).command("kill", case, folder)
        with subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=trouble, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = json.loads(line)
                if last.get("step") == target:
                    process.send_signal(signal.SIGKILL)
            status = process.wait()
        if "absent" in last:
            return last
        if status != -signal.SIGKILL:
            trouble.seek(0)
            raise WorkerError((trouble.read().strip().splitlines() or [f"it ended with status {status}"])[-1])
    if case.strategy == "storage":
        _kill(last["agent"])
    trained = last["step"]  # one more than the target, if it was quicker than the signal
    found = finished(replace(plan, steps=trained), "recover", case, folder)
    if found["reached"] != trained or found["digest"] != noted_digests(folder).get(trained):
        raise WorkerError(f"recovered from step {found['step']}: step {trained} is not the one that was trained")
    seconds = found["restore_s"] + found["recompute_s"]
    lost = trained - (found["step"] or 0)
    return {"lost": lost, "restore_s": found["restore_s"], "recompute_s": found["recompute_s"], "recover_s": seconds}


def _kill(pid: int) -> None:
    """End the agent that the trainer has left, and wait until it is gone."""
    agent = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(agent, signal.SIGKILL)
        select.select([agent], [], [], 30)
    finally:
        os.close(agent)


def run(plan: Plan, results: Results, rounds: int, distance: int, told: Callable[[str], None]) -> None:
    """Measure every case so often."""
    for turn in range(rounds):
        for case in rotated(list(results.samples), turn):
            told(f"round {turn + 1}/{rounds} {case.kind}/{case.strategy}")
            folder = plan.scratch / "run"
            try:
                if case.kind == "loop":
                    results.take(case, partial(finished, plan, "loop", case, folder))
                else:
                    results.take(case, partial(recovered, plan, case, folder, killed_at(case, distance)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def overheads(results: Results, case: Case, name: str = "iteration_s") -> list[float]:
    """By how much the loop is slower than without saves, round by round."""
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
        found.append(entry)
    return found


def show(console: Console, results: Results) -> None:
    """Print both tables."""
    loops = Table(title="A save after every step", title_justify="left")
    loops.add_column("strategy", no_wrap=True)
    for name in (
        "ms/it",
        "overhead",
        "of medians",
        "CPU ms/it",
        "stall ms",
        "worst ms",
        "durable s",
        "MB/save",
        "equal",
    ):
        loops.add_column(name, justify="right", no_wrap=True)
    back = Table(title="From SIGKILL to the step that was trained last", title_justify="left")
    back.add_column("recovery", no_wrap=True)
    for name in ("steps lost", "restore s", "train again s", "in all s", "against the last", "equal"):
        back.add_column(name, justify="right", no_wrap=True)
    slowest = next((case for case in results.samples if case.strategy == "fulls-50"), None)
    most = None if slowest is None else _median(results, slowest, "recover_s")
    for case, samples in results.samples.items():
        table, label = (loops, LABELS) if case.kind == "loop" else (back, RECOVERIES)
        if not samples:
            why = "not in this build" if case in results.absent else "[red]failed[/red]"
            table.add_row(label[case.strategy], why)
        elif case.kind == "loop":
            table.add_row(label[case.strategy], *_loop_row(results, case))
        else:
            whole = _median(results, case, "recover_s")
            ratio = "-" if most is None or whole is None or case is slowest else f"{most / whole:.1f}x faster"
            times = (_number(_median(results, case, name), ".2f") for name in ("restore_s", "recompute_s", "recover_s"))
            table.add_row(label[case.strategy], _number(_median(results, case, "lost"), "g"), *times, ratio, "yes")
    for table in (loops, back):
        if table.row_count:
            console.print(table)
    for case, error in results.errors.items():
        console.print(f"[red]{case.kind}/{case.strategy} failed[/red]: {error}", highlight=False)


def _loop_row(results: Results, case: Case) -> list[str]:
    plain = case.strategy == base_of(case.strategy)
    slowed = [overheads(results, case, name) for name in ("iteration_s", "median_iteration_s")]
    return [
        _number(_median(results, case, "iteration_s"), ".1f", 1e-3),
        *("-" if plain or not each else f"{statistics.median(each):.1%}" for each in slowed),
        _number(_median(results, case, "thread_s"), ".1f", 1e-3),
        *("-" if plain else _number(_median(results, case, f"{kind}stall_s"), ".1f", 1e-3) for kind in ("", "worst_")),
        _number(_median(results, case, "durable_s"), ".3f"),
        "-" if plain else _number(_median(results, case, "bytes_per_save"), ".2f", _MEGABYTE),
        "-" if plain else "yes",
    ]


def _number(value: float | None, text: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, text)


EXAMPLE: Final = """\b
Examples:
  python -m tools.bench.every_step
  python -m tools.bench.every_step --only 'loop/topk*' --only 'loop/dense*' --rounds 3
  python -m tools.bench.every_step --quick
"""


@click.command(help=__doc__, epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--parameters", "count", default="8M", show_default=True, callback=parameters, help="Of the model.")
@click.option("--tokens", default=(8, 64), show_default=True, type=int, nargs=2, help="Batch and context of a step.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1), help="Measured steps.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Measurements of each case.")
@click.option("--only", multiple=True, metavar="GLOB", help="Cases, as 'loop/topk-agent' or 'recover/*'; repeatable.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--pin/--no-pin", "pinned", default=True, show_default=True, help="Other cores for saving than training.")
@click.option("--quick", is_flag=True, help="A tiny model, few steps, two cases: does it run?")
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
    quick: bool,
    out: Path,
    as_json: bool,
) -> None:
    """See the module."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)
    distance = 4 if quick else DISTANCE
    only = only or (_QUICK if quick else ())
    width, layers = shape_of(100_000 if quick else count)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=out))
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(scratch / "runtime")
    results = Results({case: [] for case in cases(only, distance)})
    try:
        plan = Plan(width, layers, *tokens, steps, 100, device, pinned, scratch)
        plan = replace(plan, batch=1, context=16, steps=2) if quick else plan
        described = machine.describe(scratch)
        run(plan, results, rounds, distance, lambda text: console.print(text, style="dim", highlight=False))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    pinning = next((one["pinning"] for some in results.samples.values() for one in some if "pinning" in one), "")
    settings = {name: getattr(plan, name) for name in ("width", "layers", "batch", "context", "steps", "device")}
    settings |= {"rounds": rounds, "distance": distance, "pinning": pinning}
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
