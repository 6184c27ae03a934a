"""Finds out whether the host computes an optimizer's steps with the same bits as a device does.

Kernels of a device may round differently from those of the CPU: they contract products and sums (FMA), or use another
formula. So nothing is assumed. Steps of the optimizer's own class, with the settings of its group, are computed on the
device from some thousand numbers of wide range, and compared bit for bit with what the host computes from the same
numbers. Of DTensors (FSDP2) the probe is a DTensor, too: torch computes their steps in its own way. This costs some
launches, some hundred KB of the device's memory, which are freed, and one wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from ckptstore.agent.protocol.replica_arithmetic import rule_of, variants_of
from ckptstore.errors import CkptError
from ckptstore.formats import optim
from ckptstore.frameworks.torch_optimizers import TorchSteps, settings_of
from ckptstore.frameworks.torch_shards import local_part
from ckptstore.frameworks.torch_tensors import flat_bytes, on_host
from ckptstore.training.replica.replicable_state import Replicable

__all__ = ["Probed", "Probes", "UnknownArithmeticError", "probed"]

_COUNT: Final = 4133
"""Numbers of the probe: a device's kernels have a rest that fills no vector, too."""
_STEPS: Final = 4
_DECADES: Final = {torch.float16: 3.0}
_WIDE: Final = 12.0
"""Numbers are from 10**-12 to 10**12: their squares are finite, and differ from 0."""
_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "as on the CPU": {},
        "foreach": {"foreach": True, "fused": None},
        "for-loop": {"foreach": False, "fused": None},
    }
)
"""How the agent may compute a step: settings that replace those of the group."""


_REST: Final = "states are handed over whole: take strategy='gradient' or 'delta', which are as exact"
_LOG: Final = logging.getLogger("ckptstore.training")


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe has found.

    Attributes:
        variant: the name of the arithmetic that gives the device's bits; None: no known one does.
        settings: settings that replace those of the group at the agent.
        exact: the variant is one of `agent.protocol.replica_arithmetic`, not of torch's kernels on the CPU.
        different: how many numbers of the probe differ, of the variant with the fewest.
        count: how many were compared.
    """

    variant: str | None
    settings: Mapping[str, Any]
    different: int
    count: int
    exact: bool = False


class UnknownArithmeticError(Exception):
    """A device's arithmetic is none that an agent computes. The text says of which optimizer."""


