"""Optimizer steps: from one state of a parameter to the next, in a fraction of its bits.

A parameter's *slots* are its weight and the tensors its optimizer keeps for it: 96 bits for each number under Adam.
What an optimizer computes can be computed again, bit for bit. So a step from a state that is known costs

==============  ====================================================================================  ===============
``predicted``   no gradient needed: only what the first moment does not tell                          25.8 to 26.2
``replayed``    the gradient, fp32 or (mixed precision) bf16, and what was done to it                 27.0, 11.0
``sparse``      a gradient of which training kept the largest 1 %, with fp32 or bf16 values           0.34, 0.18
==============  ====================================================================================  ===============

bits per number of the parameter on this project's language model (``docs/optimizer.md``). All three are lossless,
whatever the state holds and whoever computed it: what the arithmetic defined here gets wrong is stored beside it, so
wrong settings cost bytes and never bits, and nothing depends on the machine or library that decodes.

*Arithmetic.* Settings of a parameter group (``from_group`` reads torch's) and numbers of a step make a *rule*, the step
with all scalars rounded::

    >>> import numpy as np
    >>> from ckptstore.formats import optim
    >>> rng = np.random.default_rng(0)
    >>> old = [rng.normal(0, 0.02, 100_000).astype("<f4"), np.zeros(100_000, "<f4"), np.zeros(100_000, "<f4")]
    >>> gradient = rng.normal(0, 1e-3, 100_000).astype("<f4")
    >>> group = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
    >>> rule = group.rule(optim.Step(count=1, lr=1e-3, clip=0.7))
    >>> rule.slots
    ('weight', 'exp_avg', 'exp_avg_sq')
    >>> new = [part.copy() for part in old]
    >>> optim.advance(rule, new, gradient)  # in place

*Encoding*, for a chunk (at most ``CHUNK_NUMBERS``, 16 MiB of each slot). ``choose`` tries the encodings and variants
on samples; a reader needs ``rule.params`` and the payload, and decodes in place::

    >>> payload = optim.predicted.encode(rule, old, new)
    >>> rule = optim.rule(rule.params)  # JSON and back
    >>> state = [part.copy() for part in old]
    >>> optim.predicted.decode(rule, payload, state)
    >>> all(np.array_equal(a, b) for a, b in zip(state, new))
    True
    >>> payload = optim.replayed.encode(rule, old, new, gradient)
    >>> optim.choose(group, optim.Step(count=1, lr=1e-3, clip=0.7), old, new, gradient).encoding
    'replayed'

*Chains.* ``decode`` takes many steps in one pass over the state::

    >>> state = [part.copy() for part in old]
    >>> optim.decode([optim.Layer("replayed", rule, payload)], state)
    >>> all(np.array_equal(a, b) for a, b in zip(state, new))
    True

Everything is element by element: small parameters of one group may be laid end to end and coded as one, and a large
one cut anywhere. Functions keep no state, release the interpreter lock in nearly all they do, and may run in as many
threads as there are chunks. A skipped step (``Step(skipped=True)``) has a rule too, that changes nothing.

Errors: ``FormatError`` for rules that this version does not have, ``CorruptSegmentError`` for payloads that are not
what the encoding writes; whatever the bytes, decoding ends, stays in bounds, and allocates a small multiple of a
block. It cannot tell the payload of another step: that is what digests are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptstore.errors import IncompatibleFormatError
from ckptstore.formats.optim import adam, predicted, replayed, settings, sgd, sparse
from ckptstore.formats.optim.adam import Adam, AdamRule, AdamW
from ckptstore.formats.optim.chains import Encoding, Layer, decode
from ckptstore.formats.optim.choice import Choice, choose, choose_variant, evaluate
from ckptstore.formats.optim.gradients import Gradient, SparseGradient
from ckptstore.formats.optim.groups import from_group
from ckptstore.formats.optim.predicted import CHUNK_NUMBERS
from ckptstore.formats.optim.settings import Optimizer, Rule, Skip, Step
from ckptstore.formats.optim.sgd import SGD, SGDRule
from ckptstore.formats.optim.stepping import advance, widen

__all__ = [
    "CHUNK_NUMBERS",
    "RULES",
    "SGD",
    "Adam",
    "AdamRule",
    "AdamW",
    "Choice",
    "Encoding",
    "Gradient",
    "Layer",
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
    "predicted",
    "replayed",
    "rule",
    "sparse",
    "widen",
]

RULES: Mapping[str, Callable[[Mapping[str, Any]], Rule]] = MappingProxyType(
    {adam.ID: AdamRule.parse, sgd.ID: SGDRule.parse, settings.SKIP: Skip.parse}
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
