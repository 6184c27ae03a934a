"""What the optimizers did between two checkpoints, noted by hooks of their steps.

A hook notes numbers, and refers to tensors; it copies nothing but the entries of gradients that were compressed, and
raises nothing into training. What goes wrong in it costs bytes: that step is stored as a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.state import FlatState
from ckptstore.training.optimizers import OptimizerStep
from ckptstore.write.steps.updates import Found, Update, Updates

__all__ = ["Compressor", "TakenSteps"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Compressor(Protocol):
    """What made gradients sparse before the optimizer consumed them: `TopKHook`."""

    def named(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What the parameters are called in its state."""

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from step to step."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that."""

    def consumed(self, parameters: Sequence[torch.Tensor]) -> Mapping[torch.Tensor, SparseGradient]:
        """The entries that are left of the gradients, as they are now, of those parameters that have such."""


class TakenSteps:
    """Hooks on optimizers, from `install` to `remove`.

    Attributes:
        loaded: an optimizer's ``load_state_dict`` was called since this was set to False.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], compressor: Compressor | None = None) -> None:
        """
        Args:
            compressor: knows which entries of the gradients are left.
        """
        self.loaded = False
        self._optimizers = list(optimizers)
        self._predict = False
        self._compressor = compressor
        self._counts = [0] * len(self._optimizers)
        self._steps: list[OptimizerStep | None] = [None] * len(self._optimizers)
        self._sparse: list[Mapping[torch.Tensor, SparseGradient]] = [{} for _ in self._optimizers]
        self._hooks: list[Any] = []

    def install(self, predict: bool) -> None:
        """Put the hooks on, once.

        Args:
            predict: note what gradient diffs need, not only whether steps were taken.
        """
        self._predict = predict
        if self._hooks:
            return
        for number, optimizer in enumerate(self._optimizers):
            self._hooks.append(optimizer.register_step_post_hook(self._calling(self._after, number)))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._calling(self._load, number)))
            if self._compressor is not None:
                self._hooks.append(optimizer.register_step_pre_hook(self._calling(self._before, number)))

    def remove(self) -> None:
        """Take them off; nothing of this stays in the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def any(self) -> bool:
        """Whether an optimizer has stepped since `collected`."""
        return any(self._counts)

    def collected(self) -> Updates | None:
        """What happened since the last time, as ``updates=`` takes it; None if it cannot be predicted."""
        counts, steps = self._counts, self._steps
        self._counts, self._steps = [0] * len(counts), [None] * len(counts)
        if not self._predict or any(count > 1 for count in counts):
            return None  # two steps are no step
        taken: list[OptimizerStep] = []
        for optimizer, count, step in zip(self._optimizers, counts, steps, strict=True):
            if count == 0:
                taken.append(OptimizerStep(optimizer, gradients="none", skipped=True))
            elif step is not None:
                taken.append(step)
        return _joined(taken) if taken else None

    @staticmethod
    def _calling(call: Callable[[int], None], number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            try:
                call(number)
            except Exception:  # noqa: BLE001  # training's step is worth more than a smaller checkpoint
                _LOG.warning("a step could not be noted, and is stored as a difference", exc_info=True)

        return hook

    def _before(self, number: int) -> None:
        if self._predict and self._compressor is not None:
            parameters = [one for group in self._optimizers[number].param_groups for one in group["params"]]
            self._sparse[number] = self._compressor.consumed(parameters)

    def _after(self, number: int) -> None:
        self._counts[number] += 1
        sparse, self._sparse[number] = self._sparse[number], {}
        if not self._predict or self._counts[number] > 1:
            self._steps[number] = None
            return
        optimizer = self._optimizers[number]
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler, while a fused kernel looks at it itself
        skipped = found_inf is not None and bool(torch.as_tensor(found_inf).item())
        self._steps[number] = OptimizerStep(optimizer, gradients=sparse or "none", skipped=skipped)

    def _load(self, _: int) -> None:
        self.loaded = True


def _joined(steps: Sequence[OptimizerStep]) -> Callable[[FlatState], Found]:
    """Several optimizers' steps, as one callable for ``updates=``."""

    def find(flat: FlatState) -> Found:
        updates: list[Update] = []
        remarks: list[str] = []
        for step in steps:
            found = step(flat)
            updates += found
            if found.left_out is not None:
                remarks.append(found.left_out)
        return Found(updates, "\n".join(remarks) or None)

    return find
