"""Compiled forms of the optimizer arithmetic in ``adam`` and ``sgd``: they pass a rule's numbers to the loops in C."""

from __future__ import annotations

import numpy as np

from ckptstore.formats import core
from ckptstore.formats.codecs.kernels import Bytes, Counts, Words
from ckptstore.formats.optim.adam import VARIANTS, AdamRule
from ckptstore.formats.optim.arithmetic import Floats, single
from ckptstore.formats.optim.scales import CLASSES
from ckptstore.formats.optim.sgd import SGDRule

_NUMBERS = {variant: number for number, variant in enumerate(VARIANTS)}


def moments(rule: AdamRule, first: Floats, second: Floats, gradient: Floats) -> None:
    """See ``adam.moments``."""
    near = abs(rule.weight1) < 0.5
    share = rule.weight1 if near else single(rule.weight1 - 1.0)
    core.moments(_NUMBERS[rule.variant], near, first, second, gradient, share, rule.beta2, rule.weight2)


def second_moment(rule: AdamRule, first: Floats, old_first: Floats, old_second: Floats, out: Floats) -> None:
    """See ``adam.second_moment``."""
    inverse = 1.0 / rule.weight1 if rule.weight1 else 0.0
    core.second_moment(first, old_first, old_second, inverse, rule.beta2, rule.weight2, out)


def move(rule: AdamRule, weight: Floats, first: Floats, second: Floats) -> None:
    """See ``adam.move``."""
    divide = rule.variant == "divide"
    core.move(divide, weight, first, second, rule.shrink, rule.root, rule.eps, rule.rate)


def buffered(rule: SGDRule, weight: Floats, buffer: Floats, gradient: Floats) -> None:
    """See ``sgd.buffered``."""
    plain = rule.variant == "plain"
    core.buffered(plain, rule.nesterov, weight, buffer, gradient, rule.momentum, rule.share, rule.rate)


def classes(base: Words, second: Floats, scales: Bytes, out: Bytes) -> Counts:
    """See ``scales.classes``."""
    counts = np.empty((4, CLASSES), np.int64)
    core.classes(base, second, scales, out, counts)
    return counts
