"""Store an optimizer step, from one state of a parameter to the next, in a fraction of the state's bits.

The encoding is lossless: where the arithmetic here does not reproduce the new state, the difference is stored, too. See
docs/optimizer.md. Imports `codecs`, and modules of `formats` that do not know about steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptstore.errors import IncompatibleFormatError
from ckptstore.formats.optim import inferred, optimizer_table, predicted, replayed, scaled, sparse, step_settings
from ckptstore.formats.optim.adam import Adam, AdamRule, AdamW, changes, move_by_roots
from ckptstore.formats.optim.gradients import ITEMSIZES, Gradient, SparseGradient, numbers_of_image
from ckptstore.formats.optim.optimizer_table import KINDS, from_group, listed
from ckptstore.formats.optim.predicted import CHUNK_NUMBERS
from ckptstore.formats.optim.sgd import SGD, SGDRule
from ckptstore.formats.optim.step_chain import SCALED, Encoding, StepLink, decode
from ckptstore.formats.optim.step_choice import StepChoice, bound, choose, choose_variant, encode, evaluate
from ckptstore.formats.optim.step_settings import Optimizer, Rule, Skip, Step
from ckptstore.formats.optim.step_tiles import advance, widen

__all__ = [
    "CHUNK_NUMBERS",
    "ITEMSIZES",
    "KINDS",
    "RULES",
    "SCALED",
    "SGD",
    "Adam",
    "AdamRule",
    "AdamW",
    "Encoding",
    "Gradient",
    "Optimizer",
    "Rule",
    "SGDRule",
    "Skip",
    "SparseGradient",
    "Step",
    "StepChoice",
    "StepLink",
    "advance",
    "bound",
    "changes",
    "choose",
    "choose_variant",
    "decode",
    "encode",
    "evaluate",
    "from_group",
    "inferred",
    "listed",
    "move_by_roots",
    "numbers_of_image",
    "predicted",
    "replayed",
    "rule",
    "scaled",
    "sparse",
    "widen",
]

RULES: Mapping[str, Callable[[Mapping[str, Any]], Rule]] = MappingProxyType(
    {**optimizer_table.RULES, step_settings.SKIP: Skip.parse}
)
"""The parameter parser of every rule, by the id of its arithmetic."""


def rule(params: Mapping[str, Any]) -> Rule:
    """Make the rule of JSON parameters (``Rule.params``; SPEC section 5.5.1).

    Raises:
        IncompatibleFormatError: the rule is unknown.
        FormatError: a parameter is unknown, missing or invalid.
    """
    name = params.get("rule")
    if not isinstance(name, str) or name not in RULES:
        raise IncompatibleFormatError(f"unknown optimizer rule {name!r:.80}: this version knows {', '.join(RULES)}")
    return RULES[name](params)
