"""Repeat an optimizer step with torch's own kernels, over memory that torch does not own.

The arithmetic of `formats.optim` gives the same bits on every machine. torch's results depend on the machine: the
for-loop uses MKL's square roots, and other instructions compute the last numbers of a tensor, which do not fill a
vector. The same torch, the same number of threads and the same bits before the step give the same bits after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.optim import KINDS

__all__ = ["TorchSteps", "kind_of", "set_threads", "settings_of", "warm_up"]

_CLASSES: Final[Mapping[str, Any]] = {name: getattr(torch.optim, name) for name in KINDS}


def kind_of(optimizer: object) -> str | None:
    """The key of `KINDS` for an optimizer, by its nearest base class in torch. None: it has no such base class."""
    names = {base: name for name, base in _CLASSES.items()}
    return next((names[base] for base in type(optimizer).__mro__ if base in names), None)


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that determine the step, as JSON: flags, numbers, lists of numbers.

    Raises:
        UnsupportedStateError: a setting is of another type (a learning rate that is a tensor), or asks for a recorded
            step (``differentiable``, ``capturable``).
    """
    found = {name: group[name] for name in optimizer.defaults if name in group}
    for name, value in found.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(one is None or isinstance(one, bool | int | float) for one in parts):
            raise UnsupportedStateError(
                f"{name} is a {type(value).__name__}, not a number: pass {name} to the optimizer as a float"
            )
    for name in ("differentiable", "capturable"):
        if found.get(name):
            raise UnsupportedStateError(f"{name}=True: such a step cannot be replayed; leave {name} out")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


class TorchSteps:
    """An optimizer over given memory for parameters and slots. Only one thread may use it."""

    def __init__(
        self,
        kind: str,
        groups: Sequence[Sequence[Mapping[str, int]]],
        tensor: Callable[[int], torch.Tensor],
    ) -> None:
        """
        Args:
            kind: one of `KINDS`.
            groups: the parameters of each parameter group. Each maps ``weight`` and the optimizer's slots to numbers.
            tensor: returns the tensor of a number.

        Raises:
            UnsupportedStateError: the optimizer is unknown.
            ValueError: there is no parameter.
        """
        if kind not in _CLASSES:
            raise UnsupportedStateError(f"the optimizer {kind!r:.40} cannot be replicated; use {', '.join(KINDS)}")
        self._parameters = [[tensor(row["weight"]) for row in group] for group in groups]
        self._optimizer = _CLASSES[kind]([{"params": list(group)} for group in self._parameters])
        for group, parameters in zip(groups, self._parameters, strict=True):
            for row, parameter in zip(group, parameters, strict=True):
                slots: dict[str, Any] = {name: tensor(number) for name, number in row.items() if name != "weight"}
                self._optimizer.state[parameter] = slots

    def step(
        self,
        settings: Sequence[Mapping[str, Any]],
        gradients: Sequence[Sequence[torch.Tensor | None]],
        scaling: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """Take a step, in place.

        Args:
            settings: the settings of each group, from `settings_of`.
            gradients: the gradients of each group's parameters. None: the parameter has no gradient, so it does not
                change.
            scaling: the arguments that a ``GradScaler`` passes to a fused kernel: its scale, and whether it has found
                an infinity.

        Raises:
            UnsupportedStateError: the optimizer does not have one of the settings.
        """
        for group, its, parameters, found in zip(
            self._optimizer.param_groups, settings, self._parameters, gradients, strict=True
        ):
            unknown = sorted(set(its) - set(self._optimizer.defaults))
            if unknown:
                raise UnsupportedStateError(f"{type(self._optimizer).__name__} has no setting {unknown[0]!r:.40}")
            group.update({name: tuple(one) if isinstance(one, list) else one for name, one in its.items()})
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
        for name, value in zip(("grad_scale", "found_inf"), scaling, strict=True):
            setattr(self._optimizer, name, None if value is None else torch.tensor(value, dtype=torch.float32))
        try:
            self._optimizer.step()
        finally:
            for parameters in self._parameters:
                for parameter in parameters:
                    parameter.grad = None


def set_threads(threads: int) -> None:
    """Set the number of threads for this thread's steps: the division of a tensor determines some of its bits."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def warm_up() -> None:
    """Take a tiny step of each kind, because torch loads modules at the first step."""
    for name, kind in KINDS.items():
        row = {slot: number for number, slot in enumerate(("weight", *kind.slots))}
        TorchSteps(name, [[row]], lambda _: torch.zeros(())).step([{}], [[torch.zeros(())]])
