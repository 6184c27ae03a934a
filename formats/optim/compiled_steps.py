"""Compiled forms of the optimizer arithmetic in ``adam`` and ``sgd``: they pass a rule's numbers to the loops in C."""

from __future__ import annotations

import numpy as np

from ckptstore.formats import core
from ckptstore.formats.codecs.kernels import N_LOG_N, WORDS, Bytes, Counts, Words, scratch
from ckptstore.formats.codecs.plane_coder import THRIFTY, compressed, decompressed
from ckptstore.formats.optim import predicted, replayed, step_tiles
from ckptstore.formats.optim.adam import VARIANTS, AdamRule
from ckptstore.formats.optim.arithmetic import FLOAT, Floats, single
from ckptstore.formats.optim.residuals import OVERHEAD
from ckptstore.formats.optim.scales import CLASSES
from ckptstore.formats.optim.sgd import SGDRule
from ckptstore.formats.optim.step_settings import Rule
from ckptstore.formats.optim.step_tiles import Array

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


def encoded_block(rule: Rule, old: list[Floats], new: list[Floats], level: int, out: Bytes) -> Bytes:
    """See ``predicted.encoded_block``. Other rules than Adam's are left to the reference."""
    if not isinstance(rule, AdamRule) or rule.amsgrad or level > THRIFTY or not len(old[0]) or _little(old, out):
        return predicted.encoded_block.reference(rule, old, new, level, out)
    space = scratch("groups", 11 * old[0].nbytes + (1 << 18))
    (weight, first, second), (weight1, first1, second1) = old, new
    size = core.write_adam(
        weight, first, second, weight1, first1, second1, *_scalars(rule), level, N_LOG_N, space, out, compressed
    )
    return out[:size]


def decoded_block(rule: Rule, data: Bytes, at: int, state: list[Floats]) -> int:
    """See ``predicted.decoded_block``. The reference says what is damaged."""
    if isinstance(rule, AdamRule) and not rule.amsgrad and len(state[0]) and at < len(data):
        space = scratch("groups", 8 * state[0].nbytes + (1 << 18))
        weight, first, second = state
        end = core.read_adam(data, at, weight, first, second, *_scalars(rule), space, decompressed)
        if end >= 0:
            return end
    return predicted.decoded_block.reference(rule, data, at, state)


def take_step(rule: Rule, state: list[Floats], gradient: Array) -> None:
    """See ``step_tiles.take_step``. Other rules than AdamW's, and fp16, are left to the reference."""
    if isinstance(rule, AdamRule) and _replayable(rule, gradient):
        weight, first, second = state
        core.step_adam(weight, first, second, _stored(gradient), *_settings(rule))
    else:
        step_tiles.take_step.reference(rule, state, gradient)


def encoded_residuals(
    rule: Rule, old: list[Floats], new: list[Floats], gradient: Array, level: int, out: Bytes
) -> Bytes:
    """See ``replayed.encoded_residuals``. Other rules than AdamW's, and fp16, are left to the reference."""
    if (
        not isinstance(rule, AdamRule)
        or not _replayable(rule, gradient)
        or level > THRIFTY
        or not len(gradient)
        or _little(old, out)
    ):
        return replayed.encoded_residuals.reference(rule, old, new, gradient, level, out)
    space = scratch("groups", 11 * old[0].nbytes + (1 << 18))
    (weight, first, second), (weight1, first1, second1), given = old, new, _stored(gradient)
    numbers = _settings(rule)
    size = core.write_replayed(
        weight, first, second, weight1, first1, second1, given, *numbers, level, N_LOG_N, space, out, compressed
    )
    return out[:size]


def _little(state: list[Floats], out: Bytes) -> bool:
    """Whether ``out`` might be too small for what is given up, too."""
    return len(out) < len(state) * (state[0].nbytes + OVERHEAD)


def _replayable(rule: AdamRule, gradient: Array) -> bool:
    return not rule.amsgrad and not rule.l2 and gradient.dtype != np.float16 and gradient.dtype.isnative


def _stored(gradient: Array) -> Array:
    """The patterns of a gradient: numpy does not pass bf16 on."""
    return gradient.view(WORDS[gradient.itemsize])


def _settings(
    rule: AdamRule,
) -> tuple[int, bool, bool, Array, float, float, float, float, float, float, float]:
    near = abs(rule.weight1) < 0.5
    share = rule.weight1 if near else single(rule.weight1 - 1.0)
    scales = np.array(rule.scales, FLOAT)
    numbers = rule.beta2, rule.weight2, rule.shrink, rule.root, rule.eps, rule.rate
    return _NUMBERS[rule.variant], near, rule.maximize, scales, share, *numbers


def _scalars(rule: AdamRule) -> tuple[bool, float, float, float, float, float, float, float]:
    inverse = 1.0 / rule.weight1 if rule.weight1 else 0.0
    divide = rule.variant == "divide"
    return divide, inverse, rule.beta2, rule.weight2, rule.shrink, rule.root, rule.eps, rule.rate


def buffered(rule: SGDRule, weight: Floats, buffer: Floats, gradient: Floats) -> None:
    """See ``sgd.buffered``."""
    plain = rule.variant == "plain"
    core.buffered(plain, rule.nesterov, weight, buffer, gradient, rule.momentum, rule.share, rule.rate)


def classes(base: Words, second: Floats, scales: Bytes, out: Bytes) -> Counts:
    """See ``scales.classes``."""
    counts = np.empty((4, CLASSES), np.int64)
    core.classes(base, second, scales, out, counts)
    return counts
