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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.optim.step_settings import MAX_COUNT
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.frameworks.torch_tensors import TorchSource, counted_changes
from ckptstore.write.steps.updates import Found, Hold, LateGradient, Update

__all__ = [
    "LATER",
    "Gradients",
    "NotedStep",
    "OptimizerStep",
    "ParameterRow",
    "QuantizedGradient",
    "StepExplainer",
    "clip_factor",
]


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

_GRADIENTS: Final = ("F32", "BF16", "F16")
_QUANTA: Final = ("I8", "F8_E4M3", "F8_E5M2")
LATER: Final = 2
"""Any count but 1: SGD's buffer existed before, or there is no base from which the step could start."""


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
            inner = " (its .optimizer is one)" if _wraps(optimizer) else ""
            raise UsageError(
                f"optimizer: {type(optimizer).__name__}; expected a torch.optim.Optimizer{inner}, or several"
            )
        moved = [_have_gradients(one) if kind_of(one) is not None else [] for one in optimizers]
        any_moved = any(map(any, moved))
        if gradients == "grad" and not any_moved:
            gradients = "none"  # they were freed already; a prediction needs none
        only_moved = isinstance(gradients, str) and not skipped and any_moved
        self._hold: Hold | None = None
        self._optimizers = list(optimizers)
        factors = (float(clip), loss_scale)
        notes = [
            NotedStep(_group_numbers(one), skipped, each if only_moved else None, factors=factors)
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
                note if note.skipped or note.moved is not None else replace(note, moved=_moved(one))
                for one, note in zip(optimizers, notes, strict=True)
            ],
        )
        step._hold = hold
        step._optimizers = list(optimizers)
        return step

    def _take(self, optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep]) -> None:
        self._notes = list(notes)
        self._rows: list[ParameterRow]
        self._rows, self._left_out = _rows_of(optimizers, notes)
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
        moved = None if skipped or not isinstance(optimizer, torch.optim.SGD) else _moved(optimizer)
        noted = cls(_group_numbers(optimizer), skipped, moved, sparse or {})
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


def _key(row: ParameterRow) -> tuple[int, int]:
    return row.optimizer, row.number


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
        return cls(*_rows_of(optimizers, notes), flat)

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
                step = steps[key] = optim.Step(_counted(count), lr, *noted.factors, noted.skipped, scale)
            gradient = None if noted.skipped else noted.gradients.get(row.parameter)
            carried = _now(row, noted) if gradient is None else None
            yield Update(slots, settings, step, gradient, carried, row.number in noted.still)


def _rows_of(
    optimizers: Sequence[torch.optim.Optimizer], notes: Sequence[NotedStep]
) -> tuple[list[ParameterRow], Counter[str]]:
    """The parameters whose arithmetic is known, and how many are left out, by reason."""
    left_out: Counter[str] = Counter()
    rows: list[ParameterRow] = []
    for place, (optimizer, noted) in enumerate(zip(optimizers, notes, strict=True)):
        if (kind := kind_of(optimizer)) is None:
            inside = "; give OptimizerStep what it wraps, its .optimizer" if _wraps(optimizer) else ""
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


def _have_gradients(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Whether each parameter has a gradient, in the order of the groups."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return list(map(is_not, map(attrgetter("grad"), parameters), repeat(None)))


def _moved(optimizer: torch.optim.Optimizer) -> list[bool] | None:
    """Whether each parameter has a gradient; None: none has, because the step freed them, so they say nothing."""
    found = _have_gradients(optimizer)
    return found if any(found) else None


_waits: Final[WeakKeyDictionary[torch.optim.Optimizer, list[Callable[[], None]]]] = WeakKeyDictionary()
"""What optimizers wait for before their next step. Those that are here have a hook for it, as long as they live."""


def _wait_for(waits: list[Callable[[], None]], *_: Any) -> None:
    taken = list(waits)
    waits.clear()
    for wait in taken:
        wait()


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
        return _dense(row.parameter, row.sources[0], gradient)
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


def _group_numbers(optimizer: torch.optim.Optimizer) -> tuple[tuple[optim.Optimizer, float] | None, ...]:
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


def _wraps(optimizer: object) -> bool:
    """Whether it is a wrapper, as Accelerate's and others' are."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)


def _counts(steps: Sequence[Any]) -> list[int]:
    """How often each parameter was moved; `LATER` where torch keeps no count. Waits once for each device."""
    counts = [LATER] * len(steps)
    waiting: dict[torch.device, list[int]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            waiting.setdefault(step.device, []).append(index)
        elif isinstance(step, int | float) and math.isfinite(step):
            counts[index] = _counted(step)
    for indices in waiting.values():
        together = torch.stack([steps[index].detach().reshape(()).double() for index in indices])
        for index, value in zip(indices, together.tolist(), strict=True):
            counts[index] = _counted(value)
    return counts


def _counted(count: float) -> int:
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
            return _dense(parameter, weight, given.values, _QUANTA)
        return None if given is None else _dense(parameter, weight, given)
    return None if gradients == "none" or parameter.grad is None else _dense(parameter, weight, parameter.grad)


def _scales(gradients: Gradients) -> dict[torch.Tensor, float]:
    """The scales of quantized gradients."""
    given = () if isinstance(gradients, str) else gradients.items()
    return {one: float(its.scale) for one, its in given if isinstance(its, QuantizedGradient)}


def _dense(
    parameter: torch.Tensor, weight: TorchSource, gradient: torch.Tensor, dtypes: Sequence[str] = _GRADIENTS
) -> TorchSource | None:
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
