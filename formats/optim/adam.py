"""Adam and AdamW in fp32, bit for bit as torch's kernels compute them (SPEC section 5.5.2).

g is the gradient after scaling (``step_settings.scale_gradient``). All numbers are fp32, every operation is rounded::

    Adam, weight decay:     g  = g + w * decay              AdamW:  w = w * (1 - lr * decay)
    m' = m + (1 - b1) * (g - m)                 if 1 - b1 >= 1/2:   g + ((1 - b1) - 1) * (g - m)
    v' = v * b2 + ((1 - b2) * g) * g
    x' = max(x, v')                                     (amsgrad; it replaces v' below; if both are zero, v')
    w' = w + (-(lr / (1 - b1**t)) * m') / (sqrt(v') / sqrt(1 - b2**t) + eps)

The scalars in brackets are computed in fp64 and rounded once. The variants differ in their roundings:

``fma``     a product that is an addend is not rounded: torch on a CPU with AVX2 or AVX-512
``plain``   every product is rounded: torch on other CPUs
``divide``  ``fma``, with (1 - b2) * (g * g), and -(lr / …) * (m' / …): the order in the source of torch's CUDA
            foreach kernels (not yet compared with a run)

torch's for-loop and foreach implementations use a library's square root that is not always correctly rounded. So
0.01 to 0.1 % of their w' differ from this. Those of the fused implementation are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckptstore.formats.kernel_choice import hot
from ckptstore.formats.optim.arithmetic import Floats, doubles, exactly, floats, fma, multiply_add, settle, single
from ckptstore.formats.optim.step_settings import Reader, Rule, Skip, Step, copy_bits, scale_gradient, to_bits

ID = "adam/1"
"""Id of the arithmetic above. Other arithmetic gets another version (`Rule.params`)."""
VARIANTS = ("fma", "plain", "divide")
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
_NUMBERS = ("l2", "shrink", "weight1", "beta2", "weight2", "root", "eps", "rate")


@dataclass(frozen=True, slots=True)
class AdamRule:
    """One step of Adam or AdamW (`step_settings.Rule`). The numbers are fp32.

    ``l2`` is Adam's decay and ``shrink`` AdamW's factor 1 - lr * decay (0 and 1 for none). ``weight1`` and ``weight2``
    are 1 - b1 and 1 - b2. ``root`` is sqrt(1 - b2**t), and ``rate`` is -(lr / (1 - b1**t)).
    """

    variant: str
    amsgrad: bool
    maximize: bool
    scales: tuple[float, ...]
    l2: float
    shrink: float
    weight1: float
    beta2: float
    weight2: float
    root: float
    eps: float
    rate: float

    @property
    def slots(self) -> tuple[str, ...]:
        """See `Rule.slots`."""
        return (*SLOTS, "max_exp_avg_sq") if self.amsgrad else SLOTS

    @property
    def order(self) -> tuple[int, ...]:
        """See `Rule.order`: the moments, then the weight."""
        return (1, 2, 3, 0) if self.amsgrad else (1, 2, 0)

    @property
    def kept(self) -> tuple[int, ...]:
        """See `Rule.kept`: the first moment, because the gradient is inferred from it."""
        return (1,)

    @property
    def params(self) -> dict[str, Any]:
        """See `Rule.params`."""
        return {
            "rule": ID,
            "variant": self.variant,
            "amsgrad": self.amsgrad,
            "maximize": self.maximize,
            "scales": [to_bits(scale) for scale in self.scales],
            **{name: to_bits(getattr(self, name)) for name in _NUMBERS},
        }

    @staticmethod
    def parse(params: Mapping[str, Any]) -> AdamRule:
        """Make the rule of JSON parameters. Raises ``FormatError``."""
        reader = Reader(ID, params)
        rule = AdamRule(
            reader.choice("variant", VARIANTS),
            reader.flag("amsgrad"),
            reader.flag("maximize"),
            reader.numbers("scales"),
            *(reader.number(name) for name in _NUMBERS),
        )
        reader.finish()
        return rule

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """See `Rule.apply`."""
        weight, first, second = state[:3]
        scale_gradient(gradient, self.scales, self.maximize)
        if self.l2:
            (multiply_add if self.variant == "plain" else fma)(weight, self.l2, gradient, gradient)
        moments(self, first, second, gradient)
        if self.amsgrad:
            _largest(state[3], second, state[3])
        move(self, weight, first, state[-1])

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """See `Rule.predict`: exact except for the second moment, which a rounded first moment does not determine."""
        if slot == 2:
            second_moment(self, new[1], old[1], old[2], out)
        elif slot == 3:
            _largest(old[3], new[2], out)
        else:
            copy_bits(old[0], out)
            move(self, out, new[1], new[-1])


@hot("ckptstore.formats.optim.compiled_steps", destroys=["gradient"])
def moments(rule: AdamRule, first: Floats, second: Floats, gradient: Floats) -> None:
    """Compute m' and v' in place. ``gradient`` is already scaled, and is overwritten."""
    add: _MultiplyAdd = multiply_add if rule.variant == "plain" else fma
    step = floats("step", len(gradient))
    np.subtract(gradient, first, out=step)
    if abs(rule.weight1) < 0.5:
        add(step, rule.weight1, first, first)
    else:
        add(step, single(rule.weight1 - 1.0), gradient, first)
    np.multiply(second, np.float32(rule.beta2), out=second)
    if rule.variant == "divide":
        np.multiply(gradient, gradient, out=step)
        fma(step, rule.weight2, second, second)
    else:
        np.multiply(gradient, np.float32(rule.weight2), out=step)
        add(step, gradient, second, second)
    settle(first)
    settle(second)


@hot("ckptstore.formats.optim.compiled_steps")
def second_moment(rule: AdamRule, first: Floats, old_first: Floats, old_second: Floats, out: Floats) -> None:
    """Predict v' from the gradient that the change of m implies, in fp64 except for the product v * b2."""
    count = len(out)
    gradient, before = doubles("product", count), doubles("total", count)
    np.copyto(gradient, first)
    np.copyto(before, old_first)
    np.subtract(gradient, before, out=gradient)
    np.multiply(gradient, 1.0 / rule.weight1 if rule.weight1 else 0.0, out=gradient)
    np.add(gradient, before, out=gradient)
    np.multiply(gradient, gradient, out=gradient)
    np.multiply(gradient, rule.weight2, out=gradient)
    np.multiply(old_second, np.float32(rule.beta2), out=out)
    np.copyto(before, out)
    np.add(gradient, before, out=gradient)
    np.copyto(out, gradient, casting="unsafe")
    settle(out)


