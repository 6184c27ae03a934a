"""How an agent may compute an optimizer's steps other than with torch's kernels on its CPU.

A device's kernels contract a product and a sum to one rounded operation (FMA), in an order of their own. The variants
of `formats.optim` compute that exactly, on any processor. Trainer and agent name them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import CkptError
from ckptstore.formats import optim

__all__ = ["rule_of", "variants_of"]


def variants_of(kind: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the variants of an optimizer with these settings (by torch's names); none if there are none."""
    try:
        return optim.from_group(kind, settings).variants
    except CkptError:
        return ()


def rule_of(kind: str, settings: Mapping[str, Any], variant: str, count: int) -> optim.Rule:
    """The arithmetic of one step.

    Args:
        settings: of the parameter group, by torch's names, with ``lr``.
        variant: one of `variants_of`.
        count: steps of the parameter so far, this one included.

    Raises:
        CkptError, LookupError, TypeError, ValueError: the settings or the variant are invalid.
    """
    return optim.from_group(kind, settings).rule(optim.Step(count, float(settings["lr"])), variant)
