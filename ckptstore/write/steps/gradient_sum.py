"""Batches whose gradients are summed (LowDiff, section 4.2: batched gradient writing by accumulation). Lossy.

One diff represents all steps of a batch: the sum of their gradients, applied as one step with the numbers of the last.
Under Adam, and under SGD with momentum, the result is not the state of training. So the resulting state is stored under
its own state hash, and is marked ``lossy`` everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.formats import optim
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.delta_encoding import Base
from ckptstore.write.steps.joined_parameters import fitting_updates, numbers_of
from ckptstore.write.steps.resident_step import ResidentStep
from ckptstore.write.steps.step_encoding import EncodedStep
from ckptstore.write.steps.updates import Update, arrived

__all__ = ["GradientSum"]


class GradientSum:
    """The summed gradients of a batch so far, by parameter: scaled and clipped, fp32. A rank sums those of its share.

    Attributes:
        latest: the state of the last step that was added; None: none was added.
    """

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self._sums: dict[tuple[str, ...], npt.NDArray[np.float32]] = {}
        self._updates: dict[tuple[str, ...], Update] = {}

    def add(self, updates: Sequence[Update], snapshot: Snapshot, base: Base, *, explained: bool) -> None:
        """Add the gradients of one step. Takes ownership of `snapshot`, its state.

        Args:
            updates: the updates of `snapshot`; may be empty on a rank that stores no tensor an optimizer updates.
            base: the checkpoint that the batch is compressed against.
            explained: the step was saved with updates=.

        Raises:
            UsageError: it was saved without updates=, or a parameter has no gradient; nothing was added.
        """
        if not explained:
            raise UsageError("gradients are to be summed up, and this step was saved without updates=")
        fitting = list(fitting_updates(updates, snapshot.flat, base))
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
        self._keep(snapshot)

    def finish(self, resident: ResidentStep, identity: CheckpointId) -> EncodedStep:
        """Compress the one step that represents all added steps. It becomes the step in memory.

        Args:
            resident: holds the step that the batch is compressed against.
            identity: the identity of the last step that was added, without its state hash.
        """
        snapshot = self.latest
        assert snapshot is not None
        updates = self._apply(snapshot.flat, resident.here)
        coded = resident.encode(snapshot.flat, updates, identity.step, lossy=True)
        self.latest = None
        self.clear()
        resident.advance(identity._replace(state=coded.state), snapshot)
        return coded

    def _apply(self, flat: FlatState, base: Base) -> list[Update]:
        """Apply the sums to `base`, and put the resulting state into `flat` -> the updates of that one step.

        Args:
            flat: the state after the batch, in writable host memory.
        """
        made = []
        for slots, total in self._sums.items():
            update = self._updates[slots]
            single = replace(update.step, clip=1.0, loss_scale=1.0, scale=1.0)
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
        self._keep(None)
        self._sums.clear()
        self._updates.clear()

    def _keep(self, snapshot: Snapshot | None) -> None:
        before, self.latest = self.latest, snapshot
        if before is not None:
            before.free()


def _copy(base: Base, name: str, out: Bytes) -> None:
    out[:] = base.read(name, 0, len(out))


def _scaled(update: Update) -> npt.NDArray[Any]:
    """The gradient of an update as the optimizer consumed it, as a copy in fp32."""
    given = arrived(update.gradient)
    gradient = given.dense() if isinstance(given, optim.SparseGradient) else numbers_of(given)
    for factor in update.step.scales:
        np.multiply(gradient, np.float32(factor), out=gradient)
    return gradient
