"""Runs of Lightning's `Trainer` with tiny modules, in this process or as a script:

    python -m tests.integrations.lightning_job CASE FOLDER LOSSES AT [FOLDER LOSSES AT ...]

A run for each FOLDER, one after the other. Its LOSSES get a line for each batch. CASE names a row of `CASES`. AT: raise
an error before that batch; ``end``: do not.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.integrations.lightning import StepCheckpoint
from tests.loader_workers import ended_workers

__all__ = ["CASES", "Manual", "Net", "Sharded", "Stop", "StoppedError", "fit", "lines_of", "main", "trainer_of"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "generator": {"generator": True},
    "stateful": {"stateful": True, "generator": True},
    "validation": {"val_check_interval": 0.5},
    "gradient": {"strategy": "gradient", "accumulate_grad_batches": 2},
    "limit": {"limit_train_batches": 5},
    "steps": {"max_epochs": -1, "max_steps": 25},
    "workers": {"workers": 2},
    "stateful-workers": {"workers": 2, "stateful": True, "accumulate_grad_batches": 2},
    "manual": {"manual": True, "strategy": "gradient"},
    "metrics": {"check_val_every_n_epoch": 2, "monitor": "val", "max_epochs": 4},
    "killed": {"accumulate_grad_batches": 2, "max_epochs": 4},
    "killed-workers": {"workers": 2, "accumulate_grad_batches": 2, "max_epochs": 4},
    "ddp": {"ranks": "ddp", "strategy": "gradient", "validated": False},
    "fsdp": {"ranks": "fsdp", "strategy": "gradient", "validated": False},
}


class StoppedError(RuntimeError):
    """What `Stop` raises."""


class Net(pl.LightningModule):
    """Dropout, BatchNorm, two schedules; writes each loss down. Draws a number whenever a run begins."""

    monitor = "loss_of_epoch"
    draws = True

    def __init__(self, losses: Path) -> None:
        super().__init__()
        hidden = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(16, 8))
        self.losses = losses

    def wrote(self, number: int, *losses: torch.Tensor) -> None:
        words = [self.current_epoch, number, self.global_step, *(one.item().hex() for one in losses)]
        with self.losses.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0]).square().mean()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.wrote(number, loss)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        # Only "val" may be missing, before the first validation.
        followed = {"monitor": self.monitor, "strict": self.monitor != "val"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        by_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}
        return [optimizer], [by_step, {"scheduler": plateau, **followed}]

    def on_train_start(self) -> None:
        if self.draws:
            torch.rand(1)

    def on_train_epoch_end(self) -> None:
        self.log("loss_of_epoch", self.trainer.callback_metrics["loss"])


class Manual(Net):
    """Two optimizers, one of which steps with every second batch."""

    def __init__(self, losses: Path) -> None:
        super().__init__(losses)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        loss, other = self.loss(batch), (self.other(batch[0]) - batch[0]).square().mean()
        for optimizer, one in ((first, loss), (second, other)):
            optimizer.zero_grad()
            self.manual_backward(one)
            if optimizer is first or number % 2:
                optimizer.step()
        self.wrote(number, loss, other)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        momentum = torch.optim.SGD(self.other.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2), momentum


class Sharded(Net):
    """FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Stop(pl.Callback):
    """Raises an error before a batch is trained."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx >= self.at:
            raise StoppedError(f"before batch {self.at}")


def lines_of(path: Path) -> list[str]:
    """The losses that were written down."""
    return path.read_text().splitlines() if path.exists() else []


def trainer_of(callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """A trainer that prints and writes nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 3}
    return pl.Trainer(callbacks=callbacks, **{**quiet, **options})


def fit(
    store: Any,
    losses: Path,
    *callbacks: pl.Callback,
    strategy: str = "delta",
    generator: bool = False,
    stateful: bool = False,
    workers: int = 0,
    manual: bool = False,
    monitor: str = Net.monitor,
    draws: bool = True,
    ranks: str = "",
    validated: bool = True,
    saved: dict[str, Any] | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train; after a `StoppedError`, return. `store`: None: without a `StepCheckpoint`. `saved`: its options."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(40 if ranks else 42, 8))
    kind: Any = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    own = torch.Generator().manual_seed(5) if generator else None
    loader = kind(data, batch_size=4, shuffle=True, num_workers=workers, generator=own)
    module: Net = Manual(losses) if manual else Net(losses)
    module.monitor, module.draws = monitor, draws
    if ranks:
        options |= {"devices": 2, "strategy": "ddp"}
    if ranks == "fsdp":
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        options["strategy"] = ModelParallelStrategy(**sizes, process_group_backend="gloo")  # type: ignore[arg-type]
        module = Sharded(losses)
    ours = [] if store is None else [StepCheckpoint(store, strategy=strategy, **(saved or {}))]
    trainer = trainer_of([*ours, *callbacks], **options)
    with contextlib.suppress(StoppedError), ended_workers():
        trainer.fit(module, loader, DataLoader(data, batch_size=8) if validated else None)
    return trainer


def main(case: str, *runs: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for folder, losses, at in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        fit(folder, Path(losses), *([Stop(int(at))] if at != "end" else []), **CASES[case])


if __name__ == "__main__":
    main(*sys.argv[1:])
