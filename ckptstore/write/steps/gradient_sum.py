"""Batches whose gradients are added up (LowDiff, section 4.2: batched gradient writing by accumulation). Lossy.

One diff stands for all steps of a batch: the sum of their gradients, applied as one step with the numbers of the last.
Under Adam, and under SGD with momentum, that is not where training went; so what is stored is the state to which it
does lead, under its own state hash, and everything about it says ``lossy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.write.steps.encoding import Base, fitting_updates, numbers_of
from ckptstore.write.steps.updates import Update

__all__ = ["Sums"]


@dataclass(slots=True)
class Sums:
    """The gradients of a batch so far, by parameter: scaled and clipped, fp32."""

    _sums: dict[tuple[str, ...], npt.NDArray[np.float32]] = field(default_factory=dict)
    _updates: dict[tuple[str, ...], Update] = field(default_factory=dict)

    def add(self, updates: Sequence[Update], flat: FlatState, base: Base) -> None:
        """Add the gradients of one step.

        Raises:
            UsageError: no updates at all, or a parameter without its gradient; nothing was added.
        """
        if not updates:
            raise UsageError("gradients are to be summed up, and this step was saved without updates=")
        fitting = list(fitting_updates(updates, flat, base))
        for update in fitting:
            if update.gradient is None and not update.step.skipped:
                raise UsageError(f"gradients are to be summed up, and there is none of {update.slots[0]!r}")
        for update in fitting:
            if update.gradient is None or update.step.skipped:
                continue
            gradient = _scaled(update)
            total = self._sums.get(update.slots)
            if total is None:
                self._sums[update.slots] = gradient
            else:
                total += gradient
            self._updates[update.slots] = update

    def apply(self, flat: FlatState, base: Base) -> list[Update]:
        """Make `flat` the state to which the sums lead from `base`, in place -> the one step that it took.

        Args:
            flat: the state after the batch, in writable host memory.
        """
        made = []
        for slots, total in self._sums.items():
            update = self._updates[slots]
            single = replace(update.step, clip=1.0, loss_scale=1.0)
            state = []
            for name in slots:
                view = flat.tensors[name].view()
                assert view is not None  # snapshots are host memory
                _copy(base, name, view)
                state.append(view.view("<f4"))
            optim.advance(update.optimizer.rule(single), state, total)
            made.append(Update(slots, update.optimizer, single, NumpySource(total)))
        return made

    def clear(self) -> None:
        """Begin a new batch."""
        self._sums.clear()
        self._updates.clear()


def _copy(base: Base, name: str, out: Bytes) -> None:
    out[:] = base.read(name, 0, len(out))


def _scaled(update: Update) -> npt.NDArray[Any]:
    """The gradient of an update as the optimizer consumed it: fp32, a copy."""
    if isinstance(update.gradient, optim.SparseGradient):
        gradient = update.gradient.dense()
    else:
        gradient = numbers_of(update.gradient)
    for factor in update.step.scales:
        np.multiply(gradient, np.float32(factor), out=gradient)
    return gradient
