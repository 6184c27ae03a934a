"""States as training scripts save them, and bit-exact comparison."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptstore


def training_state(seed: int = 0, width: int = 64) -> dict[str, Any]:
    """Model, AdamW, scheduler, random states, loader position: everything that a resume needs."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}, {"params": [model[2].bias]}],
        lr=1e-3,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        "loader": {"epoch": 1, "position": 12345, "order": np.arange(7, dtype=np.int64)[::-1]},
        "loss": float("nan"),
        "best": -float("inf"),
        "note": "step ünïcode",
        3: (None, True, 1, 1.0, -0.0, b"\x00\xff", np.float32(0.1), 2**70),
    }


def every_dtype() -> dict[str, Any]:
    """One tensor of every dtype, with awkward bits, shapes and layouts."""
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 float8_e4m3fn"
    names += " float8_e5m2 complex64 complex128"
    bits = torch.randint(0, 256, (16 * 12,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    state: dict[str, Any] = {}
    for name in names.split():
        dtype = getattr(torch, name)
        raw = (bits % 2 if name == "bool" else bits).clone()
        state[name] = raw.view(dtype).reshape(3, -1)
        state[f"{name}.zero-dim"] = raw.view(dtype)[5]
        state[f"{name}.empty"] = torch.empty(0, 3, dtype=dtype)
        state[f"{name}.transposed"] = raw.view(dtype).reshape(3, -1).t()
    state["numpy"] = {name: np.array([[1, 2], [3, 4]], dtype=name) for name in ("<f4", ">f4", "i2", "?", "c8", "u8")}
    return state


def same(left: Any, right: Any, where: str = "state") -> None:
    """Assert that two states have the same structure, types and bits."""
    assert type(left) is type(right), (where, type(left), type(right))
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert tensor_bytes(left) == tensor_bytes(right), where
    elif isinstance(left, np.ndarray):
        assert left.dtype.newbyteorder("=") == right.dtype.newbyteorder("="), where
        assert left.shape == right.shape, where
        assert left.astype(right.dtype).tobytes() == right.tobytes(), where
    elif isinstance(left, dict | OrderedDict | Counter):
        assert list(left) == list(right), where
        for key in left:
            same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (one, two) in enumerate(zip(left, right, strict=True)):
            same(one, two, f"{where}[{index}]")
    elif isinstance(left, float):
        assert np.float64(left).tobytes() == np.float64(right).tobytes(), where
    else:
        assert left == right, where


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bits in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def files(root: Path) -> list[Path]:
    """Every object of a store, sorted; names with a dot are not objects."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))


def fill(url: str | Path, *steps: int, parent: Any = "latest") -> ckptstore.Store:
    """Small checkpoints of these steps, by one writer."""
    store = ckptstore.open(url)
    with store.writer(parent=parent) as writer:
        for step in steps:
            writer.save({"value": torch.full((5,), float(step)), "step": step}, step=step)
    return store
