"""The table of optimizers whose arithmetic is known. A new optimizer needs one row here.

It does not import torch: a parameter group is a dictionary, and names are those of torch's classes and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.optim import adam, sgd
from ckptstore.formats.optim.adam import Adam, AdamW
from ckptstore.formats.optim.sgd import SGD
from ckptstore.formats.optim.step_settings import Optimizer, Rule

__all__ = ["KINDS", "OptimizerKind", "from_group", "listed"]


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        settings: the class of its settings. ``settings(...).rule(step)`` is the arithmetic of a step.
        slots: the entries of a parameter's state that must exist before torch can repeat its first step, ``step``
            included; those that every setting has. `Rule.slots` names those of one step's settings.
        read: makes the settings from one entry of ``optimizer.param_groups``. Raises `KeyError` or `TypeError` if the
            entry is invalid; `ValueError`, with a text for the user, for a setting that the rule does not compute
            (``centered=True``). Such a group is stored as differences, and a warning has the text.
    """

    settings: type[SGD | Adam]
    slots: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Optimizer]


def _sgd(group: Mapping[str, Any]) -> Optimizer:
    return SGD(
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
        maximize=bool(group["maximize"]),
    )


def _adam(group: Mapping[str, Any], *, decoupled: bool) -> Optimizer:
    beta1, beta2 = group["betas"]
    # torch's Adam has a flag for AdamW's decay.
    return (AdamW if group.get("decoupled_weight_decay", decoupled) else Adam)(
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )


KINDS: Final[Mapping[str, OptimizerKind]] = MappingProxyType(
    {
        "SGD": OptimizerKind(SGD, (), _sgd),
        "Adam": OptimizerKind(Adam, ("step", "exp_avg", "exp_avg_sq"), lambda group: _adam(group, decoupled=False)),
        "AdamW": OptimizerKind(AdamW, ("step", "exp_avg", "exp_avg_sq"), lambda group: _adam(group, decoupled=True)),
    }
)
"""The optimizers, by the name of the class in ``torch.optim``."""

RULES: Final[Mapping[str, Callable[[Mapping[str, Any]], Rule]]] = {
    adam.ID: adam.AdamRule.parse,
    sgd.ID: sgd.SGDRule.parse,
}
"""Parsers of these optimizers' rules, by the id of their arithmetic."""


def listed() -> str:
    """The optimizers' names for messages: ``SGD, Adam and AdamW``."""
    *names, last = KINDS
    return f"{', '.join(names)} and {last}"


def from_group(optimizer: str, group: Mapping[str, Any]) -> Optimizer:
    """Make the settings from one entry of ``optimizer.param_groups``.

    Args:
        optimizer: the class's name, one of `KINDS`.
        group: its settings by torch's names. The learning rate is not read: it belongs to the step (`Step.lr`). Nor is
            the implementation (``foreach``, ``fused``): ``choose_variant`` finds it. Numbers may be anything that
            ``float`` accepts, one-element tensors included.

    Raises:
        UnsupportedStateError: the optimizer is unknown, or a setting is not a number. Store such a state as deltas
            (``Skip``).
    """
    kind = KINDS.get(optimizer)
    if kind is None:
        raise UnsupportedStateError(f"the arithmetic of {optimizer} is not known, only that of {listed()}")
    try:
        return kind.read(group)
    except (KeyError, TypeError) as error:
        raise UnsupportedStateError(f"a parameter group of {optimizer} has an invalid setting: {error!r}") from error
    except ValueError as error:
        said = f"a parameter group of {optimizer} has a setting that cannot be used: {error}"
        raise UnsupportedStateError(said) from error
