"""What a torch optimizer did in the step just taken, for ``Writer.save(..., updates=...)``.

::

    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    updates = OptimizerStep(optimizer)       # before the scheduler changes the learning rate
    scheduler.step()
    writer.save_async(state(), step, updates=updates)
    optimizer.zero_grad()

Nothing that stands in an `OptimizerStep` is believed: the writer compares what the step predicts with the state that it
stores, bit by bit. So a learning rate read too late, a step in between that was not saved, or another optimizer's
arithmetic cost bytes, and never a bit. For the same reason whatever cannot be matched is left out, and is stored as any
other tensor is; the writer says so once, with the reason (`UnexplainedStepWarning`):

- tensors that the state does not hold in their own memory (clones, ``.cpu()`` copies, numpy views of them);
- slots that are not all fp32 and of one shape (bf16 or fp8 moments, complex and empty parameters);
- optimizers other than `torch.optim.SGD`, `Adam` and `AdamW` (and what derives from them), such as one that wraps them;
- two parameters of the optimizers that share memory, since both moved it;
- without a word: slots not made yet, before a parameter's first step; parameters that had no gradient and so were not
  moved.

Of a `DTensor` its local part is meant (``to_local()``), which is what a rank saves.

Of a gradient, only a dense one in fp32, bf16 or fp16 is stored (``torch.sparse`` ones are not): without it the step is
predicted from the states alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.optim.step_settings import MAX_COUNT
from ckptstore.formats.state import FlatState
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.write.steps.updates import Found, Update

__all__ = ["LATER", "Gradients", "OptimizerStep", "clip_factor", "group_numbers"]

Gradients: TypeAlias = Literal["none", "grad"] | Mapping[torch.Tensor, torch.Tensor | SparseGradient]
"""Where an `OptimizerStep` finds gradients: nowhere, in ``parameter.grad``, or here by parameter."""

_GRADIENTS: Final = ("F32", "BF16", "F16")
LATER: Final = 2
"""Any count but 1: SGD's buffer existed before, or there is no base for it to be a step from."""


class OptimizerStep:
    """The step that one or several optimizers have just taken: a callable for ``updates=``.

    Numbers (learning rates, step counts, settings) are read when it is made, so make it right after
    ``optimizer.step()``. Tensors are only referred to: the state must not change before the save takes it, and
    gradients not before the save has returned (``zero_grad()`` frees them, which is fine, unless it is told to
    ``set_to_none=False``).
    """

    __slots__ = ("_left_out", "_moves")

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
            optimizer: what moved the parameters.
            gradients: ``"grad"`` stores what ``parameter.grad`` holds, which is what the optimizer consumed. ``"none"``
                stores none: the step is predicted from the states, which costs about the same in fp32. A mapping has
                gradients by the optimizer's parameter: of the shape of the parameter in fp32, bf16 or fp16, or its
                largest entries; a parameter that is not in it is predicted. With bf16 weights and an fp32 master in
                the optimizer, give the bf16 gradient here and what it was multiplied by as ``clip``: a ninth of the
                state instead of a third.
            clip: the factor by which training multiplied the gradients given here before the optimizer consumed
                them. 1 where they are clipped already, as ``parameter.grad`` is after ``clip_grad_norm_``;
                `clip_factor` makes it of the norm.
            loss_scale: what the gradients given here were divided by before that: 1 once ``GradScaler.unscale_``, or
                ``GradScaler.step``, has done so in place.
            skipped: no step was taken, because the ``GradScaler`` found an infinity: nothing has changed.

        Raises:
            UsageError: no optimizer; a gradient of another size than its parameter; a loss scale that is 0 or not
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
            inner = " (its .optimizer is one)" if _wraps(optimizer) else ""
            raise UsageError(
                f"optimizer: {type(optimizer).__name__}; a torch.optim.Optimizer is wanted{inner}, or several"
            )
        left_out: Counter[str] = Counter()
        found = [entry for one in optimizers for entry in _entries(one, left_out)]
        moved = [entry for entry in found if entry[1].grad is not None]
        if gradients == "grad" and not moved:
            gradients = "none"  # they were freed before: predicting needs none
        if isinstance(gradients, str) and not skipped and moved:
            found = moved  # torch's optimizers pass over parameters without a gradient
        self._take(found, left_out, gradients, (float(clip), loss_scale, skipped))

    @classmethod
    def noted(
        cls,
        optimizer: torch.optim.Optimizer,
        numbers: Sequence[tuple[optim.Optimizer, float] | None],
        *,
        moved: Sequence[bool] | None = None,
        sparse: Mapping[torch.Tensor, SparseGradient] | None = None,
        skipped: bool = False,
    ) -> OptimizerStep:
        """The step whose numbers `group_numbers` gave right after it, when a schedule may have changed them since.

        Args:
            numbers: settings and learning rate of each group.
            moved: for each parameter, in the order of the groups, whether the step moved it; None: the gradients say,
                if they are there still.
            sparse: what was left of gradients that were compressed.
            skipped: no step was taken.
        """
        step = cls.__new__(cls)
        left_out: Counter[str] = Counter()
        found = list(_entries(optimizer, left_out, numbers))
        if moved is None:
            moved = [parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]]
        if not skipped and any(moved):
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            those = {id(one) for one, has_moved in zip(parameters, moved, strict=False) if has_moved}
            found = [entry for entry in found if id(entry[1]) in those]
        step._take(found, left_out, sparse or "none", (1.0, 1.0, skipped))
        return step

    def _take(
        self,
        found: Sequence[_Entry],
        left_out: Counter[str],
        gradients: Gradients,
        numbers: tuple[float, float, bool],
    ) -> None:
        self._left_out = left_out
        """How many parameters are left out, by the reason."""
        counts = _counts([slots.get("step") for _, _, _, slots in found])
        self._moves: list[_Move] = []
        for (settings, parameter, lr, slots), count in zip(found, counts, strict=True):
            step = optim.Step(count, lr, *numbers)
            tensors = _slots(settings, step, parameter, slots)
            if isinstance(tensors, str):
                self._left_out[tensors] += 1
            elif tensors:
                gradient = None if step.skipped else _gradient(parameter, tensors[0], gradients)
                self._moves.append(_Move(tensors, settings, step, gradient))

    def __call__(self, flat: FlatState) -> Found:
        """The updates of the parameters whose slots `flat` holds, in the order of the optimizers' parameters.

        Slots are found by their memory: wherever in the state they are, under whatever name, and once if tied.
        """
        names = {source.identity: name for name, source in flat.tensors.items()}
        updates: list[Update] = []
        uses: dict[str, int] = {}
        left_out = self._left_out.copy()
        for move in self._moves:
            slots = [names.get(identity) for identity in move.identities]
            known = tuple(name for name in slots if name is not None)
            for name in known:
                uses[name] = uses.get(name, 0) + 1
            if len(known) == len(slots):
                updates.append(Update(known, move.optimizer, move.step, move.gradient))
            else:
                left_out[_COPIES if not known else _PARTS] += 1
        found = [update for update in updates if all(uses[name] == 1 for name in update.slots)]
        if len(found) < len(updates):
            left_out[_SHARED] += len(updates) - len(found)
        return Found(found, _remark(len(found), left_out), left_out)


