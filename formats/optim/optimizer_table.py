"""The optimizers whose arithmetic is known, in one table. A row is all that another one needs here.

Torch itself is not needed: a parameter group is a dictionary, and names are those of torch's classes and slots.
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

__all__ = ["KINDS", "Kind", "from_group", "listed"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One optimizer.

    Attributes:
        settings: what holds its settings; ``settings(...).rule(step)`` is the arithmetic of a step.
        slots: what torch keeps for a parameter before its first step is taken again, ``step`` included.
        read: the settings of one entry of ``optimizer.param_groups``. Raises `KeyError`, `TypeError`, `ValueError`.
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
    # torch's Adam takes AdamW's decay by a flag.
    return (AdamW if group.get("decoupled_weight_decay", decoupled) else Adam)(
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "SGD": Kind(SGD, (), _sgd),
        "Adam": Kind(Adam, ("step", "exp_avg", "exp_avg_sq"), lambda group: _adam(group, decoupled=False)),
        "AdamW": Kind(AdamW, ("step", "exp_avg", "exp_avg_sq"), lambda group: _adam(group, decoupled=True)),
    }
)
"""By the name of the class in ``torch.optim``."""

RULES: Final[Mapping[str, Callable[[Mapping[str, Any]], Rule]]] = {
    adam.ID: adam.AdamRule.parse,
    sgd.ID: sgd.SGDRule.parse,
}
"""Parsers of the rules that these make, by the id of their arithmetic."""


def listed() -> str:
    """Their names, for messages: ``SGD, Adam and AdamW``."""
    *names, last = KINDS
    return f"{', '.join(names)} and {last}"


def from_group(optimizer: str, group: Mapping[str, Any]) -> Optimizer:
    """The settings of one entry of ``optimizer.param_groups``.

    Args:
        optimizer: the class's name, one of `KINDS`.
        group: its settings by torch's names. The learning rate is the step's, not the group's (`Step.lr`); which
            implementation runs (``foreach``, ``fused``) is for ``choose_variant`` to see. Numbers may be anything
            that ``float`` takes, one-element tensors included.

    Raises:
        UnsupportedStateError: another optimizer, or a setting that is no number. Such a state is stored as deltas
            (``Skip``).
    """
    kind = KINDS.get(optimizer)
    if kind is None:
        raise UnsupportedStateError(f"the arithmetic of {optimizer} is not known, only that of {listed()}")
    try:
        return kind.read(group)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedStateError(f"a parameter group of {optimizer} is not understood: {error!r}") from error
