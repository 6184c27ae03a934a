"""A run of Lightning that can be killed: ``python train.py FOLDER [--epochs 3]``. Run it again: it continues.

The two lines that matter are marked. FOLDER/steps holds every optimizer step. FOLDER/best holds what Lightning's
`ModelCheckpoint` saved; FOLDER/names has a small file for each of its checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.integrations.lightning import CkptstoreIO, StepCheckpoint


class Regression(pl.LightningModule):
    """Learns a linear map, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    pl.seed_everything(1)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs @ torch.randn(16, 16))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            StepCheckpoint(options.folder / "steps", strategy="gradient"),  # every step; continues by itself
            ModelCheckpoint(options.folder / "names", monitor="val_loss", save_top_k=2),
        ],
        plugins=[CkptstoreIO(options.folder / "best")],  # what ModelCheckpoint saves
    )
    module = Regression()
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in module.parameters())).hexdigest()
    print(f"step {trainer.global_step}: weights {digest[:16]}")


if __name__ == "__main__":
    main()
