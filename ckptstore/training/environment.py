"""What of a training script decides its bits beside its machine: how each optimizer computes, and for how many ranks.

The machine's part (torch, threads, CPU capability, oneDNN ...) the engine records with every term, and compares itself
(`frameworks.bridge`). This is recorded in each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptstore.frameworks.bridge import environment_differences
from ckptstore.host.caller_warnings import DeterminismWarning, warn

__all__ = ["compared", "described", "hyperparameters", "unheeded"]

_CHOSEN = ("weight_decay", "eps", "alpha", "rho", "lr_decay", "dampening", "nesterov", "amsgrad", "maximize")
_SCHEDULED = ("lr", "betas", "momentum")
_FLAGS = ("fused", "foreach", "capturable", "differentiable")


def described(optimizers: Sequence[torch.optim.Optimizer], ranks: int, sharding: str = "") -> dict[str, str]:
    """Name -> value of what changes bits and this script has chosen.

    Args:
        sharding: how parameters are cut; empty: they are not.
    """
    found = {"ranks": str(ranks)}
    if sharding:
        found["sharding"] = sharding
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number}"] = implementation(optimizer)
    return found


def implementation(optimizer: torch.optim.Optimizer) -> str:
    """``AdamW, foreach=None, fused=True``: which of torch's implementations it was told to use, group by group."""
    said = {", ".join(f"{flag}={group[flag]}" for flag in _FLAGS if flag in group) for group in optimizer.param_groups}
    return ", ".join([type(optimizer).__qualname__, *sorted(one for one in said if one)])


def compared(before: object, now: Mapping[str, str], ref: str) -> list[str]:
    """Warn (`DeterminismWarning`) if a checkpoint was made in another way -> what differs.

    Args:
        before: what the checkpoint says; anything else than a mapping says nothing.
        ref: the checkpoint, for people.
    """
    if not isinstance(before, Mapping):
        return []
    recorded: dict[str, Any] = dict(before)
    differences = environment_differences(recorded, now)
    if differences:
        warn(
            f"resuming {ref}: the run will not be bit-identical to one that never stopped: " + "; ".join(differences),
            DeterminismWarning,
        )
    return differences


def hyperparameters(optimizers: Sequence[torch.optim.Optimizer], *, scheduled: bool) -> list[list[dict[str, Any]]]:
    """Of each optimizer, for each group of parameters, the numbers that its script chose, by name.

    Args:
        scheduled: there is a schedule. What it may have moved is left out; the learning rate is the one that it begins
            with, where torch keeps that.
    """
    return [[_chosen(group, scheduled) for group in optimizer.param_groups] for optimizer in optimizers]


def _chosen(group: Mapping[str, Any], scheduled: bool) -> dict[str, Any]:
    begun = "initial_lr" in group
    names = _CHOSEN if scheduled or begun else (*_CHOSEN, *_SCHEDULED)
    plain = {name: _plain(group.get(name)) for name in (*names, "initial_lr")}
    found = {name: plain[name] for name in names if isinstance(plain[name], int | float | tuple)}
    return {**found, "lr": plain["initial_lr"]} if begun and isinstance(plain["initial_lr"], int | float) else found


def _plain(value: Any) -> Any:
    """A number that is kept as a tensor (`lr=torch.tensor(0.01)`) as a number, as precise as the tensor is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.detach().item()
        # 0.03 in fp32 is 0.029999999329447746: of both sides the fp32 number is said
        return float(f"{number:.7g}") if value.dtype == torch.float32 else number
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def unheeded(asked: Sequence[Sequence[Mapping[str, Any]]], now: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """What a script asked for and a checkpoint has otherwise, for people: it is the checkpoint's that counts."""
    found: dict[str, None] = {}  # groups mostly say the same
    for before, after in zip(asked, now, strict=False):
        for wanted, group in zip(before, after, strict=False):
            for name, value in wanted.items():
                if name in group and group[name] != value:
                    found[f"{name} is {group[name]!r}, as in the checkpoint, not {value!r} as in the script"] = None
    if not found:
        return []
    return [*found, "to have the script's, set it in optimizer.param_groups after resume()"]
