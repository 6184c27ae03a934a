"""A training loop in this process that saves a step diff of its compressed gradient after every iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import ckptstore
from ckptstore import DiffOptions
from ckptstore.training import OptimizerStep, TopKHook
from tools.bench.training.training_loop import Shape, Trainer, digest

__all__ = ["DiffRun", "diff_run"]


@dataclass(slots=True)
class DiffRun:
    """A trainer, its store, and the seconds of each step.

    Attributes:
        iterations: of each step without its save.
        busy: likewise, processor seconds of this thread.
        stalls: of each call that saves.
        durable: from each call until that step was durable, by step.
        digests: of the trained state, by step; of those that were asked for.
    """

    trainer: Trainer
    store: ckptstore.Store
    writer: Any
    iterations: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    durable: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def take(self, steps: int, noted: tuple[int, ...] = (), *, wait: bool = False) -> None:
        """Train and save.

        Args:
            noted: steps whose digest is taken.
            wait: until each step is durable, before the next one begins.
        """
        for _ in range(steps):
            began, busy = time.perf_counter(), time.thread_time()
            self.trainer.backward()
            self.trainer.update()
            self.iterations.append(time.perf_counter() - began)
            self.busy.append(time.thread_time() - busy)
            step, hook = self.trainer.step, self.trainer.compressor
            gradients: Any = "grad" if hook is None else hook.consumed(list(self.trainer.model.parameters()))
            began = time.perf_counter()
            updates = OptimizerStep(self.trainer.optimizer, gradients=gradients)
            pending = self.writer.save_async(self.trainer.state(), step, updates=updates)
            self.stalls.append(time.perf_counter() - began)
            pending.when_done(lambda durable, step=step, began=began: self._done(durable, step, began))
            self.trainer.clear()
            if step in noted:
                self.digests[step] = digest(self.trainer.state())
            if wait:
                self.writer.wait()

    def _done(self, durable: bool, step: int, began: float) -> None:
        if durable:
            self.durable[step] = time.perf_counter() - began

    def settle(self) -> None:
        """Return when everything is durable."""
        self.writer.wait()

    def restored(self, step: int, threads: int | None = None) -> tuple[float, bool]:
        """(seconds to restore a step into a trainer, whether it is the trained one). Its digest was noted."""
        other = Trainer(self.trainer.shape, seed=2)
        began = time.perf_counter()
        other.load(self.store.load(step, framework="torch", threads=threads))
        seconds = time.perf_counter() - began
        return seconds, digest(other.state()) == self.digests[step]

    def distance(self, step: int) -> float:
        """How far the restored weights are from the present ones, relative to their norm."""
        other = Trainer(self.trainer.shape, seed=2)
        other.load(self.store.load(step, framework="torch"))
        mine, its = (
            torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
            for trainer in (other, self.trainer)
        )
        return float((mine - its).norm() / its.norm())

    def diffs(self, step: int) -> list[int]:
        """The bytes of each segment of step diffs that restoring a step reads."""
        described = self.store.describe(step)
        return [entry.size for entry, document in described if document.kind == "gradient"]


@contextmanager
def diff_run(
    folder: Path,
    shape: Shape,
    *,
    density: float | None = 0.01,
    full_every: int = 1000,
    batch: int = 1,
    accumulate: Literal["concatenate", "sum"] = "concatenate",
) -> Iterator[DiffRun]:
    """A run with a new store. `density`: of `TopKHook`; None: gradients are whole. The rest: see `DiffOptions`."""
    trainer = Trainer(shape)
    if density is not None:
        trainer.compressor = TopKHook(density, exact=False)
    folder.mkdir(parents=True)
    with ckptstore.open(folder / "store", create=True) as store:
        options = DiffOptions(full_every, batch, seconds=None, flush_on_sigterm=False, accumulate=accumulate)
        with store.writer(max_in_flight=2, poll_seconds=None, diffs=options) as writer:
            yield DiffRun(trainer, store, writer)
