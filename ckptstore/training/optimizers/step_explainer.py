"""What is noted of an optimizer's step right after it, and the updates that a state gets from the notes.

A note (`NotedStep`) has numbers, and refers to gradients; a `StepExplainer` finds the optimizers' parameters in a state
once, and turns the notes of any number of steps into `Update`s. `optimizer_step` says which parameters are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Final

import torch

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.optim.step_settings import MAX_COUNT
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.frameworks.torch_tensors import TorchSource, counted_changes
from ckptstore.write.steps.updates import LateGradient, Update

__all__ = [
    "LATER",
    "NotedStep",
    "ParameterRow",
    "StepExplainer",
    "bounded_count",
    "dense_gradient",
    "group_numbers",
    "have_gradients",
    "moved_by",
    "rows_of",
    "wraps",
]

_GRADIENTS: Final = ("F32", "BF16", "F16")
LATER: Final = 2
"""Any count but 1: SGD's buffer existed before, or there is no base from which the step could start."""


@dataclass(frozen=True, slots=True)
class NotedStep:
    """The numbers of one optimizer's step.

    Attributes:
        groups: settings and learning rate of each group; None: its arithmetic is not known.
        skipped: the step was not taken.
        moved: whether each parameter had a gradient, in the order of the groups; None: unknown, so all may have moved.
        gradients: what the optimizer consumed, by parameter, as far as it is to be stored.
        factors: clipping factor and loss scale of these gradients.
        carried: the gradients on devices that the optimizer consumed, by parameter, and torch's counts of their changes
            (`Update.carried`).
        still: the numbers of parameters on devices that had no gradient.
        scales: the scales of quantized gradients, by parameter.
    """

    groups: tuple[tuple[optim.Optimizer, float] | None, ...]
    skipped: bool
    moved: Sequence[bool] | None = None
    gradients: Mapping[torch.Tensor, TorchSource | SparseGradient | LateGradient] = field(default_factory=dict)
    factors: tuple[float, float] = (1.0, 1.0)
    carried: Mapping[torch.Tensor, tuple[torch.Tensor, int]] = field(default_factory=dict)
    still: Set[int] = frozenset()
    scales: Mapping[torch.Tensor, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        *,
        skipped: bool,
        sparse: Mapping[torch.Tensor, SparseGradient | LateGradient] | None = None,
        carry: bool = False,
    ) -> NotedStep:
        """Note a step. Call it right after the step.

        Args:
            sparse: what was left of the gradients that were compressed.
            carry: refer to the gradients on devices, too.
        """
        # Training waits for this. Only SGD keeps no counts, which tell later what moved: 3,000 gradients take 2 ms.
        moved = None if skipped or not isinstance(optimizer, torch.optim.SGD) else moved_by(optimizer)
        noted = cls(group_numbers(optimizer), skipped, moved, sparse or {})
        return _carrying(noted, optimizer) if carry and not skipped else noted

    @property
    def settings(self) -> tuple[optim.Optimizer | None, ...]:
        """The settings of the groups, without the learning rates that a schedule changes."""
        return tuple(None if one is None else one[0] for one in self.groups)


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter and what its optimizer keeps for it. The sources keep the memory alive that identifies them.

    Attributes:
        optimizer, group: numbers of its optimizer and group.
        number: its number among the optimizer's parameters.
        sources: the weight, then its slots in the order of the rule.
        count: torch's count of its steps; None: the optimizer keeps none.
    """

    parameter: torch.Tensor
    optimizer: int
    group: int
    number: int
    sources: tuple[TorchSource, ...]
    count: Any


class StepExplainer:
    """Finds the optimizers' parameters in a state once, and makes the updates of steps from noted numbers.

    Attributes:
        rows: the parameters that the state holds with all their slots, in the optimizers' order.
        left_out: how many parameters are left out, by reason.
    """

    def __init__(self, rows: Sequence[ParameterRow], left_out: Counter[str], flat: FlatState) -> None:
        """
        Args:
            left_out: the parameters that have no row.
        """
        names = {source.identity: name for name, source in flat.tensors.items()}
        self.left_out = left_out.copy()
        uses: Counter[str] = Counter()
        known: list[tuple[ParameterRow, tuple[str, ...]]] = []
        for row in rows:
            found = tuple(name for one in row.sources if (name := names.get(one.identity)) is not None)
            uses.update(found)
            if len(found) == len(row.sources):
                known.append((row, found))
            else:
                self.left_out[_COPIES if not found else _PARTS] += 1
        alone = [(row, slots) for row, slots in known if all(uses[name] == 1 for name in slots)]
        if len(alone) < len(known):
            self.left_out[_SHARED] += len(known) - len(alone)
        self.rows = [row for row, _ in alone]
        self._slots = [slots for _, slots in alone]

    @classmethod
    def of(
        cls, optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep], flat: FlatState
    ) -> StepExplainer:
        """Find the parameters of which these notes know the arithmetic."""
        return cls(*rows_of(optimizers, notes), flat)

    def updates(self, notes: Sequence[NotedStep], counts: Iterable[float], moved: Iterable[bool]) -> Iterator[Update]:
        """Make the updates of one step.

        Args:
            notes: its numbers, one note for each optimizer.
            counts: of each of `rows`, its count of steps.
            moved: of each of `rows`, whether the step may have moved it.
        """
        steps: dict[tuple[int, int, float, float], optim.Step] = {}
        for row, slots, count, may_have_moved in zip(self.rows, self._slots, counts, moved, strict=False):
            noted = notes[row.optimizer]
            # A group that was split off after the step has no numbers: nothing is known of what the step did there.
            numbers = noted.groups[row.group] if row.group < len(noted.groups) else None
            if numbers is None or not (may_have_moved or noted.skipped) or not _has_moved(noted, row.number):
                continue
            settings, lr = numbers
            scale = noted.scales.get(row.parameter, 1.0)
            key = row.optimizer, row.group, count, scale
            step = steps.get(key)
            if step is None:
                step = steps[key] = optim.Step(bounded_count(count), lr, *noted.factors, noted.skipped, scale)
            gradient = None if noted.skipped else noted.gradients.get(row.parameter)
            carried = _now(row, noted) if gradient is None else None
            yield Update(slots, settings, step, gradient, carried, row.number in noted.still)


def rows_of(
    optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep]
) -> tuple[list[ParameterRow], Counter[str]]:
    """The parameters whose arithmetic is known, and how many are left out, by reason."""
    left_out: Counter[str] = Counter()
    rows: list[ParameterRow] = []
    for place, (optimizer, noted) in enumerate(zip(optimizers, notes, strict=True)):
        if (kind := kind_of(optimizer)) is None:
            inside = "; give OptimizerStep what it wraps, its .optimizer" if wraps(optimizer) else ""
            unknown = f"{type(optimizer).__qualname__} is none of torch.optim's {optim.listed()}{inside}"
            left_out[unknown] += sum(len(group["params"]) for group in optimizer.param_groups)
            continue
        first = 0
        for number, group in enumerate(optimizer.param_groups):
            parameters = group["params"]
            numbers = noted.groups[number] if number < len(noted.groups) else None
            if numbers is not None:
                names = numbers[0].rule(optim.Step(LATER, numbers[1], skipped=True)).slots
                for index, parameter in enumerate(parameters, first):
                    if not _has_moved(noted, index):
                        continue
                    slots = optimizer.state.get(parameter, {})
                    sources = _sources(names, parameter, slots)
                    if isinstance(sources, str):
                        left_out[sources] += 1
                    elif sources:
                        rows.append(ParameterRow(parameter, place, number, index, sources, slots.get("step")))
            elif isinstance(reason := _numbers(kind, group), str):
                left_out[f"{type(optimizer).__qualname__}: {reason}"] += len(parameters)
            first += len(parameters)
    return rows, left_out


def have_gradients(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Whether each parameter has a gradient, in the order of the groups."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return list(map(is_not, map(attrgetter("grad"), parameters), repeat(None)))


def moved_by(optimizer: torch.optim.Optimizer) -> list[bool] | None:
    """Whether each parameter has a gradient; None: none has, because the step freed them, so they say nothing."""
    found = have_gradients(optimizer)
    return found if any(found) else None


def _carrying(noted: NotedStep, optimizer: torch.optim.Optimizer) -> NotedStep:
    """The note of a step with the gradients on devices, and how often torch has counted changes of them."""
    found, still = {}, set()
    parameters = [(one, _keeps_gradients(group)) for group in optimizer.param_groups for one in group["params"]]
    for number, (parameter, kept) in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            still.add(number)
        elif gradient.is_cuda and kept:
            found[parameter] = gradient, counted_changes(gradient)
    # An optimizer in backward frees the gradients with its step: then they say nothing.
    return replace(noted, carried=found, still=still) if found else noted


def _keeps_gradients(group: Mapping[str, Any]) -> bool:
    """Whether gradients are after a step what it consumed. SGD's foreach form adds Nesterov's momentum in place."""
    return not group.get("nesterov") or bool(group.get("fused")) or group.get("foreach") is False


def _now(row: ParameterRow, noted: NotedStep) -> TorchSource | None:
    """The gradient that a step consumed, if it is still what it was."""
    gradient, changes = noted.carried.get(row.parameter, (None, 0))
    if gradient is None or counted_changes(gradient) != changes:
        return None
    try:
        return dense_gradient(row.parameter, row.sources[0], gradient)
    except UsageError:
        return None


def _has_moved(noted: NotedStep, number: int) -> bool:
    """Whether a step moved its optimizer's parameter of this number, as far as its gradients tell."""
    return noted.moved is None or (number < len(noted.moved) and noted.moved[number])