def changes(rule: AdamRule, first: Floats, roots: Floats) -> Floats:
    """What `move` adds to the shrunk weight, from the first moments and the square roots of the second ones."""
    with exactly():
        below = roots / np.float32(rule.root)
        np.add(below, np.float32(rule.eps), out=below)
        step: Floats
        if rule.variant == "divide":
            step = first / below
            np.multiply(step, np.float32(rule.rate), out=step)
        else:
            step = first * np.float32(rule.rate)
            np.divide(step, below, out=step)
        return step


def move_by_roots(rule: AdamRule, weight: Floats, first: Floats, roots: Floats) -> None:
    """As `move`, but for ``divide``, with square roots of the second moments that somebody else has computed."""
    step = changes(rule, first, roots)
    with exactly():
        if rule.shrink != 1.0:
            np.multiply(weight, np.float32(rule.shrink), out=weight)
        np.add(weight, step, out=weight)
        settle(weight)


@hot("ckptstore.formats.optim.compiled_steps")
def move(rule: AdamRule, weight: Floats, first: Floats, second: Floats) -> None:
    """Compute the new weight in place from the new moments."""
    below, step = floats("below", len(weight)), floats("step", len(weight))
    np.sqrt(second, out=below)
    np.divide(below, np.float32(rule.root), out=below)
    np.add(below, np.float32(rule.eps), out=below)
    if rule.shrink != 1.0:
        np.multiply(weight, np.float32(rule.shrink), out=weight)
    if rule.variant == "divide":
        np.divide(first, below, out=step)
        fma(step, rule.rate, weight, weight)
    else:
        np.multiply(first, np.float32(rule.rate), out=step)
        np.divide(step, below, out=step)
        np.add(weight, step, out=weight)
    settle(weight)


def _largest(old: Floats, second: Floats, out: Floats) -> None:
    """Compute amsgrad's x'. If both are zeros, it is the second moment's, because processors differ there."""
    equal = old == second
    np.maximum(old, second, out=out)
    np.copyto(out, second, where=equal)
    settle(out)


class _MultiplyAdd(Protocol):
    def __call__(self, a: Floats, b: Floats | float, c: Floats, out: Floats) -> None: ...


@dataclass(frozen=True, slots=True)
class Adam:
    """``torch.optim.Adam``'s settings of one parameter group. ``weight_decay`` is added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"betas {self.beta1}, {self.beta2}: must be at least 0 and below 1")

    @property
    def variants(self) -> tuple[str, ...]:
        """See `Optimizer.variants`."""
        return VARIANTS

    def rule(self, step: Step, variant: str = "fma") -> Rule:
        """See `Optimizer.rule`."""
        return _rule(self, step, variant, single(self.weight_decay), 1.0)


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """``torch.optim.AdamW``'s settings of one parameter group. ``weight_decay`` shrinks the weight."""

    weight_decay: float = 0.01

    def rule(self, step: Step, variant: str = "fma") -> Rule:
        """See `Optimizer.rule`."""
        return _rule(self, step, variant, 0.0, single(1 - step.lr * self.weight_decay))


def _rule(group: Adam, step: Step, variant: str, l2: float, shrink: float) -> Rule:
    """Make the rule of a step. Its scalars are computed in fp64, as in torch's Python and C++ code."""
    if variant not in VARIANTS:
        raise ValueError(f"Adam has no variant {variant!r}; choose from {', '.join(VARIANTS)}")
    if step.skipped:
        return Skip((*SLOTS, "max_exp_avg_sq") if group.amsgrad else SLOTS)
    correction1 = 1 - group.beta1**step.count
    correction2 = 1 - group.beta2**step.count
    return AdamRule(
        variant,
        group.amsgrad,
        group.maximize,
        step.scales,
        l2,
        shrink,
        weight1=single(1 - group.beta1),
        beta2=single(group.beta2),
        weight2=single(1 - group.beta2),
        root=single(correction2**0.5),
        eps=single(group.eps),
        rate=single(-(step.lr / correction1)),
    )
