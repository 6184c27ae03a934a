"""Measures the cost of saving to a training loop: blocking, `save_async`, and layer by layer, with one optimizer and in
backward.

    python -m tools.bench.training.layerwise --width 512 --blocks 6 --every 3 --saves 4 --rounds 3 FOLDER

A small language model on the CPU. Every way trains the same model in the same process, ways interleaved, each round in
a rotated order; the first save, which touches fresh memory, does not count. The loss of a save is the loop's time
beyond that of the loop without saves, divided by the number of saves; the wait for the last checkpoint is not included.
``stall`` is the waiting time of training in calls and at gates: the rest of the loss is copies and writes that take
cores.

With ``--pin`` the trainer has the first core to itself and the writer's threads the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch

import ckptstore
from ckptstore.training import LayerwiseSnapshots
from tools.bench import machine

__all__ = ["WAYS", "Row", "main", "measure"]

WAYS: Final = tuple(
    f"{optimizer}: {way}"
    for optimizer in ("one AdamW", "AdamW in backward")
    for way in ("no saves", "save", "save_async", "layer by layer", "layer by layer, begun", "layer by layer, direct")
)
_VOCABULARY: Final = 2000


@dataclass(frozen=True, slots=True)
class Settings:
    """The model and the loop."""

    width: int
    blocks: int
    rows: int
    every: int
    saves: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One way, medians of its rounds: seconds of the loop, and of each save its loss and stall."""

    way: str
    loops: tuple[float, ...]
    loop: float
    loss: float
    stall: float
    copying: float


class _Training:
    def __init__(self, settings: Settings, *, in_backward: bool) -> None:
        torch.manual_seed(0)
        width = settings.width
        layers: list[torch.nn.Module] = [torch.nn.Embedding(_VOCABULARY, width)]
        for _ in range(settings.blocks):
            layers += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, _VOCABULARY))
        self.rows = settings.rows
        parameters = list(self.model.parameters())
        groups = [[one] for one in parameters] if in_backward else [parameters]
        self.optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=True) for group in groups]
        self.in_backward = in_backward
        if in_backward:
            for parameter, optimizer in zip(parameters, self.optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(_stepping(optimizer))

    def step(self) -> None:
        tokens = torch.randint(0, _VOCABULARY, (self.rows,))
        torch.nn.functional.cross_entropy(self.model(tokens), tokens.roll(1)).backward()
        if not self.in_backward:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers]}


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


@contextlib.contextmanager
def _cores(numbers: set[int]) -> Iterator[None]:
    """Pin threads that start inside, and this thread meanwhile, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _loop(way: str, settings: Settings, url: str) -> tuple[float, float, float]:
    """Run one loop -> its seconds, those that training waited for saves, and those of copying layers."""
    optimizer, _, how = way.partition(": ")
    training = _Training(settings, in_backward="backward" in optimizer)
    every = sorted(os.sched_getaffinity(0))
    first, others = (set(every[:1]), set(every[1:])) if settings.pin and len(every) > 1 else (set(every), set(every))
    with _cores(others):
        writer = ckptstore.open(url).writer(poll_seconds=None, max_in_flight=2)
    mode: Any = "direct" if how.endswith("direct") else "host"
    layered = how.startswith("layer")
    with writer, LayerwiseSnapshots(writer, training.model, training.optimizers, training.state, mode=mode) as layers:
        training.step()
        if how != "no saves":
            with _cores(others):  # the first save starts threads, and touches memory
                for step in (1, 2):  # of two snapshots in flight
                    layers.save(step) if layered else writer.save_async(training.state(), step)
                writer.wait()
        with _cores(first):
            waited = -_waited(layers)
            copied = layers.report().copying_seconds
            began = time.monotonic()
            for step in range(3, 3 + settings.every * settings.saves):
                saves = (step - 2) % settings.every == 0
                if saves and layered and how != "layer by layer":
                    layers.begin(step)
                training.step()
                before = time.monotonic()
                if saves and layered:
                    layers.save(step)
                elif saves and how == "save_async":
                    writer.save_async(training.state(), step)
                elif saves and how == "save":
                    writer.save(training.state(), step)
                waited += 0.0 if layered or how == "no saves" else time.monotonic() - before
            seconds = time.monotonic() - began
        waited += _waited(layers)
        writer.wait()
        return seconds, waited, layers.report().copying_seconds - copied


def _waited(layers: LayerwiseSnapshots) -> float:
    report = layers.report()
    return report.call_seconds + report.waited_seconds


def measure(settings: Settings, rounds: int, folder: Path, shared: Path | None) -> list[Row]:
    """Measure every way in every round.

    Args:
        folder: where stores are made, and deleted.
        shared: where those on (simulated) persistent memory are; None: skip that way.
    """
    ways = [way for way in WAYS if shared is not None or not way.endswith("direct")]
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for turn in range(rounds):
        for number in range(len(ways)):
            way = ways[(number + turn) % len(ways)]
            direct = way.endswith("direct")
            place = Path(tempfile.mkdtemp(dir=shared if direct else folder))
            try:
                found[way].append(_loop(way, settings, f"pmem://{place}/s" if direct else str(place / "s")))
            finally:
                shutil.rmtree(place)
    rows = []
    for way, loops in found.items():
        base = found[way.partition(": ")[0] + ": no saves"]
        lost = [(one[0] - none[0]) / settings.saves for one, none in zip(loops, base, strict=True)]
        rows.append(
            Row(
                way,
                tuple(one[0] for one in loops),
                statistics.median(one[0] for one in loops),
                statistics.median(lost),
                statistics.median(one[1] for one in loops) / settings.saves,
                statistics.median(one[2] for one in loops) / settings.saves,
            )
        )
    return rows


@click.command()
@click.option("--width", default=512, show_default=True, type=click.IntRange(min=8))
@click.option("--blocks", default=6, show_default=True, type=click.IntRange(min=1))
@click.option("--rows", default=256, show_default=True, type=click.IntRange(min=1), help="Tokens in a step.")
@click.option("--every", default=3, show_default=True, type=click.IntRange(min=1), help="Steps from save to save.")
@click.option("--saves", default=4, show_default=True, type=click.IntRange(min=1), help="In each loop.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--pin/--no-pin", default=True, show_default=True)
@click.option("--shared", default=Path("/dev/shm"), type=click.Path(path_type=Path), help="A tmpfs, for pmem://.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def main(rounds: int, shared: Path, as_json: bool, folder: Path, **options: Any) -> None:
    """Train and save in every way, in FOLDER."""
    settings = Settings(**options)
    torch.set_num_threads(1)
    nbytes = 3 * sum(one.nbytes for one in _Training(settings, in_backward=False).model.parameters())
    rows = measure(settings, rounds, folder, shared if shared.is_dir() else None)
    described = machine.describe(folder)
    if as_json:
        document = {"benchmark": "layerwise", "machine": described, "settings": asdict(settings), "state": nbytes}
        click.echo(json.dumps({**document, "results": [asdict(row) for row in rows]}))
        return
    every = f"a save every {settings.every} steps"
    click.echo(f"a state of {nbytes / 1e6:.0f} MB, {every}; medians of {rounds}; {described['cpu']}")
    for row in rows:
        click.echo(
            f"{row.way:42} loop {row.loop:7.3f} s  loss {1e3 * row.loss:8.1f} ms a save  "
            f"stall {1e3 * row.stall:7.1f} ms  copying {1e3 * row.copying:7.1f} ms"
        )


if __name__ == "__main__":
    main()
