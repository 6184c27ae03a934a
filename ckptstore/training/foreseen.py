"""The updates of a planned state: which tensors each optimizer moves is learnt once, the numbers are noted each step.

As an `OptimizerStep`, without looking at every parameter while training waits: how often each was moved is read from
the copy of the state, in the writer's thread. As there, nothing is believed: what is predicted wrongly costs bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.optim.step_settings import MAX_COUNT
from ckptstore.formats.sources import Bytes
from ckptstore.formats.state import FlatState
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.training.optimizers import LATER, OptimizerStep, group_numbers
from ckptstore.training.plan import StatePlan
from ckptstore.write.steps.updates import Update

__all__ = ["Foreseen", "Noted"]


@dataclass(frozen=True, slots=True)
class Noted:
    """The numbers of one optimizer's step.

    Attributes:
        groups: settings and learning rate of each group; None: its arithmetic is not known.
        skipped: the step was not taken.
        moved: for each parameter, in the order of the groups, whether it had a gradient; None: the counts will say.
        sparse: what was left of the gradients that were compressed.
    """

    groups: tuple[tuple[optim.Optimizer, float] | None, ...]
    skipped: bool
    moved: list[bool] | None
    sparse: Mapping[torch.Tensor, SparseGradient] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        *,
        skipped: bool,
        sparse: Mapping[torch.Tensor, SparseGradient] | None = None,
    ) -> Noted:
        """To be called right after the step."""
        moved: list[bool] | None = None
        if isinstance(optimizer, torch.optim.SGD) and not skipped:  # it keeps no counts
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            moved = list(map(is_not, map(attrgetter("grad"), parameters), repeat(None)))
            moved = moved if any(moved) else None  # gradients that were freed within the step say nothing
        return cls(group_numbers(optimizer), skipped, moved, sparse or {})

    def step(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """The same step of `optimizer` as ``updates=`` takes it, parameter by parameter."""
        return OptimizerStep.noted(optimizer, self.groups, moved=self.moved, sparse=self.sparse, skipped=self.skipped)

    @property
    def settings(self) -> tuple[optim.Optimizer | None, ...]:
        """Without what a schedule changes."""
        return tuple(None if one is None else one[0] for one in self.groups)


@dataclass(frozen=True, slots=True)
class _Row:
    """One parameter: the names of its slots, its group, its place among the optimizer's, where its count is."""

    parameter: torch.Tensor
    slots: tuple[str, ...]
    group: int
    number: int
    count: int | None


class Foreseen:
    """What the optimizers move in a planned state."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], plan: StatePlan, before: Foreseen | None = None
    ) -> None:
        """
        Args:
            before: of another plan, or of other settings: how often each parameter was moved is known of it still.
        """
        self._settings = [Noted.of(one, skipped=True).settings for one in optimizers]
        names = {source.identity: name for name, source in plan.tensors.items()}
        whole = FlatState(None, plan.tensors)
        self._rows = [_rows(one, whole, names, plan) for one in optimizers]
        # Prevents: parameters without a gradient that are taken for moved in the first step of a new plan.
        known = {} if before is None else before.counts
        self._counts = [
            _Counts([row.count for row in rows], [known.get(id(row.parameter), 0.0) for row in rows])
            for rows in self._rows
        ]

    @property
    def counts(self) -> dict[int, float]:
        """How often each parameter was moved, by its `id`, as far as was looked. The parameters are alive: rows have
        them."""
        return {
            id(row.parameter): float(count)
            for rows, counts in zip(self._rows, self._counts, strict=True)
            for row, count in zip(rows, counts.before, strict=True)
        }

    def fits(self, noted: Sequence[Noted]) -> bool:
        """Whether the groups' settings are those for which this was made; learning rates may differ."""
        return [one.settings for one in noted] == self._settings

    def updates(self, noted: Sequence[Noted] | None, memory: Bytes) -> Sequence[Update]:
        """The updates of a step, made when they are first looked at; None: nothing is known of it.

        Args:
            memory: with the state copied to it. Looked at now.
        """
        counted = [counts.now(memory) for counts in self._counts]
        if noted is None:
            return ()

        def made() -> Iterator[Update]:
            for rows, one, (counts, moved) in zip(self._rows, noted, counted, strict=True):
                yield from _made(rows, one, counts.tolist(), moved.tolist())

        return _Late(made)


class _Counts:
    """Where the counts of an optimizer's rows lie, and what they were."""

    def __init__(self, places: Sequence[int | None], before: Sequence[float]) -> None:
        self._known = np.array([place is not None for place in places], bool)
        self._places = np.array([place or 0 for place in places], np.int64) // 4
        self.before = np.array(before, np.float32)

    def now(self, memory: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """The counts, and which have changed since the last time or are not known."""
        if not self._known.any():
            return np.full(len(self._known), LATER, np.float32), ~self._known
        found = memory[: len(memory) // 4 * 4].view(np.float32)[self._places]
        found[~self._known] = LATER
        changed = (found != self.before) | ~self._known
        self.before = found
        return found, changed


def _rows(optimizer: torch.optim.Optimizer, whole: FlatState, names: dict[Any, str], plan: StatePlan) -> list[_Row]:
    slots = {
        update.slots[0]: update.slots for update in OptimizerStep(optimizer, gradients="none", skipped=True)(whole)
    }
    rows: list[_Row] = []
    number = -1
    for group, each in enumerate(optimizer.param_groups):
        for parameter in each["params"]:
            number += 1
            name = names.get(TorchSource(parameter).identity)
            if name not in slots:
                continue
            count = _count_of(optimizer.state[parameter], names, plan)
            rows.append(_Row(parameter, slots[name], group, number, count))
    return rows


def _count_of(slots: dict[str, Any], names: dict[Any, str], plan: StatePlan) -> int | None:
    step = slots.get("step")
    if not isinstance(step, torch.Tensor):
        return None
    source = TorchSource(step)
    name = names.get(source.identity)
    if name is None or source.dtype != "F32" or source.nbytes != 4 or plan.offsets[name] % 4:
        return None
    return plan.offsets[name]


def _made(rows: Sequence[_Row], noted: Noted, counts: Sequence[float], moved: Sequence[bool]) -> Iterator[Update]:
    steps: dict[tuple[int, float], optim.Step] = {}
    for row, count, has_moved in zip(rows, counts, moved, strict=True):
        if row.group >= len(noted.groups):  # a group was split after the step: what it did is not known
            continue
        numbers = noted.groups[row.group]
        if numbers is None or not (has_moved or noted.skipped):
            continue
        if noted.moved is not None and not (row.number < len(noted.moved) and noted.moved[row.number]):
            continue
        settings, lr = numbers
        step = steps.get((row.group, count))
        if step is None:
            known = LATER if not np.isfinite(count) else min(max(int(count), 1), MAX_COUNT)
            step = steps[row.group, count] = optim.Step(known, lr, skipped=noted.skipped)
        yield Update(row.slots, settings, step, None if noted.skipped else noted.sparse.get(row.parameter))


class _Late(Sequence[Update]):
    """A list that is made when somebody looks at it."""

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
