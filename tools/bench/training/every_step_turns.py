"""Measures the cost of saving after every step in turns.

``python -m tools.bench.training.every_step_turns topk-agent`` takes three minutes a strategy on an idle machine.

The loops with and without saves live side by side, pinned as in `every_step`, and one trains a few steps while the
other pauses. A shared machine changes its pace by a third within a minute, so loops that are measured one after the
other cannot tell an overhead of 3 % from one of 10. Two turns are a second or two apart. The first step of a turn does
not count: in it a saver has no work from an earlier step yet, and the other's saver finishes (a turn ends with
`Strategy.settle`, which does not count, either). *Overhead* is the median over pairs of turns, with its 95 % interval
(bootstrap). In the end the newest state is restored and compared bit by bit.

Two processors of a virtual machine are often one core with two threads: work on the other one slows training down.
``--control`` measures that, after a strategy with an agent, in the same way: without saves, while a process on the
savers' cores computes as long for each step as the agent did, in a few kilobytes. The saves do not cause that part.
Then it does so with a process that copies memory for that long: an agent's work lies between the two.

``--profile`` shows which phases of a step take longer (`step_profile`), also of the controls.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import click
from rich.console import Console
from rich.table import Table

from tools.bench import machine
from tools.bench.storage.rounds import WorkerError
from tools.bench.training.every_step import LABELS, base_of, number
from tools.bench.training.step_profile import Phases, shown
from tools.bench.training.strategy_comparison import parameters, shape_of
from tools.bench.training.training_cases import ROOT, SPIN, Case, Plan, environment

__all__ = ["Turns", "Worker", "interval_of", "main", "taken"]

_DRAWS: Final = 2000


@dataclass(slots=True)
class Turns:
    """Seconds a step of each turn, of both loops; likewise processor seconds.

    Attributes:
        plain, saving: wall seconds a step, by pair of turns.
        plain_thread, saving_thread: processor seconds of the training thread.
        agent: processor seconds of the agent, if there is one.
        phases: what each phase took.
        result: the last report of the saving worker: its state was restored and compared.
    """

    plain: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    plain_thread: list[float] = field(default_factory=list)
    saving_thread: list[float] = field(default_factory=list)
    agent: list[float] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    result: dict[str, Any] = field(default_factory=dict)

    def overheads(self) -> list[float]:
        """The slowdown of a turn's steps relative to the turn beside it."""
        return [mine / its - 1 for mine, its in zip(self.saving, self.plain, strict=True)]


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: a bootstrap, the same for the same values."""
    chance = random.Random(1)
    drawn = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(_DRAWS))
    return drawn[_DRAWS // 40], drawn[-_DRAWS // 40 - 1]


def taken(plan: Plan, plain: Case, saving: Case, pairs: int, told: Callable[[str], None]) -> Turns:
    """Measure pairs of turns of `plan.steps` counted steps each; the first of a pair alternates.

    Raises:
        WorkerError: a worker ended, or the finally restored state is not the trained one.
    """
    found = Turns()
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(plan, case)) for case in (plain, saving)]
        for turn in range(pairs):
            said = {}
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                said[place] = workers[place].ask(plan.steps + 1)
            for place, seconds, processor in (
                (0, found.plain, found.plain_thread),
                (1, found.saving, found.saving_thread),
            ):
                seconds.append(statistics.fmean(said[place]["iterations"][1:]))
                processor.append(statistics.fmean(said[place]["threads"][1:]))
            found.phases.plain.append(said[0]["phases"])
            found.phases.saving.append(said[1]["phases"])
            found.phases.parts.append(said[1]["parts"])
            found.agent += [said[1]["agent"]] if "agent" in said[1] else []
            told(f"  {turn + 1}/{pairs}: {found.plain[-1] * 1e3:.0f} ms without, {found.overheads()[-1]:+.1%}")
        for worker in workers:
            found.result = worker.ask(0)
    return found


class Worker:
    """A worker that trains on command. A context manager, or `start` and then `ready`."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self._folder = plan.scratch / f"turns-{case.strategy}-{case.interval}"
        self._command = plan.command("turns", case, self._folder)
        self._start: Callable[..., Any] = subprocess.Popen if plan.warm is None else plan.warm.start
        self._trouble: IO[str] = tempfile.TemporaryFile("w+", dir=plan.scratch)  # noqa: SIM115  # closed with it
        self._process: Any = None

    def start(self) -> None:
        """Start its process."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._trouble, "text": True}
        self._process = self._start(self._command, cwd=ROOT, env=environment(), **pipes)

    def ready(self) -> None:
        """Wait until it has taken its first steps."""
        self._answer()

    def __enter__(self) -> Worker:
        self.start()
        self.ready()
        return self

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self._process.pid)

    def ask(self, steps: int) -> dict[str, Any]:
        """Train a number of steps -> their seconds; 0: end -> the result."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: its output, or the lack of it, gives the reason
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            status = self._process.wait()
            self._trouble.seek(0)
            raise WorkerError((self._trouble.read().strip().splitlines() or [f"it ended with status {status}"])[-1])
        found = dict(json.loads(line))
        if "absent" in found:
            raise WorkerError(str(found["absent"]))
        return found

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
        self._trouble.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_COLUMNS: Final = (
    *("ms/it without", "ms/it", "overhead", "with 95 %", "CPU ms/it without", "CPU ms/it", "agent's", "pairs", "equal"),
)
_CONTROLS: Final = {
    "spin": "the same without saves, another process computes",
    "stream": "the same without saves, another process copies memory",
}