_COPIES: Final = (
    "the state does not hold the memory that the optimizer moves, but copies, if anything (clones, .cpu(), .numpy(), "
    "full_tensor(), other objects than this optimizer's)"
)
_PARTS: Final = (
    "the state holds only some of a parameter and what the optimizer keeps for it (the optimizer's state_dict() "
    "belongs in it, too)"
)
_SHARED: Final = "two parameters of the optimizers share memory"


def _remark(matched: int, left_out: Counter[str]) -> str | None:
    """What people are told of the parameters that are left out."""
    if not left_out:
        return None
    reasons = "; ".join(f"{reason} [{count}]" for reason, count in left_out.most_common())
    return (
        f"OptimizerStep: {matched} of {matched + left_out.total()} parameters matched, because {reasons}. What is not "
        "matched is stored as a difference, which takes more bytes"
    )


def clip_factor(norm: float | torch.Tensor, max_norm: float) -> float:
    """By what ``clip_grad_norm_(parameters, max_norm)`` multiplied the gradients, from the norm that it returned.

    In the arithmetic that torch uses: fp32 for fp32 gradients, the factor never above 1.
    """
    total = torch.as_tensor(norm)
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


@dataclass(frozen=True, slots=True)
class _Move:
    """One parameter's step. The sources keep the memory alive, without which identities mean nothing."""

    sources: tuple[TorchSource, ...]
    optimizer: optim.Optimizer
    step: optim.Step
    gradient: TorchSource | SparseGradient | None

    @property
    def identities(self) -> list[Hashable]:
        return [source.identity for source in self.sources]


def group_numbers(optimizer: torch.optim.Optimizer) -> tuple[tuple[optim.Optimizer, float] | None, ...]:
    """Settings and learning rate of each group; None for one whose arithmetic is not known."""
    kind = kind_of(optimizer)
    return tuple(
        None if kind is None or isinstance(numbers := _numbers(kind, group), str) else numbers
        for group in optimizer.param_groups
    )


def _numbers(kind: str, group: Mapping[str, Any]) -> tuple[optim.Optimizer, float] | str:
    """Settings and learning rate of a group, or why they cannot be had."""
    try:
        settings, lr = optim.from_group(kind, group), float(group["lr"])
    except (UnsupportedStateError, TypeError, ValueError) as error:
        return str(error)
    return (settings, lr) if math.isfinite(lr) else f"a learning rate of {lr}"


