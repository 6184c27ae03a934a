"""What a training script sets: a group's optimizer, and the numbers of one step. And what of it goes into metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckptstore.errors import FormatError
from ckptstore.formats.optim.arithmetic import FLOAT, PATTERN, Floats, single

MAX_COUNT = 1 << 53
MAX_SCALES = 4
SKIP = "skip/1"


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``optimizer.step()`` for one parameter group.

    Attributes:
        count: how often it was called, this time included: torch's ``state["step"]`` afterwards. For SGD, 1 says
            that the momentum buffer is made by this step; what a larger number is does not matter.
        lr: the learning rate of this step.
        clip: the factor the gradient was multiplied by before the step (``clip_grad_norm_``'s; 1 for none).
        loss_scale: what the gradient was divided by before that (``GradScaler``'s; 1 for none).
        skipped: the step was not taken (the scaler found an infinity): nothing changes.
    """

    count: int
    lr: float
    clip: float = 1.0
    loss_scale: float = 1.0
    skipped: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise ValueError(f"steps are counted from 1 to 2**53, not {self.count}")
        if not math.isfinite(self.lr) or not math.isfinite(self.loss_scale) or self.loss_scale == 0:
            raise ValueError(f"learning rate {self.lr} and loss scale {self.loss_scale}: finite, the scale not 0")

    @property
    def scales(self) -> tuple[float, ...]:
        """What the gradient is multiplied by, in order, as fp32 numbers; factors of exactly 1 are left out."""
        factors = (single(1.0 / self.loss_scale), single(self.clip))
        return tuple(factor for factor in factors if factor != 1.0)


class Rule(Protocol):
    """One step's arithmetic with every scalar already rounded to fp32: all that decoding needs.

    Python's powers come from the platform's C library and may differ in the last bit; so the scalars made of them
    are computed once, by the encoder, and stored as bit patterns. Implementations are frozen and hashable.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """The tensors of a parameter's state, by torch's names, the weight first. All have its shape."""

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which slots are predicted: each from old state and the new ones before it."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The slots that are predicted to stay as they are."""

    @property
    def params(self) -> dict[str, Any]:
        """JSON parameters; ``optim.rule(params)`` makes an equal rule of them.

        ``rule`` is the arithmetic's id, a name and a version. What an id computes never changes: other arithmetic (when
        torch changes its kernels, say) gets another version, and readers keep the old one.
        """

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """Take the step on one tile, in place. ``gradient`` is as training stored it, and is destroyed."""

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """What slot ``slot`` of a tile, none of ``kept``, becomes without the gradient. ``new`` holds the slots earlier
        in ``order``."""


class Optimizer(Protocol):
    """A parameter group's optimizer and settings. Implementations are frozen and hashable."""

    @property
    def variants(self) -> tuple[str, ...]:
        """The ways the same formulas are rounded by different kernels; ``choose_variant`` finds which."""

    def rule(self, step: Step, variant: str = "fma") -> Rule:
        """The arithmetic of one step. Raises ``ValueError`` for a variant it does not have."""


def scale_gradient(gradient: Floats, scales: Sequence[float], maximize: bool) -> None:
    """Undo the loss scale, clip, and turn around for ``maximize``: in place, in torch's order."""
    for factor in scales:
        np.multiply(gradient, np.float32(factor), out=gradient)
    if maximize:
        np.negative(gradient, out=gradient)


@dataclass(frozen=True, slots=True)
class Skip:
    """The rule of a step that was not taken, and of tensors that no optimizer moves: everything stays as it is.

    ``predicted`` with this rule is a plain integer delta of each slot.
    """

    slots: tuple[str, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """See `Rule.order`."""
        return tuple(range(len(self.slots)))

    @property
    def kept(self) -> tuple[int, ...]:
        """See `Rule.kept`: all of them."""
        return self.order

    @property
    def params(self) -> dict[str, Any]:
        """See `Rule.params`."""
        return {"rule": SKIP, "slots": list(self.slots)}

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Skip:
        """The rule of JSON parameters. Raises ``FormatError``."""
        reader = Reader(SKIP, params)
        slots = reader.names("slots", 8)
        reader.finish()
        return Skip(slots)

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """See `Rule.apply`."""

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """See `Rule.predict`: no slot is left to predict."""


def copy_bits(source: Floats, out: Floats) -> None:
    """Copy patterns, not numbers: signalling NaNs stay what they are."""
    np.copyto(out.view(PATTERN), source.view(PATTERN))


def to_bits(value: float) -> int:
    """The pattern of an fp32 number."""
    return int(np.array([value], FLOAT).view(PATTERN)[0])


class Reader:
    """Strict reading of a rule's JSON parameters: every problem is a ``FormatError`` naming rule and parameter."""

    def __init__(self, rule: str, params: Mapping[str, Any]) -> None:
        self._rule = rule
        self._left = {key: value for key, value in params.items() if key != "rule"}

    def _bad(self, key: str, value: object) -> FormatError:
        return FormatError(f"optimizer rule {self._rule}: parameter {key!r} is {value!r}")

    def _number(self, key: str, value: object) -> float:
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise self._bad(key, value)
        return float(np.array([value], PATTERN).view(FLOAT)[0])

    def number(self, key: str) -> float:
        """An fp32 number, stored as its pattern."""
        return self._number(key, self._left.pop(key, None))

    def numbers(self, key: str) -> tuple[float, ...]:
        """At most ``MAX_SCALES`` fp32 numbers."""
        value = self._left.pop(key, None)
        if not isinstance(value, list | tuple) or len(value) > MAX_SCALES:
            raise self._bad(key, value)
        return tuple(self._number(key, item) for item in value)

    def flag(self, key: str) -> bool:
        """A JSON boolean."""
        value = self._left.pop(key, None)
        if not isinstance(value, bool):
            raise self._bad(key, value)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """One of the texts ``allowed``."""
        value = self._left.pop(key, None)
        if value not in allowed:
            raise self._bad(key, value)
        return str(value)

    def names(self, key: str, most: int) -> tuple[str, ...]:
        """One to ``most`` texts."""
        value = self._left.pop(key, None)
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= most:
            raise self._bad(key, value)
        if not all(isinstance(item, str) and len(item) <= 200 for item in value):
            raise self._bad(key, value)
        return tuple(value)

    def finish(self) -> None:
        """Raise for parameters that nobody asked for: a newer encoder may have meant something by them."""
        if self._left:
            raise FormatError(f"optimizer rule {self._rule}: unknown parameter {next(iter(self._left))!r}")
