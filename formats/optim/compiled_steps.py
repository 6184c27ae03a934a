"""The hot loops of optimizer arithmetic for numba: what the other modules define, in one pass each.

Imported at the first call of a hot kernel, and only where numba is. fp32 numbers stay fp32 in every operation, each is
rounded once, and what has to be fused is the processor's own instruction (or the C library's ``fmaf``, where it has
none). Which NaN an operation makes is of no consequence: what is stored is 7fc00000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ckptstore.formats.kernel_choice import Loop, loop
from ckptstore.formats.optim import arithmetic
from ckptstore.formats.optim.adam import AdamRule
from ckptstore.formats.optim.arithmetic import Floats, Patterns, single
from ckptstore.formats.optim.sgd import SGDRule

_NAN = np.float32("nan")


def _typed_fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """llvm.fma.f32, for the compiler."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(*(types.float32 for _ in (a, b, c))), generate


_fma: Callable[..., Any] = intrinsic(_typed_fma)


# ------------------------------------------------------------------------------------------------------- a * b + c


@loop("f4", "float", "f4!")
def _fma_scalar(a: Floats, b: float, out: Floats) -> None:
    factor = np.float32(b)
    for i in range(len(out)):
        out[i] = _fma(a[i], factor, out[i])


@loop("f4", "f4", "f4!")
def _fma_array(a: Floats, b: Floats, out: Floats) -> None:
    for i in range(len(out)):
        out[i] = _fma(a[i], b[i], out[i])


def fma(a: Floats, b: Floats | float, c: Floats, out: Floats) -> None:
    """See ``arithmetic.fma``."""
    if out is not c:
        if out is a or out is b:
            arithmetic.fma.reference(a, b, c, out)
            return
        np.copyto(out.view("<u4"), c.view("<u4"))
    if isinstance(b, float):
        _fma_scalar(a, b, out)
    else:
        _fma_array(a, b, out)


# ------------------------------------------------------------------------------------------------------------ Adam


def _moments(plain: bool, divide: bool) -> Loop[..., None]:
    """The loop of one variant: the compiler leaves out what is not of it."""

    @loop("f4!", "f4!", "f4", "bool", "float", "float", "float")
    def run(
        first: Floats, second: Floats, gradient: Floats, near: bool, weight1: float, beta2: float, weight2: float
    ) -> None:
        share1, keep2, share2 = np.float32(weight1), np.float32(beta2), np.float32(weight2)
        for i in range(len(first)):
            g, m = gradient[i], first[i]
            start = m if near else g
            kept = second[i] * keep2
            if plain:
                m = (g - m) * share1 + start
                v = (g * share2) * g + kept
            elif divide:
                m = _fma(g - m, share1, start)
                v = _fma(g * g, share2, kept)
            else:
                m = _fma(g - m, share1, start)
                v = _fma(g * share2, g, kept)
            first[i] = m if m == m else _NAN
            second[i] = v if v == v else _NAN

    return run


_MOMENTS = {"fma": _moments(False, False), "plain": _moments(True, False), "divide": _moments(False, True)}


def moments(rule: AdamRule, first: Floats, second: Floats, gradient: Floats) -> None:
    """See ``adam.moments``."""
    near = abs(rule.weight1) < 0.5
    share = rule.weight1 if near else single(rule.weight1 - 1.0)
    _MOMENTS[rule.variant](first, second, gradient, near, share, rule.beta2, rule.weight2)


@loop("f4", "f4", "f4", "float", "float", "float", "f4!")
def _second_moment(
    first: Floats, before: Floats, second: Floats, inverse: float, beta2: float, weight2: float, out: Floats
) -> None:
    keep = np.float32(beta2)
    for i in range(len(out)):
        m = np.float64(before[i])
        g = (np.float64(first[i]) - m) * inverse + m
        v = np.float32(g * g * weight2 + np.float64(second[i] * keep))
        out[i] = v if v == v else _NAN


def second_moment(rule: AdamRule, first: Floats, old_first: Floats, old_second: Floats, out: Floats) -> None:
    """See ``adam.second_moment``."""
    inverse = 1.0 / rule.weight1 if rule.weight1 else 0.0
    _second_moment(first, old_first, old_second, inverse, rule.beta2, rule.weight2, out)


def _move(divide: bool) -> Loop[..., None]:
    @loop("f4!", "f4", "f4", "float", "float", "float", "float")
    def run(weight: Floats, first: Floats, second: Floats, shrink: float, root: float, eps: float, rate: float) -> None:
        keep, below, least, by = np.float32(shrink), np.float32(root), np.float32(eps), np.float32(rate)
        for i in range(len(weight)):
            scale = np.float32(math.sqrt(second[i])) / below + least
            kept = weight[i] * keep
            w = _fma(first[i] / scale, by, kept) if divide else first[i] * by / scale + kept
            weight[i] = w if w == w else _NAN

    return run


_MOVE = {"fma": _move(False), "plain": _move(False), "divide": _move(True)}


def move(rule: AdamRule, weight: Floats, first: Floats, second: Floats) -> None:
    """See ``adam.move``."""
    _MOVE[rule.variant](weight, first, second, rule.shrink, rule.root, rule.eps, rule.rate)


# ------------------------------------------------------------------------------------------------------------- SGD


def _buffered(plain: bool, nesterov: bool) -> Loop[..., None]:
    @loop("f4!", "f4!", "f4", "float", "float", "float")
    def run(weight: Floats, buffer: Floats, gradient: Floats, momentum: float, share: float, rate: float) -> None:
        keep, part, by = np.float32(momentum), np.float32(share), np.float32(rate)
        for i in range(len(weight)):
            g, w = gradient[i], weight[i]
            if plain:
                b = g * part + buffer[i] * keep
                u = b * keep + g if nesterov else b
                w = u * by + w
            else:
                b = _fma(g, part, buffer[i] * keep)
                u = _fma(b, keep, g) if nesterov else b
                w = _fma(u, by, w)
            buffer[i] = b if b == b else _NAN
            weight[i] = w if w == w else _NAN

    return run


_BUFFERED = {
    (variant, nesterov): _buffered(variant == "plain", nesterov)
    for variant in ("fma", "plain")
    for nesterov in (False, True)
}


def buffered(rule: SGDRule, weight: Floats, buffer: Floats, gradient: Floats) -> None:
    """See ``sgd.buffered``."""
    _BUFFERED[rule.variant, rule.nesterov](weight, buffer, gradient, rule.momentum, rule.share, rule.rate)


# ------------------------------------------------------------------------------------------------------- residuals


@loop("u4", "u4")
def _missed(true: Patterns, predicted: Patterns) -> int:
    count = 0
    for i in range(len(true)):
        count += true[i] != predicted[i]
    return count


def missed(true: Patterns, predicted: Patterns) -> int:
    """See ``residuals.missed``."""
    return int(_missed(true, predicted))
