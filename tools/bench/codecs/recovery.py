"""Measures the recovery time of a step: replayed by one thread or all, or computed again from the last full.

    make bench-recovery

Training of the project's language model (50 MB of fp32 state) continues from a cached state, each step saved as a step
diff in batches of 20, in one store for every distance between fulls. It recovers the step furthest from its full and
the one half-way, the average cost of a failure. Replay is compared with the only recovery of a store of fulls: load the
full and take the steps again, at the seconds that training needs here. Last, the longest chain's diffs are merged.
Every load is compared bit by bit; times are wall-clock medians of interleaved rounds, files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptstore
from ckptstore.formats import kernel_choice
from ckptstore.maintenance.merge import merge
from ckptstore.training import OptimizerStep
from tools.bench.codecs.trajectories import THREADS, LanguageRun, ensure, run_from
from tools.bench.machine import describe

START, PHASE = 590, "lm"
DISTANCES = (10, 20, 50, 100)
BATCH = 20


@dataclass(frozen=True, slots=True)
class Row:
    """Recovery of one step, in seconds; ``steps`` is how many steps follow its full."""

    full_every: int
    steps: int
    serial: float
    parallel: float
    recomputed: float
    exact: bool


@dataclass(frozen=True, slots=True)
class MergedRow:
    """The longest chain before and after a merge that keeps its end: bytes to read, and seconds to load."""

    method: str
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    exact: bool


def training_seconds(threads: int, steps: int = 8) -> float:
    """Seconds of a training step without saves: the median, without the first."""
    run, seconds = _run(threads), []
    for step in range(1, steps + 1):
        began = time.monotonic()
        run.take(START + step)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[1:])


def _run(threads: int) -> LanguageRun:
    run = run_from(ensure(PHASE), START)
    torch.set_num_threads(threads)
    return run


def fill(folder: Path, distances: Sequence[int], threads: int) -> dict[int, dict[str, bytes]]:
    """Train and save -> the states that will be recovered, by step."""
    run = _run(threads)
    stores = {every: ckptstore.open(folder / str(every)) for every in distances}
    writers: dict[int, ckptstore.Writer] = {
        every: store.writer(
            parent=None,
            diffs=ckptstore.DiffOptions(full_every=every, batch=BATCH, seconds=None),
            poll_seconds=None,
        )
        for every, store in stores.items()
    }
    wanted = {step for every in distances for step in (every, every // 2)}
    kept = {}
    for step in range(1, max(distances) + 1):
        run.take(START + step)
        updates = OptimizerStep(run.optimizer, gradients="none")
        for every, writer in writers.items():
            if step <= every:
                writer.save_async(run.state() | {"step": torch.tensor(step)}, step, updates=updates)
        if step in wanted:
            kept[step] = _images(run.state())
    for writer in writers.values():
        writer.close()
    return kept


def _images(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in state.items()}


def _load(store: ckptstore.Store, step: int, threads: int | None, state: Mapping[str, bytes]) -> tuple[float, bool]:
    began = time.monotonic()
    found = store.load(step, framework="numpy", threads=threads)
    seconds = time.monotonic() - began
    return seconds, all(np.asarray(found[name]).tobytes() == image for name, image in state.items())


def measure(folder: Path, states: Mapping[int, Mapping[str, bytes]], training: float, rounds: int) -> list[Row]:
    """All distances, interleaved."""
    cases = [(every, step) for every in DISTANCES for step in (every // 2, every)]
    stores = {every: ckptstore.open(folder / str(every)) for every in DISTANCES}
    ways: dict[str, Callable[[int, int], tuple[float, bool]]] = {
        "serial": lambda every, step: _load(stores[every], step, 1, states[step]),
        "parallel": lambda every, step: _load(stores[every], step, None, states[step]),
        "full": lambda every, _: _load(stores[every], 1, None, {}),
    }
    seconds: dict[tuple[int, int, str], list[float]] = {}
    exact = dict.fromkeys(cases, True)
    for _ in range(rounds):
        for case in cases:
            for name, way in ways.items():
                spent, equal = way(*case)
                seconds.setdefault((*case, name), []).append(spent)
                exact[case] = exact[case] and equal
    middle = {key: statistics.median(times) for key, times in seconds.items()}
    return [
        Row(
            every,
            step - 1,
            middle[every, step, "serial"],
            middle[every, step, "parallel"],
            middle[every, step, "full"] + (step - 1) * training,
            exact[every, step],
        )
        for every, step in cases
    ]


def merged(folder: Path, states: Mapping[int, Mapping[str, bytes]], rounds: int) -> MergedRow:
    """Merge the longest chain, keeping its end."""
    last = max(DISTANCES)
    store = ckptstore.open(folder / str(last))
    before = [_load(store, last, None, states[last]) for _ in range(rounds)]
    done = merge(store.journal, f"2..{last}", take_over=True)
    after = [_load(store, last, None, states[last]) for _ in range(rounds)]
    return MergedRow(
        done.method,
        done.before.nbytes,
        done.after.nbytes,
        statistics.median(seconds for seconds, _ in before),
        statistics.median(seconds for seconds, _ in after),
        all(equal for _, equal in before + after),
    )


def show(rows: Sequence[Row], training: float, after: MergedRow) -> None:
    print(f"\na training step: {training:.3f} s\n")
    print("| full every | steps to replay | serial s | parallel s | full and recompute s |")
    print("|---|---|---|---|---|")
    for row in rows:
        times = f"{row.serial:.2f} | {row.parallel:.2f} | {row.recomputed:.2f}"
        print(f"| {row.full_every} | {row.steps} | {times} |")
    print(
        f"\nmerge ({after.method}): {after.bytes_before / 1e6:.0f} -> {after.bytes_after / 1e6:.0f} MB to read, "
        f"{after.seconds_before:.2f} -> {after.seconds_after:.2f} s to load"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS, help="threads that train")
    parser.add_argument("--json", type=Path, default=Path("bench-out/recovery.json"))
    parser.add_argument("--folder", type=Path, default=Path(".cache"), help="where the stores lie meanwhile")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        training = training_seconds(options.threads)
        states = fill(folder, DISTANCES, options.threads)
        rows = measure(folder, states, training, options.rounds)
        after = merged(folder, states, options.rounds)
    show(rows, training, after)
    report = {
        "machine": describe(options.folder),
        "kernels": kernel_choice.kind(),
        "training_seconds": training,
        "training_threads": options.threads,
        "rows": [asdict(row) for row in rows],
        "merged": asdict(after),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    if not (after.exact and all(row.exact for row in rows)):
        raise SystemExit("a state that was recovered is not the one that was saved")


if __name__ == "__main__":
    main()
