"""Optimizer steps: from one state of a parameter to the next, in a fraction of its bits; docs/optimizer.md shows how.

Lossless, whatever the state holds: what the arithmetic here gets wrong is stored beside it.
Imports `codecs`, and what is in `formats` and knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptstore.errors import IncompatibleFormatError
from ckptstore.formats.optim import optimizer_table, predicted, replayed, sparse, step_settings
from ckptstore.formats.optim.adam import Adam, AdamRule, AdamW
from ckptstore.formats.optim.gradients import Gradient, SparseGradient
from ckptstore.formats.optim.optimizer_table import KINDS, from_group, listed
from ckptstore.formats.optim.predicted import CHUNK_NUMBERS
from ckptstore.formats.optim.sgd import SGD, SGDRule
from ckptstore.formats.optim.step_chain import Encoding, Link, decode
from ckptstore.formats.optim.step_choice import Choice, choose, choose_variant, evaluate
from ckptstore.formats.optim.step_settings import Optimizer, Rule, Skip, Step
from ckptstore.formats.optim.step_tiles import advance, widen

__all__ = [
    "CHUNK_NUMBERS",
    "KINDS",
    "RULES",
    "SGD",
    "Adam",
    "AdamRule",
    "AdamW",
    "Choice",
    "Encoding",
    "Gradient",
    "Link",
    "Optimizer",
    "Rule",
    "SGDRule",
    "Skip",
    "SparseGradient",
    "Step",
    "advance",
    "choose",
    "choose_variant",
    "decode",
    "evaluate",
    "from_group",
    "listed",
    "predicted",
    "replayed",
    "rule",
    "sparse",
    "widen",
]

RULES: Mapping[str, Callable[[Mapping[str, Any]], Rule]] = MappingProxyType(
    {**optimizer_table.RULES, step_settings.SKIP: Skip.parse}
)
"""Every rule's parser of parameters, by the id of its arithmetic."""


def rule(params: Mapping[str, Any]) -> Rule:
    """The rule of JSON parameters (``Rule.params``).

    Raises ``IncompatibleFormatError`` for an unknown rule, ``FormatError`` for an unknown parameter.
    """
    name = params.get("rule")
    if not isinstance(name, str) or name not in RULES:
        raise IncompatibleFormatError(f"unknown optimizer rule {name!r:.80}: this version knows {', '.join(RULES)}")
    return RULES[name](params)
