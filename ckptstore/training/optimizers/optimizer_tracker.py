"""Tracks what the optimizers did between two checkpoints, with hooks of their steps.

A hook notes numbers and refers to tensors. It copies only the entries of compressed gradients, and raises nothing into
training. An error in it costs bytes: that step is stored as a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.states.state import FlatState
from ckptstore.training.optimizers.optimizer_step import OptimizerStep
from ckptstore.training.optimizers.step_explainer import NotedStep
from ckptstore.write.steps.updates import Found, Hold, LateGradient, Updates

__all__ = ["CollectedSteps", "Compressor", "OptimizerTracker"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Compressor(Protocol):
    """Makes gradients sparse before the optimizer consumes them: `TopKHook`."""

    def named(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the names of the parameters in its state."""

    def state_dict(self) -> dict[str, Any]:
        """The state that it keeps from step to step."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from that state."""

    def consumed(self, parameters: Sequence[torch.Tensor]) -> Mapping[torch.Tensor, SparseGradient]:
        """The remaining entries of the current gradients, by parameter; only of parameters that have some."""

    def consumed_later(
        self, parameters: Sequence[torch.Tensor], *, checked: Collection[torch.Tensor] = ()
    ) -> Mapping[torch.Tensor, SparseGradient | LateGradient]:
        """As `consumed`, without waiting for a device.

        Args:
            checked: parameters whose entries are counted even if torch has not seen the gradient change: a set.
        """


class OptimizerTracker:
    """Hooks on optimizers, from `install` to `remove`.

    Attributes:
        loaded: an optimizer's ``load_state_dict`` was called since this was set to False.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], compressor: Compressor | None = None, scaler: Any = None
    ) -> None:
        """
        Args:
            compressor: tells which entries of the gradients it has kept.
            scaler: a `GradScaler`, whose scale falls with every step that it skips; None: nothing is skipped.
        """
        self.loaded = False
        self._optimizers = list(optimizers)
        self._predict = False
        self._carry = False
        self._waits: list[Callable[[], None]] = []
        self._compressor = compressor
        self._scaler = scaler
        self._last_scale = self._scale()
        self._counts = [0] * len(self._optimizers)
        self._steps: list[NotedStep | None] = [None] * len(self._optimizers)
        self._trouble = ""  # why a hook failed since `collected`
        self._sparse: list[Mapping[torch.Tensor, SparseGradient | LateGradient]] = [{} for _ in self._optimizers]
        self._hooks: list[Any] = []

    def install(self, predict: bool, *, carry: bool = False) -> None:
        """Register the hooks, once.

        Args:
            predict: also note what step diffs need.
            carry: also refer to gradients on devices, until `collected`.
        """
        self._predict = predict
        self._carry = predict and carry
        if self._hooks:
            return
        for number, optimizer in enumerate(self._optimizers):
            self._hooks.append(optimizer.register_step_post_hook(self._calling(self._after, number)))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._calling(self._load, number)))
            self._hooks.append(optimizer.register_step_pre_hook(self._calling(self._before, number)))

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waits.clear()

    @property
    def any(self) -> bool:
        """Whether an optimizer has stepped since `collected`."""
        return any(self._counts)

    def has_moved(self) -> bool:
        """Whether an optimizer has stepped since `collected`, or the scaler skipped its step since the last call."""
        before, self._last_scale = self._last_scale, self._scale()
        skipped = before is not None and self._last_scale is not None and self._last_scale < before
        return self.any or skipped or not self._optimizers

    def restored(self) -> None:
        """The script's state is another one: forget what the optimizers did before."""
        self._last_scale = self._scale()
        self.collected()
        self.loaded = False

    def _scale(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def collected(self) -> CollectedSteps:
        """Return what the optimizers did since the last call, and start again."""
        counts, steps, trouble = self._counts, self._steps, self._trouble
        self._counts, self._steps, self._trouble = [0] * len(counts), [None] * len(counts), ""
        why = None
        if self._predict and max(counts, default=0) > 1:  # two steps cannot be explained as one
            why = f"{max(counts)} optimizer steps since the previous checkpoint, and only one can be explained"
        elif self._predict and trouble:
            why = f"the optimizer's step could not be noted ({trouble})"
        hold = self.hold if self._carry else None
        return CollectedSteps(
            self._optimizers, counts, steps, predicted=self._predict and why is None, why=why, hold=hold
        )

    def put_back(self, collected: CollectedSteps) -> None:
        """Add the `collected` steps again, because they were not saved."""
        # Prevents: one step that is taken for the whole change since a checkpoint that is several steps older.
        self._counts = [now + before for now, before in zip(self._counts, collected.counts, strict=True)]
        self._steps = [
            now if now is not None else before for now, before in zip(self._steps, collected.steps, strict=True)
        ]

    def _calling(self, call: Callable[[int], None], number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            try:
                call(number)
            except Exception as error:  # noqa: BLE001  # a training step matters more than a smaller checkpoint
                self._trouble = f"{type(error).__name__}: {error}"
                _LOG.warning("a step could not be noted, and is stored as a difference", exc_info=True)

        return hook

    def hold(self, wait: Callable[[], None]) -> None:
        """Call `wait` before an optimizer takes its next step: until it returns, the state is not changed."""
        self._waits.append(wait)

    def _before(self, number: int) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        if self._predict and self._compressor is not None:
            parameters = [one for group in self._optimizers[number].param_groups for one in group["params"]]
            self._sparse[number] = self._compressor.consumed_later(parameters)

    def _after(self, number: int) -> None:
        self._counts[number] += 1
        sparse, self._sparse[number] = self._sparse[number], {}
        if not self._predict or self._counts[number] > 1:
            self._steps[number] = None
            return
        optimizer = self._optimizers[number]
        found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler if a fused kernel checks it itself
        skipped = found_inf is not None and bool(torch.as_tensor(found_inf).item())
        self._steps[number] = NotedStep.of(optimizer, skipped=skipped, sparse=sparse, carry=self._carry)

    def _load(self, _: int) -> None:
        self.loaded = True


class CollectedSteps:
    """What optimizers did from one `OptimizerTracker.collected` to the next.

    Attributes:
        counts: how often each of them stepped.
        steps: the numbers of the steps.
        why: why they cannot explain a step diff; None: they can, or none is made.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        counts: Sequence[int],
        steps: Sequence[NotedStep | None],
        *,
        predicted: bool,
        why: str | None = None,
        hold: Hold | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._hold = hold
        self.counts = counts
        self.steps = steps
        self._predicted = predicted
        self.why = why

    @property
    def noted(self) -> list[NotedStep] | None:
        """The numbers of every optimizer's step; None: they say nothing."""
        if not self._predicted:
            return None
        found = [
            NotedStep.of(optimizer, skipped=True) if count == 0 else step
            for optimizer, count, step in zip(self._optimizers, self.counts, self.steps, strict=True)
        ]
        noted = [one for one in found if one is not None]
        return noted if len(noted) == len(found) else None

    @property
    def updates(self) -> Updates | None:
        """As ``updates=`` takes it, which says why if a step cannot be explained; None: nothing is known of it."""
        if self.why is not None:
            return _unexplained(self.why)
        noted = self.noted
        return OptimizerStep.noted(self._optimizers, noted, self._hold) if noted else None


def _unexplained(why: str) -> Callable[[FlatState], Found]:
    """No updates, with the reason, as ``updates=`` takes it."""
    text = f"a step diff is stored as a difference, which takes more bytes: {why}"
    # The number of steps differs from time to time, the reason does not.
    return lambda _: Found((), text, (why.lstrip("0123456789"),))
