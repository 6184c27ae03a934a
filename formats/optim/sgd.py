"""SGD as torch's kernels compute it, in fp32.

With g the gradient after scaling (``settings.scale_gradient``), all numbers fp32 and every operation rounded::

    g  = g + w * decay
    b' = b * momentum + g * (1 - dampening)             the first step: b' = g
    u  = b'                                             nesterov: g + b' * momentum; without momentum: g
    w' = w + u * -lr

Variant ``fma`` does not round the products of the first, third and fourth line and the second product of the second
line (torch on a CPU with AVX2 or AVX-512: for-loop, foreach and fused alike); ``plain`` rounds all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.formats.kernel_choice import hot
from ckptstore.formats.optim.arithmetic import Floats, floats, fma, multiply_add, settle, single
from ckptstore.formats.optim.step_settings import Reader, Rule, Skip, Step, copy_bits, scale_gradient, to_bits

ID = "sgd/1"
"""Of the arithmetic above. Other arithmetic gets another version: see `Rule.params`."""
VARIANTS = ("fma", "plain")
_NUMBERS = ("decay", "momentum", "share", "rate")


@dataclass(frozen=True, slots=True)
class SGDRule:
    """One step of SGD (`settings.Rule`). ``share`` is 1 - dampening, ``rate`` -lr; the numbers are fp32's.

    ``buffer`` says whether there is a momentum buffer, ``first`` that this step makes it.
    """

    variant: str
    buffer: bool
    first: bool
    nesterov: bool
    maximize: bool
    scales: tuple[float, ...]
    decay: float
    momentum: float
    share: float
    rate: float

    @property
    def slots(self) -> tuple[str, ...]:
        """See `Rule.slots`."""
        return ("weight", "momentum_buffer") if self.buffer else ("weight",)

    @property
    def order(self) -> tuple[int, ...]:
        """See `Rule.order`."""
        return (1, 0) if self.buffer else (0,)

    @property
    def kept(self) -> tuple[int, ...]:
        """See `Rule.kept`: without a buffer nothing tells the gradient."""
        return () if self.buffer else (0,)

    @property
    def params(self) -> dict[str, Any]:
        """See `Rule.params`."""
        return {
            "rule": ID,
            "variant": self.variant,
            "buffer": self.buffer,
            "first": self.first,
            "nesterov": self.nesterov,
            "maximize": self.maximize,
            "scales": [to_bits(scale) for scale in self.scales],
            **{name: to_bits(getattr(self, name)) for name in _NUMBERS},
        }

    @staticmethod
    def parse(params: Mapping[str, Any]) -> SGDRule:
        """The rule of JSON parameters. Raises ``FormatError``."""
        reader = Reader(ID, params)
        rule = SGDRule(
            reader.choice("variant", VARIANTS),
            reader.flag("buffer"),
            reader.flag("first"),
            reader.flag("nesterov"),
            reader.flag("maximize"),
            reader.numbers("scales"),
            *(reader.number(name) for name in _NUMBERS),
        )
        reader.finish()
        return rule

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """See `Rule.apply`."""
        add = multiply_add if self.variant == "plain" else fma
        weight = state[0]
        scale_gradient(gradient, self.scales, self.maximize)
        if self.decay:
            add(weight, self.decay, gradient, gradient)
        if not self.buffer:
            add(gradient, self.rate, weight, weight)
            settle(weight)
        elif not self.first:
            buffered(self, weight, state[1], gradient)
        else:
            copy_bits(gradient, state[1])
            if self.nesterov:
                add(state[1], self.momentum, gradient, gradient)
            add(gradient, self.rate, weight, weight)
            settle(weight)
            settle(state[1])

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """See `Rule.predict`: a weight that the buffer moves is exact; with nesterov its gradient is inferred first."""
        if slot == 1:
            np.multiply(old[1], np.float32(0.0 if self.first else self.momentum), out=out)
            settle(out)
            return
        add = multiply_add if self.variant == "plain" else fma
        update = new[1]
        if self.nesterov:
            update = floats("below", len(out))
            self._gradient(old, new[1], update)
            add(new[1], self.momentum, update, update)
        add(update, self.rate, old[0], out)
        settle(out)

    def _gradient(self, old: Sequence[Floats], buffer: Floats, out: Floats) -> None:
        """The gradient (decay included) that the change of the buffer implies."""
        if self.first:
            np.copyto(out, buffer)
            return
        np.multiply(old[1], np.float32(self.momentum), out=out)
        np.subtract(buffer, out, out=out)
        if self.share not in (0.0, 1.0):
            np.divide(out, np.float32(self.share), out=out)


@hot("ckptstore.formats.optim.compiled_steps", destroys=["gradient"])
def buffered(rule: SGDRule, weight: Floats, buffer: Floats, gradient: Floats) -> None:
    """b' and w', in place, of any step but the first. ``gradient`` is scaled and decayed; it is destroyed."""
    add = multiply_add if rule.variant == "plain" else fma
    kept, update = floats("step", len(gradient)), buffer
    np.multiply(buffer, np.float32(rule.momentum), out=kept)
    add(gradient, rule.share, kept, buffer)
    if rule.nesterov:
        add(buffer, rule.momentum, gradient, gradient)
        update = gradient
    add(update, rule.rate, weight, weight)
    settle(weight)
    settle(buffer)


@dataclass(frozen=True, slots=True)
class SGD:
    """``torch.optim.SGD``'s settings of one parameter group. Without momentum there is no buffer."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """See `Optimizer.variants`."""
        return VARIANTS

    def rule(self, step: Step, variant: str = "fma") -> Rule:
        """See `Optimizer.rule`."""
        if variant not in VARIANTS:
            raise ValueError(f"SGD has no variant {variant!r}")
        buffer = self.momentum != 0
        if step.skipped:
            return Skip(("weight", "momentum_buffer") if buffer else ("weight",))
        return SGDRule(
            variant,
            buffer,
            buffer and step.count == 1,
            buffer and self.nesterov,
            self.maximize,
            step.scales,
            single(self.weight_decay),
            single(self.momentum),
            single(1 - self.dampening),
            single(-step.lr),
        )
