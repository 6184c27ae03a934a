"""Training as far as a store can tell, without torch: parameters that AdamW updates, and step diffs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckptstore
from ckptstore import DiffOptions, Update
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource

ADAM = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
SIZES = {"wide": (102, 700), "bias": (700,), "norm": (3,), "one": (1,)}
"""A tensor that is encoded alone (more than 256 KiB), and some that are encoded together."""
LARGE = SIZES | {"wide": (300, 700)}
"""Sizes for which a chain costs more than the headers of its segments."""


class Trainer:
    """Training as far as a store can tell: parameters that AdamW updates, a bf16 copy, buffers, counters."""

    def __init__(self, seed: int = 0, sizes: dict[str, tuple[int, ...]] = SIZES) -> None:
        self.rng = np.random.default_rng(seed)
        self.step = 0
        self.weights = {name: self.rng.normal(0, 0.02, shape).astype("<f4") for name, shape in sizes.items()}
        self.m = {name: np.zeros(shape, "<f4") for name, shape in sizes.items()}
        self.v = {name: np.zeros(shape, "<f4") for name, shape in sizes.items()}
        self.buffer = np.zeros(40)
        self.gradients: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        copy = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in self.weights.items()}
        state = {"model": copy, "master": self.weights, "m": self.m, "v": self.v, "buffer": self.buffer}
        return {**state, "step": self.step, "rng": self.rng.bit_generator.state}

    def frozen(self) -> dict[str, Any]:
        """A copy of the present state, for comparison."""
        return {
            name: {key: array.copy() for key, array in part.items()} if name in ("model", "master", "m", "v") else part
            for name, part in self.state().items()
        } | {"buffer": self.buffer.copy()}

    def train(self, keep: float | None = None) -> None:
        """Take one step; with `keep` only with the largest share of each gradient."""
        self.step += 1
        rule = ADAM.rule(self.numbers())
        for name, weight in self.weights.items():
            gradient = self.rng.normal(0, 1e-3, weight.shape).astype("<f4")
            self.gradients[name] = NumpySource(gradient)
            if keep is not None:
                flat = gradient.reshape(-1)
                where = np.sort(np.argsort(-np.abs(flat))[: max(1, int(keep * flat.size))])
                sparse = optim.SparseGradient(where, flat[where], flat.size)
                self.gradients[name] = sparse
                gradient = sparse.dense()
            optim.advance(rule, [weight, self.m[name], self.v[name]], gradient)
        self.buffer[self.step % 40] += self.rng.normal()

    def numbers(self) -> optim.Step:
        return optim.Step(count=max(1, self.step), lr=1e-3 / (1 + self.step), clip=0.7)

    def updates(self, gradients: bool = True) -> list[Update]:
        return [
            Update(
                (f"master.{name}", f"m.{name}", f"v.{name}"),
                ADAM,
                self.numbers(),
                self.gradients[name] if gradients else None,
            )
            for name in self.weights
        ]


def fill(path: Path, options: DiffOptions, steps: int, **how: Any) -> tuple[ckptstore.Store, dict[int, Any]]:
    trainer, truth = Trainer(0, how.get("sizes", SIZES)), {}
    store = ckptstore.open(path, create=True)
    with store.writer(diffs=options) as writer:
        for step in range(1, steps + 1):
            trainer.train(how.get("keep"))
            truth[step] = trainer.frozen()
            updates = trainer.updates(how.get("gradients", True))
            writer.save_async(trainer.state(), step, updates=updates)
    return store, truth