_Entry: TypeAlias = tuple[optim.Optimizer, torch.Tensor, float, Mapping[str, Any]]
"""Settings, parameter, learning rate and slots."""


def _entries(
    optimizer: torch.optim.Optimizer,
    left_out: Counter[str],
    known: Sequence[tuple[optim.Optimizer, float] | None] = (),
) -> Iterator[_Entry]:
    """Every parameter whose arithmetic is known.

    Args:
        known: the numbers of the groups, where they were noted earlier.
    """
    kind = kind_of(optimizer)
    if kind is None:
        inside = "; give OptimizerStep what it wraps, its .optimizer" if _wraps(optimizer) else ""
        reason = f"{type(optimizer).__qualname__} is none of torch.optim's {optim.listed()}{inside}"
        left_out[reason] += sum(len(group["params"]) for group in optimizer.param_groups)
        return
    for number, group in enumerate(optimizer.param_groups):
        numbers: tuple[optim.Optimizer, float] | str | None = known[number] if number < len(known) else None
        if numbers is None:
            numbers = _numbers(kind, group)
        if isinstance(numbers, str):
            left_out[f"{type(optimizer).__qualname__}: {numbers}"] += len(group["params"])
            continue
        settings, lr = numbers
        for parameter in group["params"]:
            yield settings, parameter, lr, optimizer.state.get(parameter, {})


def _wraps(optimizer: object) -> bool:
    """Whether it is a wrapper, as Accelerate's and others' are."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)


def _counts(steps: Sequence[Any]) -> list[int]:
    """How often each parameter was moved: SGD keeps no count, and then it is not 1. One wait for each device."""
    counts = [LATER] * len(steps)
    waiting: dict[torch.device, list[int]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            waiting.setdefault(step.device, []).append(index)
        elif isinstance(step, int | float) and math.isfinite(step):
            counts[index] = int(step)
    for indices in waiting.values():
        together = torch.stack([steps[index].detach().reshape(()).double() for index in indices])
        for index, value in zip(indices, together.tolist(), strict=True):
            counts[index] = int(value) if math.isfinite(value) else LATER
    return [min(max(count, 1), MAX_COUNT) for count in counts]


def _slots(
    settings: optim.Optimizer, step: optim.Step, parameter: torch.Tensor, slots: Mapping[str, Any]
) -> tuple[TorchSource, ...] | str:
    """The parameter's slots in the order of the rule, or why the arithmetic is not for them; none: there is no step."""
    found: list[TorchSource] = []
    for name in settings.rule(step).slots:
        tensor = parameter if name == "weight" else slots.get(name)
        if tensor is None:
            return ()  # not made yet
        source = _source(tensor)
        if source is None:
            return f"{name} has no plain bytes in memory ({type(tensor).__name__})"
        if source.dtype != "F32":
            return f"{name} is {source.dtype}, and only the arithmetic of fp32 is known"
        if found and source.shape != found[0].shape:
            return f"{name} has another shape than its parameter"
        found.append(source)
    return tuple(found) if found[0].nbytes else ()  # empty, as a rank's share may be


def _gradient(
    parameter: torch.Tensor, weight: TorchSource, gradients: Gradients
) -> TorchSource | SparseGradient | None:
    if not isinstance(gradients, str):
        given = gradients.get(parameter)
        if isinstance(given, SparseGradient):
            if given.size != weight.nbytes // 4:
                raise UsageError(f"a sparse gradient of {given.size} numbers for a parameter of {weight.nbytes // 4}")
            return given
        return None if given is None else _dense(parameter, weight, given)
    return None if gradients == "none" or parameter.grad is None else _dense(parameter, weight, parameter.grad)


def _dense(parameter: torch.Tensor, weight: TorchSource, gradient: torch.Tensor) -> TorchSource | None:
    placements = getattr(gradient, "placements", None)
    if placements is not None and placements != getattr(parameter, "placements", None):
        return None  # a partial sum, say: not what this rank's optimizer consumed
    shape = tuple(_local(gradient).shape)
    if shape != weight.shape:
        raise UsageError(f"a gradient of shape {shape} for a parameter of {weight.shape}")
    source = _source(gradient)
    return source if source is not None and source.dtype in _GRADIENTS else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor what this rank has of it, in its own memory; any other tensor is that itself."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    to_local = getattr(tensor, "to_local", None)  # torch.distributed need not be there to be asked
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: torch.Tensor = to_local()
    return local


def _source(tensor: object) -> TorchSource | None:
    """The tensor's bytes, if it has plain ones: not of another subclass than DTensor, sparse, freed or on meta."""
    if not isinstance(tensor, torch.Tensor):
        return None
    local = _local(tensor)
    if type(local) is not torch.Tensor and type(local) is not torch.nn.Parameter:
        return None
    try:
        return TorchSource(local)
    except UnsupportedStateError:
        return None
