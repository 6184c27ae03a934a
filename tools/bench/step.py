"""What `Checkpointer.step` costs the trainer's thread beyond the copy: for many parameters, by strategy.

    python -m tools.bench.step --parameters 300 --parameters 3000 FOLDER

A model of so many parameters with AdamW, so that four tensors are saved for each. ``step`` is the time of the call,
``hook`` what the Checkpointer does at the end of ``optimizer.step``, ``copy`` a copy of as many bytes in one piece, by
one thread; ``beyond`` is ``step`` + ``hook`` - ``copy``. Medians, in milliseconds, of steps that begin when the one
before is durable; with ``--busy`` the writer is still at work, and the interpreter lock is taken in turns with it.
``cpu`` is what the call took of the trainer's own thread, its share of the copy included: on a machine that others use,
that and not ``step`` says what the call costs.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch

from ckptstore.training import Checkpointer

__all__ = ["Row", "main", "measure"]

STRATEGIES: Final = ("full", "delta", "gradient")


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy and number of parameters; milliseconds."""

    strategy: str
    parameters: int
    megabytes: float
    step: float
    hook: float
    copy: float
    beyond: float
    python: float


def model_of(parameters: int, numbers: int) -> torch.nn.Module:
    """A model with `parameters` parameters and about `numbers` numbers in them, eight layers to a block."""
    width = max(1, math.isqrt(2 * numbers // parameters))
    layers = [torch.nn.Linear(width, width) for _ in range(parameters // 2)]
    return torch.nn.Sequential(*(torch.nn.Sequential(*layers[at : at + 8]) for at in range(0, len(layers), 8)))


def measure(
    folder: Path, strategy: str, parameters: int, numbers: int, steps: int, *, busy: bool, **options: Any
) -> Row:
    """Medians over `steps` steps, the first three of which do not count."""
    torch.manual_seed(0)
    model = model_of(parameters, numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks: list[float] = []
    note = lambda *_: marks.append(time.perf_counter())  # noqa: E731
    optimizer.register_step_post_hook(note)
    calls: list[float] = []
    python: list[float] = []
    hooks: list[float] = []
    with Checkpointer(folder / "store", model=model, optimizer=optimizer, strategy=strategy, **options) as checkpointer:
        checkpointer.resume()
        optimizer.register_step_post_hook(note)
        for _ in range(steps):
            for one in model.parameters():
                one.grad = torch.randn_like(one)
            marks.clear()
            optimizer.step()
            hooks.append(marks[1] - marks[0])
            if not busy:
                checkpointer.wait()
                time.sleep(0.02)
            began, busy_before = time.perf_counter(), time.thread_time()
            checkpointer.step()
            calls.append(time.perf_counter() - began)
            python.append(time.thread_time() - busy_before)
    nbytes = sum(one.nbytes for one in model.parameters()) * 3 + 4 * parameters
    step, hook = statistics.median(calls[3:]) * 1e3, statistics.median(hooks[3:]) * 1e3
    copy = copied(nbytes) * 1e3
    cpu = statistics.median(python[3:]) * 1e3
    return Row(strategy, parameters, nbytes / 1e6, step, hook, copy, step + hook - copy, cpu)


def copied(nbytes: int) -> float:
    """Seconds that a copy of so many bytes takes, from and to memory that is touched; the median of nine."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    found = []
    for _ in range(9):
        began = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--parameters", type=click.IntRange(2), multiple=True, default=(300, 3000))
@click.option("--strategy", type=click.Choice(STRATEGIES), multiple=True, default=STRATEGIES)
@click.option("--numbers", type=click.IntRange(1), default=2_000_000, help="in all parameters together")
@click.option("--steps", type=click.IntRange(4), default=20)
@click.option("--busy", is_flag=True, help="wait for no save between steps")
@click.option("--json", "as_json", is_flag=True)
def main(
    folder: Path | None,
    parameters: tuple[int, ...],
    strategy: tuple[str, ...],
    numbers: int,
    steps: int,
    busy: bool,
    as_json: bool,
) -> None:
    """See the module."""
    logging.basicConfig(level=logging.ERROR)
    if not as_json:
        click.echo(
            f"{'strategy':10}{'parameters':>11}{'MB':>8}{'step':>9}{'hook':>9}{'copy':>9}{'beyond':>9}{'cpu':>9}   ms"
        )
    for count in parameters:
        for one in strategy:
            place = Path(tempfile.mkdtemp(prefix="bench-step-", dir=folder))
            try:
                row = measure(place, one, count, numbers, steps, busy=busy)
            finally:
                shutil.rmtree(place)
            if as_json:
                click.echo(json.dumps(asdict(row)))
            else:
                click.echo(
                    f"{row.strategy:10}{row.parameters:11}{row.megabytes:8.1f}{row.step:9.2f}{row.hook:9.2f}"
                    f"{row.copy:9.2f}{row.beyond:9.2f}{row.python:9.2f}"
                )


if __name__ == "__main__":
    main()
