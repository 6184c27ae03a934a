"""A folder like that of Hugging Face's Trainer, made by the same calls, without transformers."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

STEPS = 5


class TrainingArguments:
    """The content of ``training_args.bin``: an object of a class, which only its own code can restore."""

    def __init__(self) -> None:
        self.learning_rate = 1e-3


def _warmup(step: int, *, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup)


def write_trainer_folder(folder: Path, *, sharded: bool = False, ranks: int = 1, step: int = STEPS) -> dict[str, Any]:
    """Train a little and save; returns the sources of the parts, under the keys of the imported state."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_warmup, warmup=3))
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
    folder.mkdir(parents=True)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _save_weights(folder, weights, sharded)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "growth_interval": 2000, "_growth_tracker": 3}
    torch.save(scaler, folder / "scaler.pt")
    rng = {}
    for rank in range(ranks):
        rng[rank] = _random_states(rank)
        torch.save(rng[rank], folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    state = {
        "epoch": 0.5,
        "global_step": step,
        "log_history": [{"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 1e-3, "step": step}],
        "best_metric": None,
        "is_world_process_zero": True,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}},
    }
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text('{"hidden_size": 4}\n')
    torch.save(TrainingArguments(), folder / "training_args.bin")
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "scaler": scaler,
        "scheduler": schedule.state_dict(),
        "rng": rng,
        "trainer_state": json.loads((folder / "trainer_state.json").read_text()),
        "files": {"config.json": np.frombuffer((folder / "config.json").read_bytes(), np.uint8)},
    }


def _save_weights(folder: Path, weights: dict[str, torch.Tensor], sharded: bool) -> None:
    if not sharded:
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    where = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_states(rank: int) -> dict[str, Any]:
    numbers = np.random.RandomState(rank)
    numbers.standard_normal(3)
    return {
        "python": random.Random(rank).getstate(),
        "numpy": numbers.get_state(),
        "cpu": torch.Generator().manual_seed(rank).get_state(),
        "cuda": [torch.Generator().manual_seed(rank + 7).get_state()[:16]],
    }
