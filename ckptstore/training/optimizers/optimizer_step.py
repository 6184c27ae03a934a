"""What a torch optimizer did in the step just taken, for ``Writer.save(..., updates=...)``.

::

    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    updates = OptimizerStep(optimizer)       # before the scheduler changes the learning rate
    scheduler.step()
    writer.save_async(state(), step, updates=updates)
    optimizer.zero_grad()

The writer does not trust an `OptimizerStep`: it compares the prediction with the state that it stores, bit by bit. So a
learning rate that was read too late, an unsaved step in between or another optimizer's arithmetic costs bytes, and
never a bit. Parameters that cannot be matched are left out and stored like any other tensor. The writer says so once,
with the reason (`UnexplainedStepWarning`):

- tensors that the state does not hold in their own memory (clones, ``.cpu()`` copies, numpy views of them);
- slots that are not all fp32 and of one shape (bf16 or fp8 moments, complex and empty parameters);
- optimizers other than `torch.optim.SGD`, `Adam` and `AdamW` (and their subclasses), such as a wrapper of them;
- two parameters of the optimizers that share memory, because both were updated there;
- without a warning: slots that do not exist before a parameter's first step; parameters without a gradient, which were
  not moved.

A `DTensor` stands for its local part (``to_local()``), which is what a rank saves.

Only dense gradients in fp32, bf16, fp16 or 8 bits are stored, no ``torch.sparse`` ones. Without a gradient the step is
predicted from the states alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ckptstore.errors import UsageError
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.training.optimizers.step_explainer import (
    LATER,
    NotedStep,
    ParameterRow,
    StepExplainer,
    bounded_count,
    dense_gradient,
    group_numbers,
    have_gradients,
    moved_by,
    rows_of,
    wraps,
)
from ckptstore.write.steps.updates import Found, Hold

__all__ = ["Gradients", "OptimizerStep", "QuantizedGradient", "clip_factor"]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedGradient:
    """A gradient in 8 bits, as it was sent between machines: the optimizer consumed ``values.float() * scale``.

    Attributes:
        values: of the parameter's shape, ``int8``, ``float8_e4m3fn`` or ``float8_e5m2``.
        scale: a number of fp32, the same for the whole tensor.
    """

    values: torch.Tensor
    scale: float


Gradients: TypeAlias = (
    Literal["none", "grad"] | Mapping[torch.Tensor, torch.Tensor | SparseGradient | QuantizedGradient]
)
"""Where an `OptimizerStep` takes gradients from: nowhere, ``parameter.grad``, or this mapping by parameter."""

_QUANTA: Final = ("I8", "F8_E4M3", "F8_E5M2")


class OptimizerStep:
    """The step that one or several optimizers have just taken: a callable for ``updates=``.

    It reads numbers (learning rates, step counts, settings) when it is made, so make it right after
    ``optimizer.step()``. It only refers to tensors: the state must not change before the save copies it, and gradients
    must not change before the save has returned. ``zero_grad()`` may free them, but not with ``set_to_none=False``.
    """

    __slots__ = ("_counts", "_hold", "_left_out", "_notes", "_optimizers", "_rows")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        gradients: Gradients = "grad",
        clip: float | torch.Tensor = 1.0,
        loss_scale: float = 1.0,
        skipped: bool = False,
    ) -> None:
        """Read the numbers of the step.

        Args:
            optimizer: the optimizer that moved the parameters, or several.
            gradients: ``"grad"`` stores ``parameter.grad``, which the optimizer consumed. ``"none"`` stores none: the
                step is predicted from the states, which costs about the same in fp32. A mapping holds gradients by
                parameter, each with the parameter's shape in fp32, bf16 or fp16, or its largest entries; a parameter
                without an entry is predicted. With bf16 weights and an fp32 master in the optimizer, pass the bf16
                gradient here and its factor as ``clip``: that takes a ninth of the state instead of a third. A gradient
                of 8 bits and its scale are passed as a `QuantizedGradient`.
            clip: the factor by which training multiplied these gradients before the optimizer consumed them. 1 if they
                are clipped already, as ``parameter.grad`` is after ``clip_grad_norm_``. `clip_factor` computes it from
                the norm.
            loss_scale: by what these gradients were divided before that: 1 if ``GradScaler.unscale_`` or
                ``GradScaler.step`` has done so in place.
            skipped: the ``GradScaler`` found an infinity and skipped the step: nothing has changed.

        Raises:
            UsageError: no optimizer; a gradient whose size differs from its parameter's; a loss scale that is 0 or not
                finite.
        """
        if not math.isfinite(loss_scale) or loss_scale == 0:
            raise UsageError(f"loss_scale: {loss_scale}, a finite number other than 0 is needed")
        if isinstance(gradients, str) and gradients not in ("none", "grad"):
            raise UsageError(f"gradients: {gradients!r}; it may be 'none', 'grad' or a mapping")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        if not isinstance(optimizers, Sequence) or not all(
            isinstance(one, torch.optim.Optimizer) for one in optimizers
        ):
            inner = " (its .optimizer is one)" if wraps(optimizer) else ""
            raise UsageError(
                f"optimizer: {type(optimizer).__name__}; expected a torch.optim.Optimizer{inner}, or several"
            )
        moved = [have_gradients(one) if kind_of(one) is not None else [] for one in optimizers]
        any_moved = any(map(any, moved))
        if gradients == "grad" and not any_moved:
            gradients = "none"  # they were freed already; a prediction needs none
        only_moved = isinstance(gradients, str) and not skipped and any_moved
        self._hold: Hold | None = None
        self._optimizers = list(optimizers)
        factors = (float(clip), loss_scale)
        notes = [
            NotedStep(group_numbers(one), skipped, each if only_moved else None, factors=factors)
            for one, each in zip(optimizers, moved, strict=True)
        ]
        self._take(optimizers, notes)
        self._hold = self._make_wait
        if not skipped and gradients != "none":
            found = {row.parameter: _gradient(row.parameter, row.sources[0], gradients) for row in self._rows}
            given = {parameter: one for parameter, one in found.items() if one is not None}
            self._notes = [replace(one, gradients=given, scales=_scales(gradients)) for one in notes]

    @classmethod
    def noted(
        cls, optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep], hold: Hold | None = None
    ) -> OptimizerStep:
        """The step of which these numbers were noted right after it: a schedule may have changed them since.

        Args:
            notes: one for each optimizer. Where they do not say which parameters moved, the gradients do, if they are
                still there.
            hold: see `Found`.
        """
        step = cls.__new__(cls)
        step._take(
            optimizers,
            [
                note if note.skipped or note.moved is not None else replace(note, moved=moved_by(one))
                for one, note in zip(optimizers, notes, strict=True)
            ],
        )
        step._hold = hold
        step._optimizers = list(optimizers)
        return step

    def _take(self, optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep]) -> None:
        self._notes = list(notes)
        self._rows: list[ParameterRow]
        self._rows, self._left_out = rows_of(optimizers, notes)
        self._counts = dict(zip(map(_key, self._rows), _counts([row.count for row in self._rows]), strict=True))

    def _make_wait(self, wait: Callable[[], None]) -> None:
        for one in self._optimizers:
            waits = _waits.get(one)
            if waits is None:
                waits = _waits[one] = []
                one.register_step_pre_hook(partial(_wait_for, waits))
            waits.append(wait)

    def __call__(self, flat: FlatState) -> Found:
        """The updates of the parameters whose slots `flat` holds, in the order of the optimizers' parameters.

        The memory of a slot identifies it: the state may hold it anywhere, under any name, and once if tied.
        """
        explainer = StepExplainer(self._rows, self._left_out, flat)
        counts = [self._counts[_key(row)] for row in explainer.rows]
        found = list(explainer.updates(self._notes, counts, repeat(True)))
        return Found(found, _remark(len(explainer.rows), explainer.left_out), explainer.left_out, self._hold)


def _key(row: ParameterRow) -> tuple[int, int]:
    return row.optimizer, row.number


_waits: Final[WeakKeyDictionary[torch.optim.Optimizer, list[Callable[[], None]]]] = WeakKeyDictionary()
"""What optimizers wait for before their next step. Those that are here have a hook for it, as long as they live."""


def _wait_for(waits: list[Callable[[], None]], *_: Any) -> None:
    taken = list(waits)
    waits.clear()
    for wait in taken:
        wait()


def _remark(matched: int, left_out: Counter[str]) -> str | None:
    """The message on the parameters that are left out."""
    if not left_out:
        return None
    reasons = "; ".join(f"{reason} [{count}]" for reason, count in left_out.most_common())
    return (
        f"OptimizerStep: {matched} of {matched + left_out.total()} parameters matched, because {reasons}. What is not "
        "matched is stored as a difference, which takes more bytes"
    )


def clip_factor(norm: float | torch.Tensor, max_norm: float) -> float:
    """The factor by which ``clip_grad_norm_(parameters, max_norm)`` multiplied the gradients, from its result.

    It uses torch's arithmetic: fp32 for fp32 gradients, and a factor of at most 1.
    """
    total = torch.as_tensor(norm)
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _counts(steps: Sequence[Any]) -> list[int]:
    """How often each parameter was moved; `LATER` where torch keeps no count. Waits once for each device."""
    counts = [LATER] * len(steps)
    waiting: dict[torch.device, list[int]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            waiting.setdefault(step.device, []).append(index)
        elif isinstance(step, int | float) and math.isfinite(step):
            counts[index] = bounded_count(step)
    for indices in waiting.values():
        together = torch.stack([steps[index].detach().reshape(()).double() for index in indices])
        for index, value in zip(indices, together.tolist(), strict=True):
            counts[index] = bounded_count(value)
    return counts


def _gradient(
    parameter: torch.Tensor, weight: TorchSource, gradients: Gradients
) -> TorchSource | SparseGradient | None:
    if not isinstance(gradients, str):
        given = gradients.get(parameter)
        if isinstance(given, SparseGradient):
            if given.size != weight.nbytes // 4:
                raise UsageError(f"a sparse gradient of {given.size} numbers for a parameter of {weight.nbytes // 4}")
            return given
        if isinstance(given, QuantizedGradient):
            if not math.isfinite(given.scale):
                raise UsageError(f"a quantized gradient has a scale of {given.scale}; a finite number is needed")
            return dense_gradient(parameter, weight, given.values, _QUANTA)
        return None if given is None else dense_gradient(parameter, weight, given)
    return None if gradients == "none" or parameter.grad is None else dense_gradient(parameter, weight, parameter.grad)


def _scales(gradients: Gradients) -> dict[torch.Tensor, float]:
    """The scales of quantized gradients."""
    given = () if isinstance(gradients, str) else gradients.items()
    return {one: float(its.scale) for one, its in given if isinstance(its, QuantizedGradient)}