_COPIES: Final = (
    "the state does not hold the memory that the optimizer moves, but copies, if anything (clones, .cpu(), .numpy(), "
    "full_tensor(), other objects than this optimizer's)"
)
_PARTS: Final = (
    "the state holds only some of a parameter and what the optimizer keeps for it (the optimizer's state_dict() "
    "belongs in it, too)"
)
_SHARED: Final = "two parameters of the optimizers share memory"


def group_numbers(optimizer: torch.optim.Optimizer) -> tuple[tuple[optim.Optimizer, float] | None, ...]:
    """Settings and learning rate of each group; None for one whose arithmetic is not known."""
    kind = kind_of(optimizer)
    return tuple(
        None if kind is None or isinstance(numbers := _numbers(kind, group), str) else numbers
        for group in optimizer.param_groups
    )


def _numbers(kind: str, group: Mapping[str, Any]) -> tuple[optim.Optimizer, float] | str:
    """Settings and learning rate of a group, or why there are none."""
    try:
        settings, lr = optim.from_group(kind, group), float(group["lr"])
    except (UnsupportedStateError, TypeError, ValueError) as error:
        return str(error)
    return (settings, lr) if math.isfinite(lr) else f"a learning rate of {lr}"


def wraps(optimizer: object) -> bool:
    """Whether it is a wrapper, as Accelerate's and others' are."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)


def bounded_count(count: float) -> int:
    """A count of steps as a segment stores it; `LATER` if it is not finite."""
    return min(max(int(count), 1), MAX_COUNT) if math.isfinite(count) else LATER


def _sources(names: Sequence[str], parameter: torch.Tensor, slots: Mapping[str, Any]) -> tuple[TorchSource, ...] | str:
    """The parameter's slots in the order of the rule, or why the arithmetic is not for them. Empty: it has none yet."""
    found: list[TorchSource] = []
    for name in names:
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


