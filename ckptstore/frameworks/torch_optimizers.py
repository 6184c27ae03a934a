"""torch's own optimizers over memory that is not torch's: a step is taken again, by the kernels that took it first.

The arithmetic of `formats.optim` is every machine's; torch's is this machine's: the for-loop's square roots are MKL's,
and the last numbers of a tensor, which fill no vector, are computed by other instructions. Whoever has the same torch,
the same number of threads and the same bits before has the same bits after, whatever those instructions are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.optim import KINDS

__all__ = ["TorchSteps", "kind_of", "settings_of", "warmed", "with_threads"]

_CLASSES: Final[Mapping[str, Any]] = {name: getattr(torch.optim, name) for name in KINDS}


def kind_of(optimizer: object) -> str | None:
    """The row of `KINDS` whose arithmetic an optimizer has, by its nearest base in torch; None: it is none of these."""
    names = {base: name for name, base in _CLASSES.items()}
    return next((names[base] for base in type(optimizer).__mro__ if base in names), None)


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter group decides the step, as JSON: flags, numbers, lists of numbers.

    Raises:
        UnsupportedStateError: one of them is something else (a learning rate that is a tensor), or asks for a step that
            is recorded (``differentiable``, ``capturable``).
    """
    found = {name: group[name] for name in optimizer.defaults if name in group}
    for name, value in found.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(one is None or isinstance(one, bool | int | float) for one in parts):
            raise UnsupportedStateError(
                f"{name} is a {type(value).__name__} in place of a number: give the optimizer {name} as a float"
            )
    for name in ("differentiable", "capturable"):
        if found.get(name):
            raise UnsupportedStateError(f"{name}=True: such a step is not taken again; leave it out")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


class TorchSteps:
    """An optimizer whose parameters and slots lie where they are said to lie. One thread uses it."""

    def __init__(
        self,
        kind: str,
        groups: Sequence[Sequence[Mapping[str, int]]],
        tensor: Callable[[int], torch.Tensor],
    ) -> None:
        """
        Args:
            kind: one of `KINDS`.
            groups: for each parameter group its parameters: ``weight`` and the optimizer's slots, by numbers.
            tensor: the tensor of a number.

        Raises:
            UnsupportedStateError: there is no such optimizer.
            ValueError: no parameter at all.
        """
        if kind not in _CLASSES:
            raise UnsupportedStateError(f"an optimizer {kind!r:.40}; {', '.join(KINDS)} can be replicated")
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
            settings: of each group, as `settings_of` gives them.
            gradients: of each group's parameters; None: it had none, and is not moved.
            scaling: what a ``GradScaler`` leaves to a fused kernel: its scale, and whether it has found an infinity.

        Raises:
            UnsupportedStateError: settings that this optimizer does not have.
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


def with_threads(threads: int) -> None:
    """Have this thread's steps divided over so many threads: where a tensor is divided decides some of its bits."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def warmed() -> None:
    """Take a step of each kind, of next to nothing: torch loads what it needs at the first."""
    for name, kind in KINDS.items():
        row = {slot: number for number, slot in enumerate(("weight", *kind.slots))}
        TorchSteps(name, [[row]], lambda _: torch.zeros(())).step([{}], [[torch.zeros(())]])
