"""What a save at every step costs a run of Lightning: ``python -m tools.bench.training.lightning_steps``.

Runs of one module take turns: without saves; Lightning's ``ModelCheckpoint(every_n_train_steps=1)``, which keeps the
last file; the same through `CkptstoreIO`, waiting and asynchronous; `StepCheckpoint` with each strategy. A run's
times are those of its steps without the first five. Of all rounds together: the median, and the tenth percentile, which
other load on the machine disturbs less.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.integrations.lightning import CkptstoreIO, StepCheckpoint

__all__ = ["WAYS", "main", "measure"]

_FIRST: Final = 5


class _Steps(pl.Callback):
    """Notes when each batch begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


class _Net(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _own(folder: Path) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(folder / "ckpts", every_n_train_steps=1)]}


def _through_io(folder: Path, *, asynchronous: bool) -> dict[str, Any]:
    return {**_own(folder), "plugins": [CkptstoreIO(folder / "store", asynchronous=asynchronous)]}


def _callback(folder: Path, strategy: str) -> dict[str, Any]:
    return {"callbacks": [StepCheckpoint(folder / "store", strategy=strategy, keep_last=2)]}


WAYS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "no saves": lambda _: {"callbacks": []},
    "ModelCheckpoint": _own,
    "ModelCheckpoint, CkptstoreIO": lambda folder: _through_io(folder, asynchronous=False),
    "ModelCheckpoint, CkptstoreIO asynchronous": lambda folder: _through_io(folder, asynchronous=True),
    "StepCheckpoint full": lambda folder: _callback(folder, "full"),
    "StepCheckpoint delta": lambda folder: _callback(folder, "delta"),
    "StepCheckpoint gradient": lambda folder: _callback(folder, "gradient"),
}


def measure(way: str, width: int, steps: int) -> list[float]:
    """Seconds of each step of a run."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        options = WAYS[way](Path(folder))
        noted = _Steps()
        options["callbacks"] = [noted, *options["callbacks"]]
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        quiet |= {"enable_checkpointing": way.startswith("ModelCheckpoint"), "accelerator": "cpu", "devices": 1}
        trainer = pl.Trainer(max_steps=steps, **quiet, **options)
        trainer.fit(_Net(width), DataLoader(TensorDataset(torch.randn(16 * steps, width)), batch_size=16))
    times = noted.times[_FIRST:]
    return [after - before for before, after in itertools.pairwise(times)]


@click.command(help=__doc__)
@click.option("--width", default=1024, help="of two square layers")
@click.option("--steps", default=30)
@click.option("--rounds", default=3)
def main(width: int, steps: int, rounds: int) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS if turn % 2 else [*WAYS][::-1]:
            found[way] += measure(way, width, steps)
    size = 3 * 4 * 2 * (width * width + width)
    click.echo(f"{size / 1e6:.1f} MB of weights and moments; ms of a step in {rounds} runs of {steps} steps")
    base = [statistics.median(found["no saves"]), _tenth(found["no saves"])]
    click.echo(f"{'':44} {'median':>9} {'more':>8} {'10 %':>9} {'more':>8}")
    for way, times in found.items():
        took = [statistics.median(times), _tenth(times)]
        numbers = [f"{mine * 1e3:9.1f} {(mine - its) * 1e3:+8.1f}" for mine, its in zip(took, base, strict=True)]
        click.echo(f"{way:44} {' '.join(numbers)}")


def _tenth(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


if __name__ == "__main__":
    main()