def dense_gradient(
    parameter: torch.Tensor, weight: TorchSource, gradient: torch.Tensor, dtypes: Sequence[str] = _GRADIENTS
) -> TorchSource | None:
    """The bytes of a dense gradient; None: they are not what this rank's optimizer consumed, or not of `dtypes`.

    Raises `UsageError` if its shape is not that of `weight`, the parameter's bytes.
    """
    placements = getattr(gradient, "placements", None)
    if placements is not None and placements != getattr(parameter, "placements", None):
        return None  # such as a partial sum: not what this rank's optimizer consumed
    shape = tuple(_local(gradient).shape)
    if shape != weight.shape:
        raise UsageError(f"a gradient of shape {shape} for a parameter of {weight.shape}")
    source = _source(gradient)
    return source if source is not None and source.dtype in dtypes else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, in its own memory; any other tensor itself."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    to_local = getattr(tensor, "to_local", None)  # works without torch.distributed
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: torch.Tensor = to_local()
    return local


def _source(tensor: object) -> TorchSource | None:
    """The tensor's bytes if they are plain; None: a subclass other than DTensor, a sparse, freed or meta tensor."""
    if not isinstance(tensor, torch.Tensor):
        return None
    local = _local(tensor)
    if type(local) is not torch.Tensor and type(local) is not torch.nn.Parameter:
        return None
    try:
        return TorchSource(local)
    except UnsupportedStateError:
        return None
