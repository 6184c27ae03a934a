"""The updates of a planned state: a `StepExplainer` finds the parameters once, each step only brings its numbers.

How often each parameter was moved is read from the copy of the state, so training does not wait for it. The writer
compares every prediction with the state: a wrong one costs bytes, never a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats.sources import Bytes
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.training.capture.capture_plan import StatePlan
from ckptstore.training.optimizers.step_explainer import LATER, NotedStep, StepExplainer
from ckptstore.write.steps.updates import Update

__all__ = ["PredictedUpdates"]


class PredictedUpdates:
    """What the optimizers move in a planned state."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], plan: StatePlan, before: PredictedUpdates | None = None
    ) -> None:
        """
        Args:
            before: of another plan, or of other settings: it still knows how often each parameter was moved.
        """
        notes = [NotedStep.of(one, skipped=True) for one in optimizers]
        self._settings = [one.settings for one in notes]
        self._explainer = StepExplainer.of(optimizers, notes, FlatState(None, plan.tensors))
        names = {source.identity: name for name, source in plan.tensors.items()}
        places = [_place_of(row.count, names, plan) for row in self._explainer.rows]
        self._known = np.array([place is not None for place in places], bool)
        self._places = np.array([place or 0 for place in places], np.int64) // 4
        # Prevents: parameters without a gradient that are taken for moved in the first step of a new plan.
        counts = {} if before is None else before.counts
        self._before = np.array([counts.get(id(row.parameter), 0.0) for row in self._explainer.rows], np.float32)

    @property
    def counts(self) -> dict[int, float]:
        """How often each parameter was moved at the last look, by its `id`. The rows keep the parameters alive."""
        return {id(row.parameter): float(count) for row, count in zip(self._explainer.rows, self._before, strict=True)}

    def fits(self, noted: Sequence[NotedStep]) -> bool:
        """Whether the groups' settings are those for which this was made; learning rates may differ."""
        return [one.settings for one in noted] == self._settings

    def updates(self, noted: Sequence[NotedStep] | None, memory: Bytes) -> Sequence[Update]:
        """The updates of a step, made when they are first looked at.

        Args:
            noted: the step's numbers; None: they are unknown, and there are no updates.
            memory: the copy of the state. Its counts are read now.
        """
        counts, moved = self._counts_in(memory)
        if noted is None:
            return ()
        return _Late(lambda: self._explainer.updates(noted, counts.tolist(), moved.tolist()))

    def _counts_in(self, memory: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The counts, and which of them have changed since the last time or are not known."""
        if not self._known.any():
            return np.full(len(self._known), LATER, np.float32), ~self._known
        found = memory[: len(memory) // 4 * 4].view(np.float32)[self._places]
        found[~self._known] = LATER
        changed = (found != self._before) | ~self._known
        self._before = found
        return found, changed


def _place_of(count: Any, names: dict[Any, str], plan: StatePlan) -> int | None:
    """Where a parameter's count is in a copy of the state; None: it is not an fp32 number there."""
    if not isinstance(count, torch.Tensor):
        return None
    source = TorchSource(count)
    name = names.get(source.identity)
    if name is None or source.dtype != "F32" or source.nbytes != 4 or plan.offsets[name] % 4:
        return None
    return plan.offsets[name]


class _Late(Sequence[Update]):
    """A list that is made at its first use."""

    def __init__(self, make: Callable[[], Iterator[Update]]) -> None:
        self._make = make
        self._made: list[Update] | None = None

    def _all(self) -> list[Update]:
        if self._made is None:
            self._made = list(self._make())
        return self._made

    @overload
    def __getitem__(self, index: int) -> Update: ...
    @overload
    def __getitem__(self, index: slice) -> list[Update]: ...
    def __getitem__(self, index: int | slice) -> Update | list[Update]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Update]:
        return iter(self._all())
