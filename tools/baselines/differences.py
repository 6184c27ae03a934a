"""Differences of two states: without loss, and as LowDiff's paper compares itself with them (*naive DC*)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch
import zstandard

from tools.baselines.strategy import Ledger, Options, Strategy
from tools.baselines.torch_save import STEP, newest, write_file
from tools.bench.training.training_loop import State, Trainer, mapped, tensors

__all__ = ["NaiveDifferences", "NaiveTopK"]

DENSITY: Final = 0.01
"""The part of each weight's change that `NaiveTopK` keeps."""


class NaiveDifferences(Strategy):
    """Check-N-Run's mechanism, without its loss: the exclusive or of two states, byte planes, zstd; fulls in between.

    The state is copied while training waits; the difference is computed and written beside training, one at a time.
    """

    label = "naive differences"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self._pool = ThreadPoolExecutor(1)
        self._buffers: list[State] = []
        self._saves = 0
        self._last: int | None = None
        self._under_way: Future[None] | None = None

    def save(self, step: int) -> None:
        self.settle()
        state = self.trainer.state()
        if len(self._buffers) < 2:
            self._buffers.append(mapped(state, lambda _name, tensor: torch.empty_like(tensor, device="cpu")))
        before, now = self._buffers[0], self._buffers[-1]
        copies = dict(tensors(now))
        for name, tensor in tensors(state):
            copies[name].copy_(tensor)
        whole = mapped(state, lambda name, _tensor: copies[name])
        full = self._last is None or self._saves % self.options.full_every == 0
        self._under_way = self._pool.submit(self._persist, step, whole, None if full else self._last, before)
        self._saves, self._last = self._saves + 1, step
        self._buffers.reverse()  # the next one overwrites the older of the two

    def _persist(self, step: int, whole: State, base: int | None, before: State) -> None:
        if base is None:
            write_file(self.folder / f"{STEP.format(step)}.full", whole)
        else:
            document = self.difference(whole, before)
            write_file(self.folder / f"{STEP.format(step)}.diff", {"base": base, "state": document})
        self.ledger.done(step)

    def difference(self, now: State, before: State) -> State:
        """What is stored of a state, given the one before."""
        older = dict(tensors(before))
        return mapped(now, lambda name, tensor: _packed(tensor, older[name]))

    @staticmethod
    def applied(state: State, diff: State) -> State:
        """The state after `state`."""
        older = dict(tensors(state))
        return mapped(diff, lambda name, packed: _unpacked(packed, older[name]))

    def settle(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        super().close()
        self._pool.shutdown()

    @classmethod
    def restore(cls, folder: Path, trainer: Trainer) -> int | None:
        wanted = newest(folder, "step-*.full") + newest(folder, "step-*.diff")
        if not wanted:
            return None
        step, path = max(wanted)
        diffs: list[State] = []
        while path.suffix == ".diff":
            document = torch.load(path, weights_only=True)
            diffs.append(document["state"])
            base = folder / STEP.format(document["base"])
            path = base.with_suffix(".full") if base.with_suffix(".full").exists() else base.with_suffix(".diff")
        state = torch.load(path, weights_only=True)
        for diff in reversed(diffs):
            state = cls.applied(state, diff)
        trainer.load(state)
        return step


class NaiveTopK(NaiveDifferences):
    """LowDiff's *naive DC*: of each weight's change the largest hundredth, as index and value; both moments whole.

    The rest of each change is lost, and nothing gives it back before the next full.
    """

    label = "naive DC, top-k"
    lossy = True

    def difference(self, now: State, before: State) -> State:
        older = dict(tensors(before["model"]))
        return {**now, "model": mapped(now["model"], lambda name, tensor: _largest(tensor - older[name]))}

    @staticmethod
    def applied(state: State, diff: State) -> State:
        model = state["model"]
        changes = diff["model"]
        return {**diff, "model": {name: _added(tensor, *changes[name]) for name, tensor in model.items()}}


def _largest(change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and value of the largest hundredth."""
    flat = change.flatten()
    kept = flat.abs().topk(max(1, int(flat.numel() * DENSITY))).indices
    return kept.int(), flat[kept]


def _added(tensor: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().index_add(0, places, values).reshape(tensor.shape)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _packed(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    planes = np.ascontiguousarray((_bytes(now) ^ _bytes(before)).reshape(-1, now.element_size()).T)
    return torch.frombuffer(bytearray(zstandard.compress(planes.tobytes(), 1)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    planes = np.frombuffer(zstandard.decompress(packed.numpy().tobytes()), np.uint8)
    changed = planes.reshape(before.element_size(), -1).T.reshape(-1) ^ _bytes(before)
    return torch.from_numpy(changed).view(before.dtype).reshape(before.shape)
