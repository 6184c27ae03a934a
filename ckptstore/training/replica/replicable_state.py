"""Which tensors of a script's state an agent can compute (`agent.protocol.replica_recipe`), or what prevents it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ckptstore.agent.protocol.message_fields import StateLayout
from ckptstore.agent.protocol.replica_recipe import Recipe, Row
from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats.optim import KINDS
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_optimizers import settings_of
from ckptstore.frameworks.torch_shards import local_part
from ckptstore.frameworks.torch_tensors import TorchSource, on_host
from ckptstore.training.capture.script_state import ScriptState

__all__ = ["Replicable", "check_replicable"]

_SMALL: Final = 16 << 10
"""A parameter of fewer bytes is sent with its slots: that costs no more than to copy its gradient and to digest the
result."""


def check_replicable(captured: ScriptState) -> None:
    """Refuse a script that an agent cannot replicate.

    Raises:
        UsageError: with the reason and the remedy.
    """
    other = "take strategy='gradient' or 'delta', which are as exact"
    if not captured.optimizers:
        raise UsageError("strategy='replica': there is no optimizer whose steps an agent could repeat")
    for optimizer in captured.optimizers:
        kind = type(optimizer)
        if kind.__name__ not in KINDS or kind is not getattr(torch.optim, kind.__name__):
            raise UsageError(
                f"strategy='replica': an agent repeats the steps of torch.optim's {', '.join(KINDS)} bit for bit; "
                f"the arithmetic of {kind.__module__}.{kind.__qualname__} is not known: {other}"
            )
        for group in optimizer.param_groups:
            try:
                settings_of(optimizer, group)
            except UnsupportedStateError as error:
                raise UsageError(f"strategy='replica': {kind.__qualname__}: {error}; or {other}") from error
        away = [one for group in optimizer.param_groups for one in group["params"] if not on_host(one)]
        devices = {str(one.device) for one in away if not one.is_cuda}
        if devices:
            raise UsageError(
                f"strategy='replica': parameters are on {min(devices)}, from which gradients can be copied without "
                f"waiting only if it is a CUDA device: {other}"
            )
        if away and captured.scaled and any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"strategy='replica': a scaler passes its scale to {kind.__qualname__}(fused=True) on "
                f"{away[0].device}, which is known only after waiting for the device: leave fused out, or {other}"
            )


@dataclass(frozen=True)
class Replicable:
    """What an agent computes of a state of one form.

    Attributes:
        recipe: the instructions for the agent.
        parameters: the parameters of the recipe's rows, in their order. For a DTensor this rank's part is computed.
        sources: the state's tensors by position. Those that the agent computes are the same objects in every step.
    """

    recipe: Recipe
    parameters: tuple[torch.Tensor, ...]
    sources: tuple[Any, ...]

    @classmethod
    def of(cls, flat: FlatState, captured: ScriptState, refused: Collection[str]) -> Replicable:
        """The replicable part of a state.

        Args:
            refused: names of tensors that the agent has computed wrongly before: they are sent.
        """
        layout = StateLayout.of(flat.tensors)
        sources: tuple[Any, ...] = tuple(flat.tensors.values())
        numbers = {source.identity: number for number, source in enumerate(sources)}
        found = list(_rows(captured.optimizers, numbers, sources))
        uses = Counter(number for row, _, _ in found for _, number in row.slots)
        sent = {number for number, one in enumerate(layout.tensors) if one.name in refused}
        rows: list[Row] = []
        made: set[int] = set()
        for row, whole, _ in found:
            alone = all(uses[number] == 1 and number not in sent for _, number in row.slots)
            rows.append(Row(row.optimizer, row.group, row.slots, row.made and alone))
            if rows[-1].made:
                made |= whole
        made |= set(_still(captured.models, numbers, sources, uses)) - sent
        kinds = tuple(type(one).__name__ for one in captured.optimizers)
        groups = tuple(len(one.param_groups) for one in captured.optimizers)
        summed = tuple(number for number in sorted(made) if not on_host(sources[number].tensor))
        recipe = Recipe(layout, kinds, groups, tuple(rows), tuple(sorted(made)), summed)
        return cls(recipe, tuple(parameter for _, _, parameter in found), sources)

    def with_variants(self, found: Mapping[tuple[int, int], str]) -> Replicable:
        """The same with the variants of groups, by the positions of optimizer and group."""
        groups = enumerate(self.recipe.groups)
        variants = tuple(tuple(found.get((place, number)) for number in range(count)) for place, count in groups)
        return replace(self, recipe=replace(self.recipe, variants=variants))

    def fits(self, flat: FlatState) -> bool:
        """Whether another state has this form, and the tensors that the agent computes are at the same addresses."""
        now = list(flat.tensors.values())
        return StateLayout.of(flat.tensors) == self.recipe.layout and all(
            now[number].identity == self.sources[number].identity for number in self._watched
        )

    @property
    def _watched(self) -> Iterator[int]:
        yield from self.recipe.made
        yield from (row.weight for row in self.recipe.rows)


def _rows(
    optimizers: Sequence[torch.optim.Optimizer], numbers: Mapping[Any, int], sources: Sequence[Any]
) -> Iterator[tuple[Row, set[int], torch.Tensor]]:
    """For each parameter in the state: its row, the positions of its tensors of the same shape, the parameter."""
    for place, optimizer in enumerate(optimizers):
        for group, settings in enumerate(optimizer.param_groups):
            for parameter in settings["params"]:
                weight = numbers.get(_identity(parameter))
                if weight is None:
                    continue
                part = local_part(parameter)
                slots, whole, known = [("weight", weight)], {weight}, _plain(part)
                for name, value in optimizer.state.get(parameter, {}).items():
                    if value is None:
                        continue
                    number = numbers.get(_identity(value)) if isinstance(value, torch.Tensor) else None
                    if number is None:
                        known = False
                        continue
                    slots.append((name, number))
                    if value.numel() != 1:
                        whole.add(number)
                        its = local_part(value)
                        alike = its.shape == part.shape and its.device == part.device
                        known = known and _plain(its) and alike
                big = sources[weight].nbytes >= _SMALL
                yield Row(place, group, tuple(slots), known and big), whole, parameter


def _still(
    models: Sequence[torch.nn.Module], numbers: Mapping[Any, int], sources: Sequence[Any], moved: Mapping[int, int]
) -> Iterator[int]:
    """Parameters that no optimizer moves, such as frozen ones."""
    for model in models:
        for parameter in model.parameters():
            number = numbers.get(_identity(parameter))
            still = number is not None and number not in moved and sources[number].nbytes >= _SMALL
            if number is not None and still and _plain(local_part(parameter)):
                yield number


def _plain(tensor: torch.Tensor) -> bool:
    """Whether kernels treat the agent's copy the same: a plain torch tensor, contiguous, of real numbers."""
    kind = type(tensor)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and (on_host(tensor) or tensor.is_cuda)
        and tensor.is_contiguous()
        and tensor.is_floating_point()
    )


def _identity(tensor: torch.Tensor) -> Any:
    try:
        return TorchSource(local_part(tensor)).identity
    except UnsupportedStateError:
        return None
