"""The trainer's process: a small model under AdamW, every step saved, a full every hundred and diffs between."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptstore
from ckptstore.training import OptimizerStep
from tools.long_run.promised import Rules, Saved, digest

__all__ = ["FULL_EVERY", "TAG_EVERY", "train"]

FULL_EVERY = 100
TAG_EVERY = 777


class _Run:
    """Learns a fixed function of 32 numbers."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.target = torch.randn(32, 8)
        self.generator = torch.Generator().manual_seed(12)

    def step(self) -> float:
        inputs = torch.randn(64, 32, generator=self.generator)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), torch.tanh(inputs @ self.target))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self, step: int) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}


def train(url: str, out: Path, steps: int, seconds: float | None, rules: Rules, batch: int) -> None:
    """Train and save at most `steps` steps, `batch` in a record. Each save is noted in `out` first."""
    torch.set_num_threads(1)
    run, end = _Run(), None if seconds is None else time.monotonic() + seconds
    store = ckptstore.open(url, create=True)
    diffs = ckptstore.DiffOptions(full_every=FULL_EVERY, batch=batch, seconds=5.0)
    writer = store.writer(keep=rules.texts(), diffs=diffs, poll_seconds=1.0)
    with (out / "saved.jsonl").open("w") as book, writer:
        for step in range(1, steps + 1):
            loss = run.step()
            state = run.state(step)
            tag = f"at-{step}" if step % TAG_EVERY == 0 or step == steps // 3 else None
            book.write(json.dumps(asdict(Saved(step, digest(state), loss, tag))) + "\n")
            book.flush()
            tags = () if tag is None else (tag,)
            writer.save_async(state, step, updates=OptimizerStep(run.optimizer), metadata={"loss": loss}, tags=tags)
            if end is not None and time.monotonic() > end:
                break
