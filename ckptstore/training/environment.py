"""Records and compares what in a training script decides its bits: optimizer implementations, number of ranks.

The engine records the machine's part (torch, threads, CPU capability, oneDNN ...) with every term, and compares it
itself (`frameworks.bridge`). The script's part is recorded in each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptstore.frameworks.bridge import environment_differences
from ckptstore.host.caller_warnings import DeterminismWarning, warn

__all__ = ["compared", "described", "hyperparameters", "unheeded"]

_FLAGS = ("fused", "foreach", "capturable", "differentiable")
_NOT_COMPARED = frozenset({"params", "param_names", "initial_lr"})
"""Members of a group that `ParameterMatch` and the learning rate speak of."""
_CYCLED = ("betas", "momentum")
"""What `CyclicLR` and `OneCycleLR` change besides the learning rate. They set ``base_momentum`` in such a group."""
_MOVED = object()
"""Stands for a number that a schedule changes: it is not compared."""
_LARGEST = 65_536
"""Most elements of a tensor in a group that is compared."""


def described(optimizers: Sequence[torch.optim.Optimizer], ranks: int, sharding: str = "") -> dict[str, str]:
    """What the script has chosen and changes bits, as name -> value.

    Args:
        optimizers: those of a dict in the order of their keys, because the order of a dict changes no bit.
        sharding: how parameters are sharded; empty: they are not.
    """
    found = {"ranks": str(ranks)}
    if sharding:
        found["sharding"] = sharding
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number}"] = implementation(optimizer)
    return found


def implementation(optimizer: torch.optim.Optimizer) -> str:
    """``AdamW, foreach=None, fused=True``: which of torch's implementations it uses, group by group."""
    said = {", ".join(f"{flag}={group[flag]}" for flag in _FLAGS if flag in group) for group in optimizer.param_groups}
    return ", ".join([type(optimizer).__qualname__, *sorted(one for one in said if one)])


def compared(before: object, now: Mapping[str, str], ref: str) -> list[str]:
    """Warn (`DeterminismWarning`) if the checkpoint's environment was another one -> the differences.

    Args:
        before: the checkpoint's record; anything but a mapping is an unknown environment.
        ref: the checkpoint, for the message.
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
    """What the script chose for each group of each optimizer, by name: for `unheeded`.

    That is every member of a group but its parameters. It includes ``fused`` and similar flags: torch takes them from
    the checkpoint, and the run would be slower or have other bits.

    Args:
        scheduled: there is a schedule. What it may have changed is marked. The learning rate is the initial one, if
            torch keeps that.
    """
    return [[_chosen(group, scheduled) for group in optimizer.param_groups] for optimizer in optimizers]


def _chosen(group: Mapping[str, Any], scheduled: bool) -> dict[str, Any]:
    # Prevents: a setting that no list here knows, silently replaced by the checkpoint's.
    found = {name: _plain(value) for name, value in group.items() if name not in _NOT_COMPARED}
    if "initial_lr" in group:
        found["lr"] = _plain(group["initial_lr"])
    elif scheduled:
        found["lr"] = _MOVED
    if "base_momentum" in group:
        found |= {name: _MOVED for name in _CYCLED if name in found}
    return found


def _plain(value: Any) -> Any:
    """A value that can be compared and shown; of a tensor its numbers, as precise as the tensor is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.detach().item()
        # 0.03 in fp32 is 0.029999999329447746: both sides show the fp32 number
        return float(f"{number:.7g}") if value.dtype == torch.float32 else number
    if isinstance(value, torch.Tensor):
        return _plain(value.detach().tolist()) if value.numel() <= _LARGEST else _MOVED
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):  # a list may be restored as a tuple
        return tuple(map(_plain, value))
    return value if value is None or isinstance(value, bool | int | float | complex | str | bytes) else _MOVED


def unheeded(asked: Sequence[Sequence[Mapping[str, Any]]], now: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Settings of the script that the checkpoint's override, as sentences.

    Args:
        asked: `hyperparameters` of the script, before the restore.
        now: the same, after it.
    """
    found: dict[str, None] = {}  # groups are mostly equal
    for before, after in zip(asked, now, strict=False):
        for wanted, group in zip(before, after, strict=False):
            found |= dict.fromkeys(_otherwise(wanted, group))
    if not found:
        return []
    return [*found, "to have the script's, set it in optimizer.param_groups after resume()"]


def _otherwise(wanted: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    for name in (*wanted, *(name for name in group if name not in wanted)):
        mine, its = wanted.get(name), group.get(name)
        if mine is _MOVED or its is _MOVED:
            continue
        if name not in group:
            yield f"{name} is gone: the checkpoint has none, the script has {_said(mine)}"
        elif name not in wanted:
            yield f"{name} is {_said(its)}, as in the checkpoint: the script has none"
        elif mine != its and repr(mine) != repr(its):  # NaN is equal to itself here
            yield f"{name} is {_said(its)}, as in the checkpoint, not {_said(mine)} as in the script"


def _said(value: Any) -> str:
    return f"{value!r:.80}"
