"""Trains a small language model with everything that makes resuming hard, and has its whole state.

Dropout, BatchNorm or LayerNorm, gradient clipping, a learning rate schedule, two parameter groups, shuffled data with
noise from Python's and numpy's generators: the next step depends on all of it, so a state that lacks anything, or has
one bit wrong, gives other steps.
"""

from __future__ import annotations

import hashlib
import math
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ckptstore.formats import jsontext
from ckptstore.frameworks import bridge
from ckptstore.training import OptimizerStep
from ckptstore.training.optimizers.optimizer_step import Gradients

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a run. ``norm`` is ``batch`` or ``layer``; ``optimizer`` ``fused`` or ``foreach``."""

    norm: str = "batch"
    optimizer: str = "fused"
    gradients: Gradients = "grad"
    width: int = 64
    layers: int = 2
    context: int = 32
    batch: int = 8
    steps: int = 1000
    seed: int = 11


class _Norm(nn.Module):
    """Normalises the features of every position: over the batch, or each separately."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.inner: nn.Module = nn.BatchNorm1d(width) if kind == "batch" else nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.inner(x.flatten(0, 1))
        assert isinstance(flat, Tensor)
        return flat.view_as(x)


class _Block(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(width, norm), _Norm(width, norm)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, width // 4).transpose(1, 2)
            for part in self.attention(self.norm1(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class _Model(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is tied to the output."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, recipe.width)
        self.position = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.Sequential(*(_Block(recipe.width, recipe.norm) for _ in range(recipe.layers)))
        self.norm = _Norm(recipe.width, recipe.norm)
        self.head = nn.Linear(recipe.width, 128, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        logits = self.head(self.norm(self.blocks(x)))
        assert isinstance(logits, Tensor)
        return logits


class Training:
    """One run. The constructor seeds torch, numpy and Python, and sets torch to one thread."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(recipe.seed)
        np.random.seed(recipe.seed)
        random.seed(recipe.seed)
        self.recipe = recipe
        self.text = _text()
        self.model = _Model(recipe)
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in weights if p.dim() > 1], "weight_decay": 0.1, "lr": 2e-3},
                {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3, "betas": (0.9, 0.98)},
            ],
            betas=(0.9, 0.95),
            **{recipe.optimizer: True},
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _warmup_then_cosine(recipe.steps))
        self.shuffler = np.random.default_rng(recipe.seed)
        self.order = np.empty(0, np.int64)
        self.position = 0
        self.step = 0
        self.loss = math.nan

    def run_step(self) -> OptimizerStep:
        """Take one optimizer step -> the updates for the save."""
        inputs, targets = self._next_batch()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates it so
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        updates = OptimizerStep(self.optimizer, gradients=self.recipe.gradients)
        self.schedule.step()
        self.step += 1
        self.loss = loss.item()
        return updates

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Windows in shuffled order, each shifted a little, some of their bytes replaced."""
        size = self.recipe.context
        while len(self.order) - self.position < self.recipe.batch:
            self.order = self.shuffler.permutation(len(self.text) // size - 2)
            self.position = 0
        rows = self.order[self.position : self.position + self.recipe.batch]
        self.position += self.recipe.batch
        starts = [int(row) * size + random.randrange(size) for row in rows]
        windows = np.stack([self.text[start : start + size + 1] for start in starts])
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:]
        noisy = np.random.random(inputs.shape) < 0.02
        inputs[noisy] = np.random.randint(0, 128, int(noisy.sum()))
        return torch.from_numpy(inputs), torch.from_numpy(targets.copy())

    def state(self) -> State:
        """Everything the next step depends on. Tensors are the live ones, not copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "python": random.getstate(),
                "shuffler": self.shuffler.bit_generator.state,
            },
            "data": {"order": self.order, "position": self.position},
            "step": self.step,
            "loss": self.loss,
        }

    def load(self, state: State) -> None:
        """Continue from a stored state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"]["torch"])
        np.random.set_state(state["rng"]["numpy"])
        random.setstate(state["rng"]["python"])
        self.shuffler.bit_generator.state = state["rng"]["shuffler"]
        self.order, self.position = state["data"]["order"], state["data"]["position"]
        self.step, self.loss = state["step"], state["loss"]


def fingerprint(state: State) -> str:
    """A digest of every bit of a state: the tree with all its values, and all tensors' names, dtypes, shapes, bytes."""
    flat = bridge.flattened(state)
    digest = hashlib.blake2b(jsontext.dumps(flat.tree), digest_size=16)
    for name, source in flat.tensors.items():
        image = np.empty(source.nbytes, np.uint8)
        source.read(0, image)
        digest.update(f"{name} {source.dtype} {source.shape}".encode())
        digest.update(image.data)
    return digest.hexdigest()


def _text() -> Any:
    """Source text of Python's own library, as numbers below 128."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    return (np.frombuffer(text, np.uint8) & 127).astype(np.int64)


def _warmup_then_cosine(steps: int) -> Any:
    def factor(step: int) -> float:
        if step < 20:
            return (step + 1) / 20
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 20) / max(1, steps - 20))))

    return factor
