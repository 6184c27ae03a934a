"""Measures the cost of each strategy to a training loop that an agent saves at every step: none, full, gradient,
replica.

    python -m tools.bench.training.replica --megabytes 90 --steps 40 FOLDER

A perceptron with AdamW of the given megabytes of state (weights and moments) trains on the CPU. Each run is a separate
process, the strategies in turns. ``loop`` is the time of a step, and its excess over the loop without checkpoints;
``backward``, ``optimizer`` (hooks of the strategy included) and ``step`` (the call of `Checkpointer.step`) are its
parts; ``written`` is how many of the steps were made durable, ``whole`` how many were passed as whole states. Medians,
in milliseconds. Trainer and agent share the processor: with the numbers, report their cores and the other load of the
machine.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

__all__ = ["main", "measure"]

STRATEGIES: Final = ("none", "full", "gradient", "replica")
_LAYERS: Final = 8
_WARM: Final = 5
"""Uncounted steps: memory is touched, kernels are compiled, the agent imports torch."""


def measure(folder: Path, strategy: str, megabytes: int, steps: int, threads: int) -> dict[str, float]:
    """One run -> medians of its parts in milliseconds, and counts."""
    import torch

    from ckptstore.agent import AgentWriter
    from ckptstore.training import Checkpointer

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    width = math.isqrt(megabytes * 1_000_000 // 12 // _LAYERS)
    layers = [part for _ in range(_LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpointer: Any = None
    wholes = 0
    if strategy != "none":
        os.environ["CKPTSTORE_RUNTIME_DIR"] = str(folder / "runtime")
        given = AgentWriter.save_async

        def counted(self: AgentWriter, *state: Any, **named: Any) -> Any:
            nonlocal wholes
            wholes += 1
            return given(self, *state, **named)

        AgentWriter.save_async = counted  # type: ignore[method-assign]
        checkpointer = Checkpointer(
            folder / "store", model=model, optimizer=optimizer, strategy=strategy, agent=True, linger_seconds=1
        )
        checkpointer.resume()
    batch = torch.randn(64, width)
    parts: dict[str, list[float]] = {"loop": [], "backward": [], "optimizer": [], "step": []}
    written = 0
    for number in range(steps + _WARM):
        times = [time.perf_counter()]
        model(batch).square().mean().backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        if checkpointer is not None:
            written += checkpointer.step() is not None and number >= _WARM
        times.append(time.perf_counter())
        optimizer.zero_grad()
        if number == _WARM - 1 and checkpointer is not None:
            checkpointer.wait()
        if number >= _WARM:
            for name, began, ended in (("loop", 0, 3), ("backward", 0, 1), ("optimizer", 1, 2), ("step", 2, 3)):
                parts[name].append((times[ended] - times[began]) * 1e3)
    if checkpointer is not None:
        checkpointer.close()
    return {name: statistics.median(values) for name, values in parts.items()} | {"written": written, "whole": wholes}


def _apart(folder: Path, strategy: str, megabytes: int, steps: int, threads: int) -> dict[str, float]:
    """`measure` in a separate process."""
    place = Path(tempfile.mkdtemp(prefix=f"bench-replica-{strategy}-", dir=folder))
    try:
        command = [sys.executable, "-m", "tools.bench.training.replica", "--one", strategy, "--json", str(place)]
        command += ["--megabytes", str(megabytes), "--steps", str(steps), "--threads", str(threads)]
        found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return found
    finally:
        shutil.rmtree(place)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--megabytes", type=click.IntRange(1), default=90, help="of weights and moments (default 90)")
@click.option("--steps", type=click.IntRange(1), default=40, help="of each run (default 40)")
@click.option("--rounds", type=click.IntRange(1), default=3, help="runs of each strategy, in turns (default 3)")
@click.option("--threads", type=click.IntRange(1), default=1, help="of torch (default 1)")
@click.option("--one", type=click.Choice(STRATEGIES), help="one run, in this process")
@click.option("--json", "as_json", is_flag=True)
def main(
    folder: Path | None, megabytes: int, steps: int, rounds: int, threads: int, one: str | None, as_json: bool
) -> None:
    """Run the command: see the module."""
    with tempfile.TemporaryDirectory(prefix="bench-replica-", dir=folder) as place:
        if one is not None:
            click.echo(json.dumps(measure(Path(place), one, megabytes, steps, threads)))
            return
        rows: dict[str, list[dict[str, float]]] = {strategy: [] for strategy in STRATEGIES}
        for _ in range(rounds):
            for strategy, found in rows.items():
                found.append(_apart(Path(place), strategy, megabytes, steps, threads))
    medians = {
        strategy: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for strategy, found in rows.items()
    }
    if as_json:
        click.echo(json.dumps(medians))
        return
    click.echo(f"{'strategy':10}{'loop':>9}{'beyond':>9}{'backward':>10}{'optimizer':>11}{'step':>8}   written whole")
    for strategy, row in medians.items():
        beyond = row["loop"] / medians["none"]["loop"] - 1
        click.echo(
            f"{strategy:10}{row['loop']:9.1f}{beyond:9.1%}{row['backward']:10.1f}{row['optimizer']:11.1f}"
            f"{row['step']:8.2f}{row['written']:10.0f}{row['whole']:6.0f}"
        )


if __name__ == "__main__":
    main()