def _row(one: Turns) -> list[str]:
    lowest, highest = interval_of(one.overheads())
    medians = [statistics.median(each) for each in (one.plain, one.saving)]
    threads = [statistics.median(each) for each in (one.plain_thread, one.saving_thread)]
    threads += [statistics.median(one.agent)] if one.agent else []
    slowed = (f"{statistics.median(one.overheads()):.1%}", f"{lowest:.1%} to {highest:.1%}")
    found = [number(each, ".1f", 1e-3) for each in medians]
    found += [*slowed, *(number(each, ".1f", 1e-3) for each in threads), *["-"] * (3 - len(threads))]
    found.append(str(len(one.plain)))
    return [*found, "yes" if "restore_s" in one.result else "-"]


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.argument(
    "strategies",
    nargs=-1,
    required=True,
    type=click.Choice([name for name in LABELS if base_of(name) != name]),
    metavar="STRATEGY...",
)
@click.option("--parameters", "count", default="8M", show_default=True, callback=parameters, help="Of the model.")
@click.option("--tokens", default=(8, 64), show_default=True, type=int, nargs=2, help="Batch and context of a step.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Counted steps of a turn.")
@click.option("--pairs", default=30, show_default=True, type=click.IntRange(1), help="Turns of each loop.")
@click.option("--control", is_flag=True, help="Also what a process that computes as long as the agent costs.")
@click.option("--profile", is_flag=True, help="Also which phases of a step take longer, and parts of ckptstore.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--pin/--no-pin", "pinned", default=True, show_default=True, help="Other cores for saving than training.")
@click.option("--out", default=Path("bench-out"), show_default=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def main(
    strategies: tuple[str, ...],
    count: int,
    tokens: tuple[int, int],
    steps: int,
    pairs: int,
    control: bool,
    profile: bool,
    device: str,
    pinned: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Run the command: see the module."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=160)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=out.resolve()))  # processes start in other folders
    os.environ["CKPTSTORE_RUNTIME_DIR"] = str(scratch / "runtime")
    plan = Plan(*shape_of(count), *tokens, steps, 100, device, pinned, scratch, profile=profile)
    profiles: list[Table] = []
    table = Table(title="A save after every step, in turns with the loop without saves", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    described, results, failed = machine.describe(scratch), [], False
    told = partial(console.print, style="dim", highlight=False)

    def measure(strategy: str, label: str) -> Turns | None:
        told(f"{label}: {pairs} pairs of turns of {steps} steps ...")
        try:
            one = taken(plan, Case("loop", base_of(strategy), 1), Case("loop", strategy, 1), pairs, told)
        except WorkerError as error:
            results.append({"strategy": strategy, "error": str(error)})
            table.add_row(label, f"[red]failed[/red]: {error}")
            return None
        numbers = {"overhead": statistics.median(one.overheads()), "interval_95": interval_of(one.overheads())}
        results.append({"strategy": strategy} | numbers | asdict(one))
        table.add_row(label, *_row(one))
        if profile:
            profiles.append(shown(label, one.phases, interval_of))
        return one

    try:
        for strategy in dict.fromkeys(strategies):
            one = measure(strategy, LABELS[strategy])
            failed |= one is None
            if control and one is not None and one.agent:
                os.environ[SPIN] = str(statistics.median(one.agent))
                for name, label in _CONTROLS.items():
                    failed |= measure(f"{base_of(strategy)}-{name}", label) is None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    settings = {name: getattr(plan, name) for name in ("width", "layers", "batch", "context", "steps", "device")}
    report = {"benchmark": "every_step_turns", "machine": described, "settings": settings, "results": results}
    (out / "every_step_turns.json").write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    else:
        console.print(table, *profiles)
        console.print(f"wrote {out / 'every_step_turns.json'}", highlight=False)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
