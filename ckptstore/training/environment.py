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

__all__ = ["compared", "described"]

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
