"""Measures N fulls in flight at interval 1, by threads and memory: ``python -m tools.bench.storage.concurrent``.

The questions of PCcheck (5.4 of the paper) for this writer on this machine: a loop that saves after every step, with N
= 1..4 in flight (`max_in_flight`), p = 1..4 threads each (`threads`), and host memory of half the state to twice of it
(`memory`). Every case runs once per round, the next round in a rotated order. The cost of a step without saves is
measured in each case, so a save's cost is the loop's time minus that of its steps.

``stall`` is how long `save_async` blocked the loop, ``waited`` its part that was spent waiting for memory or a place in
flight; ``copy`` is a memcpy of the same bytes to warm memory by one thread. ``first`` is the first save's stall, after
`Writer.prepare` or not.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ckptstore.store import open as open_store
from ckptstore.write.saves.save_metrics import SaveMetrics
from tools.bench import machine
from tools.bench.storage.save_load import parse_size

_LEAST = 48 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration. `memory` is a multiple of the state, None the default."""

    in_flight: int
    threads: int = 2
    memory: float | None = None
    prepared: bool = True

    @property
    def name(self) -> str:
        """Its name in tables: N, p, M."""
        memory = "" if self.memory is None else f" M={self.memory:g}m"
        return f"N={self.in_flight} p={self.threads}{memory}{'' if self.prepared else ' unprepared'}"


CASES = (
    *(Case(number) for number in (1, 2, 3, 4)),
    *(Case(1, threads) for threads in (1, 3, 4)),
    *(Case(2, 2, memory) for memory in (0.5, 1, 2)),
    Case(1, prepared=False),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run in seconds; of saves their medians."""

    first: float
    stall: float
    waited: float
    durable: float
    loop: float
    step: float
    copy: float
    rate: float

    @property
    def loss(self) -> float:
        """The cost of a save to the loop."""
        return self.loop - self.step


def _state(nbytes: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of 9 MB and many small ones, as a transformer has them."""
    generator = np.random.default_rng(0)
    size = 9 << 20
    state = {
        f"w{number}": generator.integers(0, 1 << 30, size // 4, np.int32).view(np.float32)
        for number in range(max(1, nbytes // size))
    }
    return state | {f"b{number}": np.full(768, number, np.float32) for number in range(100)}


def _copy_seconds(state: dict[str, np.ndarray[Any, Any]]) -> float:
    """Seconds of a memcpy of the state to warm memory, the best of three."""
    out = {name: array.copy() for name, array in state.items()}
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for name, array in state.items():
            out[name][:] = array
        times.append(time.perf_counter() - began)
    return min(times)


class _Step:
    """A training step: it computes for about the given seconds on one core, then changes every tensor."""

    def __init__(self, state: dict[str, np.ndarray[Any, Any]], seconds: float) -> None:
        self._state = state
        self._factor = np.full((256, 256), 1 / 256, np.float32)
        began = time.perf_counter()
        for _ in range(20):
            self._factor @ self._factor
        self._times = max(1, int(seconds / ((time.perf_counter() - began) / 20)))

    def __call__(self) -> None:
        product = self._factor
        for _ in range(self._times):
            product = product @ self._factor
        for array in self._state.values():
            np.negative(array, array)


def measure(case: Case, folder: Path, nbytes: int, saves: int, seconds: float) -> Sample:
    """Run one case in a new store in `folder`."""
    state = _state(nbytes)
    size = sum(array.nbytes for array in state.values())
    told: list[SaveMetrics] = []
    memory = None if case.memory is None else max(_LEAST, int(case.memory * size))
    step = _Step(state, seconds)
    copy = _copy_seconds(state)
    step()
    began = time.perf_counter()
    for _ in range(4):
        step()
    pace = (time.perf_counter() - began) / 4
    with open_store(folder / "store", create=True).writer(
        max_in_flight=case.in_flight, threads=case.threads, memory=memory, poll_seconds=None, on_metrics=told.append
    ) as writer:
        if case.prepared:
            writer.prepare(state)
            writer._background.submit(int).result()  # the start of a script: loading data, compiling
        writer.save_async(state, 1).result()  # the first; then all needed memory is touched
        for number in range(2, 2 + case.in_flight):
            writer.save_async(state, number)
        writer.wait()
        warm = 1 + case.in_flight
        began = time.perf_counter()
        for number in range(warm + 1, warm + 1 + saves):
            step()
            writer.save_async(state, number)
        looped = (time.perf_counter() - began) / saves
        writer.wait()
        rate = saves * size / (time.perf_counter() - began)
    told.sort(key=lambda one: one.step)
    last = told[warm:]
    return Sample(
        first=told[0].stall,
        stall=statistics.median(one.stall for one in last),
        waited=statistics.median(one.waited for one in last),
        durable=statistics.median(one.durable for one in last),
        loop=looped,
        step=pace,
        copy=copy,
        rate=rate,
    )


def _median(samples: Sequence[Sample], name: str) -> float:
    return statistics.median(float(getattr(sample, name)) for sample in samples)


def _show(console: Console, results: dict[Case, list[Sample]]) -> None:
    columns = ("first", "stall", "waited", "durable", "loop", "step", "loss", "copy")
    table = Table(title="seconds (medians)")
    table.add_column("case")
    for column in (*columns, "stall/copy", "GB/s"):
        table.add_column(column, justify="right")
    for case, samples in results.items():
        if samples:
            cells = [f"{_median(samples, column):.3f}" for column in columns]
            ratio = statistics.median(sample.stall / sample.copy for sample in samples)
            table.add_row(case.name, *cells, f"{ratio:.2f}", f"{_median(samples, 'rate') / 1e9:.2f}")
    console.print(table)


@click.command(context_settings={"max_content_width": 110})
@click.option("--size", default="500MB", show_default=True, help="Bytes of the state.")
@click.option("--saves", default=8, show_default=True, type=click.IntRange(min=2), help="Saves of each run.")
@click.option("--seconds", default=0.2, show_default=True, help="What a step computes beside its update.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Measurements of each case.")
@click.option("--only", multiple=True, metavar="TEXT", help="Cases whose name has this in it, as 'N=2'; repeatable.")
@click.option("--dir", "parent", default=Path("bench-out"), type=click.Path(path_type=Path), help="Where stores are.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def main(
    size: str, saves: int, seconds: float, rounds: int, only: tuple[str, ...], parent: Path, as_json: bool
) -> None:
    """Save after every step with N fulls in flight, p threads each, and memory M.

    Needs about --saves + 5 times --size on disk while it runs.
    """
    nbytes = parse_size(size)
    cases = [case for case in CASES if not only or any(text in case.name for text in only)]
    if not cases:
        raise click.BadParameter("; ".join(case.name for case in CASES), param_hint="--only")
    results: dict[Case, list[Sample]] = {case: [] for case in cases}
    parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json, width=140)
    for turn in range(rounds):
        for number in range(len(cases)):
            case = cases[(number + turn) % len(cases)]
            folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent))
            try:
                results[case].append(measure(case, folder, nbytes, saves, seconds))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        document = {
            "benchmark": "concurrent",
            "machine": machine.describe(parent),
            "settings": {"size": nbytes, "saves": saves, "seconds": seconds, "rounds": rounds},
            "results": [
                {"case": asdict(case), "samples": [asdict(sample) for sample in samples]}
                for case, samples in results.items()
            ],
        }
        click.echo(json.dumps(document))
    else:
        _show(console, results)


if __name__ == "__main__":
    main()
