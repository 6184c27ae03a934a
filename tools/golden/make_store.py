"""A golden store: later versions must restore every step of it, bit for bit.

It has a little of everything that writers write: two terms of which one forks, fulls (raw and compressed), deltas, step
diffs of every kind, a lossy one, a merge, a retired checkpoint, tags, a fold.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, Update
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.log import fold_writer
from ckptstore.maintenance.merge import merge
from ckptstore.store import Store
from tools.golden.still import still

ADAM = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
SGD = optim.SGD(momentum=0.9, nesterov=True)
SHAPES = {"wide": (30, 41), "bias": (41,)}


class Run:
    """A training run with whole numbers, so that it is the same on every machine."""

    def __init__(self) -> None:
        self.step = 0
        self.adam = {name: [_pattern(slot, shape, 1e-2) for slot in range(2)] for name, shape in SHAPES.items()}
        for name, shape in SHAPES.items():
            self.adam[name].append(np.abs(_pattern(2, shape, 1e-4)))
        self.sgd = [_pattern(3, (50,), 1e-1), np.zeros(50, "<f4")]
        self.gradients: dict[str, Any] = {}

    def train(self, kind: str) -> list[Update]:
        """Take one step -> the optimizers' updates. ``kind``: of the gradients that the writer gets."""
        self.step += 1
        numbers = optim.Step(count=self.step, lr=1e-3, clip=0.5)
        updates = []
        for name, state in self.adam.items():
            gradient: Any = _pattern(self.step, SHAPES[name], 1e-3)
            if kind == "bf16":
                gradient = gradient.astype(ml_dtypes.bfloat16)
            optim.advance(ADAM.rule(numbers), state, gradient)
            given: Any = None if kind == "none" else NumpySource(gradient)
            slots = (f"master.{name}", f"m.{name}", f"v.{name}")
            updates.append(Update(slots, ADAM, numbers, given))
        where = np.arange(self.step % 5, 50, 7)
        sparse = optim.SparseGradient(where, _pattern(self.step, (len(where),), 1e-2), 50)
        optim.advance(SGD.rule(numbers), self.sgd, sparse.dense())
        updates.append(Update(("sgd.weight", "sgd.momentum"), SGD, numbers, sparse))
        return updates

    def state(self) -> dict[str, Any]:
        """The whole state, in new memory."""
        slots = {part: {name: self.adam[name][slot].copy() for name in SHAPES} for slot, part in enumerate("wmv")}
        return {
            "model": {name: array.astype(ml_dtypes.bfloat16) for name, array in slots["w"].items()},
            "master": slots["w"],
            "m": slots["m"],
            "v": slots["v"],
            "sgd": {"weight": self.sgd[0].copy(), "momentum": self.sgd[1].copy()},
            "step": self.step,
            "text": "κ",
            "odd": np.array([float("nan"), -0.0, 5e-324]),
        }


def _pattern(seed: int, shape: tuple[int, ...], scale: float) -> Any:
    count = int(np.prod(shape))
    numbers = (np.arange(count, dtype=np.int64) * 7919 + seed * 104729) % 2003 - 1001
    return (numbers.astype("<f4") * np.float32(scale / 1001)).astype("<f4").reshape(shape)


def fill(store: Store) -> None:
    """Write everything that the module's docstring names."""
    run = Run()
    with store.writer(deltas=DeltaOptions(interval=2, compress_fulls=False), poll_seconds=None) as writer:
        for step in range(1, 6):
            run.train("none")
            writer.save(run.state(), step)
        writer.tag("five", 5)
    with store.writer(parent=4, diffs=DiffOptions(full_every=9, batch=3, seconds=None), poll_seconds=None) as writer:
        for step, kind in enumerate(["none", "none", "fp32", "bf16", "none", "fp32", "bf16", "none"], 6):
            updates = run.train(kind)
            writer.save_async(run.state(), step, updates=updates)
    with store.writer(deltas=DeltaOptions(interval=1, compress_fulls=True), poll_seconds=None) as writer:
        for step in (14, 15):
            run.train("none")
            writer.save(run.state(), step)
    with store.writer(diffs=DiffOptions(batch=2, accumulate="sum", seconds=None), poll_seconds=None) as writer:
        for step in (16, 17, 18):
            updates = run.train("fp32")
            writer.save_async(run.state(), step, updates=updates)
    merge(store.journal, "7@2..12@2", keep_steps=True, take_over=True)
    merge(store.journal, "2@1..3@1", take_over=True)
    fold_writer.fold(store.journal, store.view())


def expectations(store: Store) -> dict[str, Any]:
    """REF -> sha256 of every tensor's bytes, and the tree."""
    found = {}
    for info in store.checkpoints():
        tensors = {name: hashlib.sha256(data).hexdigest() for name, data in store.read_tensors(info.ref)}
        found[info.ref] = {"state": info.state, "kind": info.kind, "lossy": info.lossy, "tree": store.tree(info.ref)}
        found[info.ref]["tensors"] = tensors
    return found


def main(folder: Path) -> None:
    """Write the store, and beside it ``NAME.json`` with its expected contents."""
    with still(1):
        store = ckptstore.open(folder, create=True)
        fill(store)
    folder.with_suffix(".json").write_text(json.dumps(expectations(store), indent=1, sort_keys=True) + "\n")
