"""Measures the cost of `Checkpointer.step` to the trainer's thread beyond the copy: for many parameters, by strategy.

    python -m tools.bench.training.step --parameters 300 --parameters 3000 FOLDER

A model of so many parameters with AdamW, so that four tensors are saved for each. ``step`` is the time of the call,
``cpu`` its processor time in the trainer's own thread (its share of the copy included): on a machine that others use,
``cpu`` and not ``step`` is the cost of the call. ``hook`` is the Checkpointer's work at the end of ``optimizer.step``.

Beside it two copies of the same state. ``each``: the same tensors one by one, into tensors of the same shapes, in one
call of torch (``torch._foreach_copy_``), the minimum for a snapshot in torch; ``piece``: as many bytes in one piece by
one thread, the minimum for a copy of so many bytes, wherever they are. ``beyond`` is ``step`` + ``hook`` - ``each``,
and - ``piece``. Milliseconds: medians of steps that begin once the previous one is durable (least: the fastest of
them); with ``--busy`` the writer is still at work, and contends for the interpreter lock. Caches are equally cold for
all: before each call and each copy other memory is written. ``cpu`` beside a copy is its thread's processor time.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
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
    """One strategy and number of parameters; milliseconds. ``*_least`` are the fastest steps."""

    strategy: str
    parameters: int
    megabytes: float
    step: float
    step_least: float
    cpu: float
    cpu_least: float
    hook: float
    each: float
    each_least: float
    piece: float
    piece_least: float

    @property
    def beyond(self) -> tuple[float, float]:
        """The time of `step` and the hook beyond the copy of each tensor, and of one piece."""
        return self.step + self.hook - self.each, self.step + self.hook - self.piece


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
            cold()
            began, busy_before = time.perf_counter(), time.thread_time()
            checkpointer.step()
            calls.append(time.perf_counter() - began)
            python.append(time.thread_time() - busy_before)
    saved = saved_tensors(model, optimizer)
    nbytes = sum(one.nbytes for one in saved)
    one_by_one, whole = copied_each(saved), copied(nbytes)
    return Row(
        strategy,
        parameters,
        nbytes / 1e6,
        *_middle_and_least(calls[3:]),
        *_middle_and_least(python[3:]),
        statistics.median(hooks[3:]) * 1e3,
        *_middle_and_least(one_by_one),
        *_middle_and_least(whole),
    )


def _middle_and_least(seconds: Sequence[float]) -> tuple[float, float]:
    return statistics.median(seconds) * 1e3, min(seconds) * 1e3


def saved_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters, and the optimizer's state for them."""
    kept = [one for slots in optimizer.state.values() for one in slots.values()]
    return [*(one.detach() for one in model.parameters()), *kept]


def cold() -> None:
    """Write more memory than the caches hold, as a training step does."""
    _OTHER[:] += 1


_OTHER: Final = np.zeros(64 << 20, np.uint8)


def copied_each(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Seconds that torch takes to copy these into other touched tensors; nine times."""
    targets = [torch.zeros_like(one) for one in tensors]
    found = []
    for _ in range(9):
        cold()
        began = time.perf_counter()
        torch._foreach_copy_(targets, tensors)
        found.append(time.perf_counter() - began)
    return found


def copied(nbytes: int) -> list[float]:
    """Seconds of a copy of so many bytes from and to touched memory; nine times."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    found = []
    for _ in range(9):
        cold()
        began = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - began)
    return found


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--parameters", type=click.IntRange(2), multiple=True, default=(300, 3000))
@click.option("--strategy", type=click.Choice(STRATEGIES), multiple=True, default=STRATEGIES)
@click.option("--numbers", type=click.IntRange(1), default=2_000_000, help="in all parameters together")
@click.option("--steps", type=click.IntRange(4), default=20)
@click.option("--busy", is_flag=True, help="wait for no save between steps")
@click.option("--agent", is_flag=True, help="an agent saves")
@click.option("--json", "as_json", is_flag=True)
def main(
    folder: Path | None,
    parameters: tuple[int, ...],
    strategy: tuple[str, ...],
    numbers: int,
    steps: int,
    busy: bool,
    agent: bool,
    as_json: bool,
) -> None:
    """Run the command: see the module."""
    logging.basicConfig(level=logging.ERROR)
    if not as_json:
        heads = ("step", "least", "cpu", "least", "hook", "each", "least", "piece", "beyond each", "piece")
        click.echo(
            f"{'strategy':10}{'parameters':>11}{'MB':>7}" + "".join(f"{one:>{max(8, len(one) + 2)}}" for one in heads)
        )
    for count in parameters:
        for one in strategy:
            place = Path(tempfile.mkdtemp(prefix="bench-step-", dir=folder))
            try:
                row = measure(place, one, count, numbers, steps, busy=busy, **({"agent": True} if agent else {}))
            finally:
                shutil.rmtree(place)
            if as_json:
                click.echo(json.dumps(asdict(row) | {"beyond": row.beyond}))
            else:
                show(row)


def show(row: Row) -> None:
    """One line."""
    times = (row.step, row.step_least, row.cpu, row.cpu_least, row.hook, row.each, row.each_least, row.piece)
    text = "".join(f"{one:8.2f}" for one in times) + f"{row.beyond[0]:13.2f}{row.beyond[1]:8.2f}"
    click.echo(f"{row.strategy:10}{row.parameters:11}{row.megabytes:7.1f}{text}")


if __name__ == "__main__":
    main()
