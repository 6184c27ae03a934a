"""Compares saves, loads and training steps of two installed versions of ckptstore, in processes that live side by side.

    python -m tools.bench.training.version_turns --other OTHER/.venv/bin/python

Each version does each kind of work in a process of its own. In a round every process does its work once, in a random
order, while the others sleep, so that other load affects both versions. Milliseconds: medians over the rounds of the
call (``wall``) and of the process's processor time until everything was durable (``cpu``). ``ratio`` is the median over
the rounds of this version's time by the other's.

The kinds: ``save`` (a full, durable on return), ``async`` (the call of ``save_async``), ``load``, ``delta`` (a
compressed save), ``step-full``, ``step-delta``, ``step-gradient`` (a Checkpointer after each step of a 64 x 64 layer,
durable) and ``many`` (the call of ``Checkpointer.step`` with 3,000 parameters).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

__all__ = ["WORKS", "Compared", "compare", "main"]

WORKS: Final = ("save", "async", "load", "delta", "step-full", "step-delta", "step-gradient", "many")

# Public names alone, of both versions.
_WORKER: Final = """
import sys, time, warnings
import numpy as np, ckptstore
warnings.simplefilter("ignore")
work, path, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = np.random.default_rng(1)

def plain():
    state = {f"t{i}": chance.standard_normal(4 << 20, np.float32) for i in range(max(1, megabytes // 16))}
    writer = ckptstore.open(path).writer(**({"deltas": "auto"} if work == "delta" else {}))
    step = 0
    def call():
        nonlocal step
        step += 1
        if work == "async":
            writer.save_async(state, step)
        elif work == "load":
            writer.store.load("latest") if hasattr(writer, "store") else ckptstore.open(path).load("latest")
        else:
            writer.save(state, step)
    def between():
        if work == "delta":
            for one in state.values():
                one *= np.float32(1 + 1e-6)
    if work == "load":
        writer.save(state, 1)
    return between, call, writer.wait

def training():
    import torch
    from ckptstore.training import Checkpointer
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = 1500 if work == "many" else 1
    size = 16 if work == "many" else 64
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    strategy = "full" if work == "many" else work.removeprefix("step-")
    saver = Checkpointer(path, model=model, optimizer=optimizer, strategy=strategy, keep=["last:5"])
    saver.resume()
    def between():
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
    return between, saver.step, saver.wait

between, call, wait = training() if "step" in work or work == "many" else plain()
for _ in range(3):
    between(), call(), wait()
print("ready", flush=True)
for line in sys.stdin:
    wall, cpu, times = [], [], int(line)
    for _ in range(times):
        between()
        began, used = time.perf_counter(), time.process_time()
        call()
        if work.startswith("step"):
            wait()
        wall.append(time.perf_counter() - began)
        wait()
        cpu.append(time.process_time() - used)
    print(sorted(wall)[times // 2], sorted(cpu)[times // 2], flush=True)
"""
_TIMES: Final = {"step-full": 20, "step-delta": 20, "step-gradient": 20, "many": 5}
"""Calls in a turn; 1 of all others. Their median counts."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of work. Milliseconds; ratios are this version's by the other's."""

    work: str
    other_wall: float
    this_wall: float
    wall_ratio: float
    other_cpu: float
    this_cpu: float
    cpu_ratio: float


def compare(other: str, folder: Path, works: Sequence[str], rounds: int, size: int) -> list[Compared]:
    """Do each kind of work with both versions, in turns.

    Args:
        other: the interpreter that has the other version.
        size: MiB of the states of `save`, `async`, `load` and `delta`.
    """
    return [_compared(other, folder, work, rounds, size) for work in works]


def _compared(other: str, folder: Path, work: str, rounds: int, size: int) -> Compared:
    pythons = {"other": other, "this": sys.executable}
    with ExitStack() as ends:
        workers = {
            name: _started(ends, python, work, folder / f"{work}-{name}", size) for name, python in pythons.items()
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in pythons}
        order = list(pythons)
        for number in range(rounds):
            random.Random(number).shuffle(order)
            for name in order:
                taken[name].append(_turn(workers[name], _TIMES.get(work, 1)))
    for name in pythons:
        shutil.rmtree(folder / f"{work}-{name}")

    def column(name: str, at: int) -> list[float]:
        return [row[at] for row in taken[name]]

    def median(name: str, at: int) -> float:
        return 1e3 * statistics.median(column(name, at))

    def ratio(at: int) -> float:
        return statistics.median(mine / its for mine, its in zip(column("this", at), column("other", at), strict=True))

    return Compared(
        work, median("other", 0), median("this", 0), ratio(0), median("other", 1), median("this", 1), ratio(1)
    )


def _started(ends: ExitStack, python: str, work: str, path: Path, size: int) -> subprocess.Popen[str]:
    command = [python, "-c", _WORKER, work, str(path), str(size)]
    # Each installed version finds itself: this tree must not be on the other's path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=path.parent, env=environment
    )
    ends.callback(process.communicate)  # the end of its input ends it
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{python} cannot do the work {work!r}: it ended with {process.wait()}")
    return process


def _turn(worker: subprocess.Popen[str], times: int) -> tuple[float, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{times}\n")
    worker.stdin.flush()
    wall, cpu = worker.stdout.readline().split()
    return float(wall), float(cpu)


@click.command(help=__doc__)
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--other", required=True, help="The interpreter that has the other version installed.")
@click.option("--work", "works", multiple=True, type=click.Choice(WORKS), help="Default: all.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--size", type=click.IntRange(16), default=256, show_default=True, help="MiB of a large state.")
@click.option("--json", "as_json", is_flag=True)
def main(folder: Path | None, other: str, works: tuple[str, ...], rounds: int, size: int, as_json: bool) -> None:
    """Run the command: see the module."""
    with tempfile.TemporaryDirectory(prefix="versions-", dir=folder) as name:
        found = compare(other, Path(name), works or WORKS, rounds, size)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    shown = Table("work", "other ms", "this ms", "ratio", "other cpu", "this cpu", "cpu ratio")
    for one in found:
        numbers = [value for name, value in asdict(one).items() if name != "work"]
        shown.add_row(one.work, *(f"{value:.2f}" for value in numbers))
    Console().print(shown)


if __name__ == "__main__":
    main()
