"""torch.save, as a careful user calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from tools.baselines import medium
from tools.baselines.strategy import Strategy
from tools.bench.storage.pagecache import fsync
from tools.bench.training.training_loop import Trainer

__all__ = ["STEP", "TorchSave", "newest", "write_file"]

STEP: Final = "step-{:08}"
"""The name of a step's file or folder."""


def write_file(path: Path, state: Any) -> None:
    """torch.save under another name, then sync, rename, sync the folder."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    medium.written(partial)
    fsync(partial)
    partial.rename(path)
    fsync(path.parent)


def newest(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """(step, path) of the files and folders that match a pattern, newest first."""
    return sorted(((int(path.stem.split("-")[1]), path) for path in folder.glob(pattern)), reverse=True)


class TorchSave(Strategy):
    """Training waits until the file is durable: nothing else would sync it."""

    label = "torch.save + fsync"

    def save(self, step: int) -> None:
        write_file(self.folder / f"{STEP.format(step)}.pt", self.trainer.state())
        self.ledger.done(step)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        for step, path in newest(folder, "step-*.pt"):
            trainer.load(torch.load(path, weights_only=True))
            return step
        return None
