"""Many small tensors: loads of a chain of step diffs or deltas, and its saves, compared with torch.load and torch.save.

    python -m tools.bench.storage.small_tensors
    python -m tools.bench.storage.small_tensors --tensors 9000 --steps 12 --rounds 5

A state of small fp32 parameters with both moments of AdamW is trained with random gradients. Every step is saved.
Loads of the last step and `torch.load` of the same state take turns in one process, so that a busy machine slows both.
Every restored state is compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptstore
from ckptstore.training import OptimizerStep
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions
from tools.bench.machine import describe

SIZES = (64, 1000)
WAYS = ("steps, one segment", "steps, a segment each", "deltas")


def model(tensors: int, seed: int = 0) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters with their optimizer; with both moments they are `tensors` tensors."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(SIZES[0], SIZES[1] + 1, tensors // 3)
    made = {
        f"layers.{number}.weight": torch.nn.Parameter(torch.from_numpy(rng.normal(0, 0.02, size).astype("<f4")))
        for number, size in enumerate(sizes)
    }
    return made, torch.optim.AdamW(made.values(), lr=1e-3, foreach=True)


def state_of(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    moments = [optimizer.state[one] for one in parameters.values()]
    return {
        "model": {name: one.detach() for name, one in parameters.items()},
        "exp_avg": {name: one["exp_avg"] for name, one in zip(parameters, moments, strict=True)},
        "exp_avg_sq": {name: one["exp_avg_sq"] for name, one in zip(parameters, moments, strict=True)},
        "step": step,
    }


def train(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for one in parameters.values():
        one.grad = torch.randn(one.shape, generator=generator) * 1e-3
    optimizer.step()


def fill(way: str, folder: Path, tensors: int, steps: int, save: Callable[..., None]) -> dict[str, Any]:
    """Save a full and `steps` further checkpoints of a run -> the last state."""
    parameters, optimizer = model(tensors)
    batch = steps if way == WAYS[0] else 1
    options: dict[str, Any] = {"diffs": DiffOptions(full_every=steps + 9, batch=batch, seconds=None)}
    if way == WAYS[2]:
        options = {"deltas": DeltaOptions(interval=steps + 9)}
    train(parameters, optimizer, 1)
    with ckptstore.open(folder).writer(parent=None, poll_seconds=None, **options) as writer:
        writer.save(state_of(parameters, optimizer, 1), 1)
        for step in range(2, steps + 2):
            train(parameters, optimizer, step)
            updates = OptimizerStep(optimizer, gradients="none") if way != WAYS[2] else None
            save(writer, state_of(parameters, optimizer, step), step, updates)
        writer.wait()
    return state_of(parameters, optimizer, steps + 1)


def same(found: dict[str, Any], state: dict[str, Any]) -> bool:
    return all(
        torch.equal(found[part][name].view(torch.int32), one.view(torch.int32))
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, one in state[part].items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=9000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="ways whose name holds this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would spin, and count as processor time
    rows = []
    for way in WAYS:
        if options.only not in way:
            continue
        with tempfile.TemporaryDirectory(dir=".cache" if Path(".cache").is_dir() else None) as place:
            rows.append(measure(way, Path(place), options.tensors, options.steps, options.rounds))
        print(json.dumps(rows[-1]))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": describe(Path()), "rows": rows}, indent=1))


def measure(way: str, folder: Path, tensors: int, steps: int, rounds: int) -> dict[str, Any]:
    took: list[tuple[float, float]] = []

    def save(writer: Any, state: Any, step: int, updates: Any) -> None:
        began = time.perf_counter(), time.process_time()
        if updates is None:
            writer.save(state, step)
        else:
            writer.save_async(state, step, updates=updates)
        writer.wait() if way != WAYS[0] else None
        took.append((time.perf_counter() - began[0], time.process_time() - began[1]))

    store = folder / "store"
    state = fill(way, store, tensors, steps, save)
    numbers = sum(one.numel() for one in state["model"].values())
    torch.save(state, folder / "state.pt")
    opened = ckptstore.open(store)
    diffs = [entry for entry, doc in opened.describe(steps + 1) if doc.kind != "full"]
    stored = sum((store / entry.key).stat().st_size for entry in diffs)
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: opened.load(steps + 1),
        "full": lambda: opened.load(1),
        "torch.load": lambda: torch.load(folder / "state.pt", weights_only=True),
        "torch.save": lambda: torch.save(state, folder / "again.pt"),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    exact = same(opened.load(steps + 1), state)
    for _ in range(rounds):
        for name, run in ways.items():
            gc.collect()
            began = time.perf_counter(), time.process_time()
            found = run()
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            del found
    row: dict[str, Any] = {"way": way, "tensors": tensors, "steps": steps, "exact": exact}
    row["bits"] = 8 * stored / numbers / (steps if len(diffs) > 0 and way != WAYS[2] else 1)
    row |= {f"{name} s": round(min(one[0] for one in runs), 4) for name, runs in seconds.items()}
    row |= {f"{name} cpu": round(min(one[1] for one in runs), 4) for name, runs in seconds.items()}
    row["save s"] = round(statistics.median(one[0] for one in took), 4)
    row["save cpu"] = round(statistics.median(one[1] for one in took), 4)
    row["load / torch.load"] = round(row["load s"] / row["torch.load s"], 2)
    return row


if __name__ == "__main__":
    main()