class Probes:
    """The probes of the optimizers of a script, each made once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, torch.device, torch.dtype, Hashable], Probed] = {}

    def of(self, optimizers: Sequence[torch.optim.Optimizer], form: Replicable) -> dict[tuple[int, int], Probed]:
        """What was found for the groups with parameters on a device, by the positions of optimizer and group.

        Raises:
            UnknownArithmeticError: see there.
        """
        found: dict[tuple[int, int], Probed] = {}
        for row, parameter in zip(form.recipe.rows, form.parameters, strict=True):
            if not row.made or on_host(parameter):
                continue
            one = self._probed(optimizers[row.optimizer], row.group, parameter)
            if found.setdefault((row.optimizer, row.group), one).variant != one.variant:
                raise UnknownArithmeticError(
                    f"a group of {type(optimizers[row.optimizer]).__name__} needs two kinds of arithmetic; {_REST}"
                )
        return found

    def _probed(self, optimizer: torch.optim.Optimizer, group: int, parameter: torch.Tensor) -> Probed:
        mesh = getattr(parameter, "device_mesh", None)
        key = id(optimizer), group, parameter.device, parameter.dtype, mesh
        found = self._found.get(key)
        kind = type(optimizer).__name__
        settings = settings_of(optimizer, optimizer.param_groups[group])
        if found is None:
            try:
                found = probed(kind, settings, parameter.device, parameter.dtype, mesh)
            except (CkptError, RuntimeError, TypeError, ValueError) as error:
                raise UnknownArithmeticError(
                    f"the arithmetic of {kind} on {parameter.device} could not be compared: {error}; {_REST}"
                ) from error
            self._found[key] = found
            _LOG.debug("replica: %s on %s in %s: %s", kind, parameter.device, parameter.dtype, found)
        if found.variant is None:
            known = ", ".join([*_VARIANTS, *_exact(kind, settings, parameter.dtype)])
            raise UnknownArithmeticError(
                f"{kind} on {parameter.device} rounds {found.different:,} of {found.count:,} numbers of a probe "
                f"({parameter.dtype}) unlike every arithmetic that the agent has ({known}); {_REST}"
            )
        return found


def probed(
    kind: str, settings: Mapping[str, Any], device: torch.device, dtype: torch.dtype, mesh: Any = None
) -> Probed:
    """Compare the arithmetic of a device with the variants that the agent can compute.

    Args:
        kind: one of `formats.optim.KINDS`.
        settings: of a parameter group, from `settings_of`.
        mesh: of the ranks, if the parameters are DTensors; None: they are whole.

    Raises:
        RuntimeError, ValueError, TypeError: the optimizer does not take these settings there.
    """
    wanted = _stepped(kind, settings, device, dtype, mesh)
    fewest, count = -1, sum(one.numel() for one in wanted) // dtype.itemsize
    variants = [(name, others, False) for name, others in _VARIANTS.items()]
    for name, others, exact in [*variants, *((name, {}, True) for name in _exact(kind, settings, dtype))]:
        if exact:
            found = _stepped_exactly(kind, settings, name)
        else:
            found = _stepped(kind, {**settings, **others}, torch.device("cpu"), dtype)
        different = sum(_differing(one, other, dtype) for one, other in zip(wanted, found, strict=True))
        if not different:
            return Probed(name, others, 0, count, exact)
        fewest = different if fewest < 0 else min(fewest, different)
    return Probed(None, {}, fewest, count)


def _exact(kind: str, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
    """The variants of `agent.protocol.replica_arithmetic`: they are of fp32."""
    return variants_of(kind, settings) if dtype == torch.float32 else ()


def _stepped_exactly(kind: str, settings: Mapping[str, Any], variant: str) -> list[torch.Tensor]:
    """As `_stepped`, with the exact arithmetic of a variant."""
    drawn = _Numbers(torch.float32)
    state = [drawn.next().numpy(), *(np.zeros(_COUNT, np.float32) for _ in _slots(kind, settings))]
    for step in range(1, _STEPS + 1):
        # SGD's buffer is there before the first step: `_stepped` does not let torch make it.
        count = step if kind != "SGD" else step + 1
        optim.advance(rule_of(kind, settings, variant, count), state, drawn.next().numpy())
    return [flat_bytes(torch.from_numpy(one)) for one in state]


class _Numbers:
    """The numbers of the probe: the same in each run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chance = np.random.default_rng(20)

    def next(self) -> torch.Tensor:
        """A parameter or gradient, on the host."""
        decades = _DECADES.get(self._dtype, _WIDE)
        numbers = 10.0 ** self._chance.uniform(-decades, decades, _COUNT) * self._chance.choice([-1.0, 1.0], _COUNT)
        return torch.from_numpy(numbers).to(self._dtype)


def _stepped(
    kind: str, settings: Mapping[str, Any], device: torch.device, dtype: torch.dtype, mesh: Any = None
) -> list[torch.Tensor]:
    """The bytes of parameter and slots after some steps, on the host."""
    drawn = _Numbers(dtype)
    tensors = {"weight": _on_mesh(drawn.next().to(device), mesh)}
    for name in _slots(kind, settings):
        tensors[name] = torch.zeros_like(tensors["weight"])
    names = list(tensors)
    if kind != "SGD":
        # torch keeps the counts of a fused step on the device.
        tensors["step"] = torch.zeros((), device=device if settings.get("fused") else "cpu")
        names.append("step")
    row = {name: number for number, name in enumerate(names)}
    with torch.no_grad():
        steps = TorchSteps(kind, [[row]], lambda number: tensors[names[number]])
        for _ in range(_STEPS):
            steps.step([settings], [[_on_mesh(drawn.next().to(device), mesh)]])
        return [flat_bytes(local_part(one)).cpu() for name, one in tensors.items() if name != "step"]


def _on_mesh(part: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A DTensor of which this rank has a part. Ranks do not communicate for it."""
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(part, mesh, [Shard(0)] * mesh.ndim, run_check=False)


def _slots(kind: str, settings: Mapping[str, Any]) -> list[str]:
    """The slots of a parameter's shape."""
    if kind == "SGD":
        return ["momentum_buffer"] if settings.get("momentum") else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings.get("amsgrad") else [])]


def _differing(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> int:
    """How many numbers differ in a bit."""
    different = (one != other).view(-1, dtype.itemsize).any(1)
    return int(different.sum())
