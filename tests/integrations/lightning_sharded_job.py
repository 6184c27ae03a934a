"""A rank of a run of Lightning with FSDP2, which writes its checkpoints as folders of torch.distributed.checkpoint.

python -m tests.integrations.lightning_sharded_job FOLDER NAME EPOCHS [CKPT]
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.lightning_job import Sharded, trainer_of


class Module(Sharded):
    """Without anything random."""

    draws = False

    def __init__(self, losses: Path) -> None:
        super().__init__(losses)
        self.net[2] = torch.nn.Dropout(0.0)


def main(folder: str, name: str, epochs: str, ckpt: str | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategy = ModelParallelStrategy(**sizes, process_group_backend="gloo")  # type: ignore[arg-type]
    saved = ModelCheckpoint(Path(folder, name), save_top_k=-1)
    trainer = trainer_of([saved], enable_checkpointing=True, max_epochs=int(epochs), devices=2, strategy=strategy)
    loader = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4)
    trainer.fit(Module(Path(folder, f"{name}{os.environ['LOCAL_RANK']}.txt")), loader, ckpt_path=ckpt)


if __name__ == "__main__":
    main(*sys.argv[1:])
