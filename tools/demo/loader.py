"""A shuffled loader whose position is part of the state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class ShuffledWindows:
    """Batches of text windows in a new random order every epoch, with the input slightly corrupted.

    It has its own generator. Its state is the generator *as it was when the epoch began* and the position in the epoch:
    the order of thousands of windows is drawn again on resume, not stored. Corruption comes from the global RNGs of
    python (whether) and numpy (where, and what), as augmentation in real input pipelines does, so that a run whose RNGs
    are not restored differs at once.
    """

    def __init__(self, text: npt.NDArray[np.uint8], *, context: int, batch: int, noise: float, seed: int) -> None:
        windows = (text.size - 1) // context
        if windows < batch:
            raise ValueError(f"{text.size} bytes hold {windows} windows of {context}, fewer than a batch of {batch}")
        self._text = text
        self._context = context
        self._batch = batch
        self._noise = noise
        self._windows = windows
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch_state = self._generator.get_state()
        self._order = torch.randperm(self._windows, generator=self._generator).numpy()
        self._position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 of shape ``(batch, context)``. A last incomplete batch is skipped."""
        if self._position + self._batch > self._windows:
            self._epoch += 1
            self._begin_epoch()
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        offsets = chosen[:, None] * self._context + np.arange(self._context + 1)[None, :]
        windows = self._text[offsets].astype(np.int64)
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if random.random() < 0.5:
            hit = np.random.random(inputs.shape) < self._noise
            inputs[hit] = np.random.randint(0, 256, int(hit.sum()))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position (windows yielded in it) and the generator's state at the epoch's start."""
        return {"epoch": self._epoch, "position": self._position, "generator": self._epoch_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the recorded position; the next batch is the one that followed it."""
        self._generator.set_state(state["generator"])
        self._begin_epoch()
        self._epoch = state["epoch"]
        self._position = state["position"]
