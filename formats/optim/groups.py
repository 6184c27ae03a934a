"""A torch optimizer's parameter group as settings, from its dictionary (torch itself is not needed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.optim.adam import Adam, AdamW
from ckptstore.formats.optim.settings import Optimizer
from ckptstore.formats.optim.sgd import SGD


def from_group(optimizer: str, group: Mapping[str, Any]) -> Optimizer:
    """The settings of one entry of ``optimizer.param_groups``.

    Args:
        optimizer: the class's name: ``Adam``, ``AdamW`` or ``SGD``.
        group: its settings by torch's names. The learning rate is the step's, not the group's (`Step.lr`); which
            implementation runs (``foreach``, ``fused``) is for ``choose_variant`` to see. Numbers may be anything
            that ``float`` takes, one-element tensors included.

    Raises:
        UnsupportedStateError: another optimizer, or a setting that is no number. Such a state is stored as deltas
            (``Skip``).
    """
    try:
        if optimizer == "SGD":
            return SGD(
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                weight_decay=float(group["weight_decay"]),
                nesterov=bool(group["nesterov"]),
                maximize=bool(group["maximize"]),
            )
        if optimizer in ("Adam", "AdamW"):
            beta1, beta2 = group["betas"]
            decoupled = bool(group.get("decoupled_weight_decay", optimizer == "AdamW"))
            return (AdamW if decoupled else Adam)(
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                amsgrad=bool(group["amsgrad"]),
                maximize=bool(group["maximize"]),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedStateError(f"a parameter group of {optimizer} is not understood: {error!r}") from error
    raise UnsupportedStateError(f"optimizer {optimizer} has no replayable arithmetic here; Adam, AdamW and SGD have")
