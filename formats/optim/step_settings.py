"""The settings of optimizers and steps in a training script, and the rules made from them for the metadata."""

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
        count: number of calls so far, this one included: torch's ``state["step"]`` afterwards. For SGD, 1 means that
            this step creates the momentum buffer; larger numbers are all equivalent.
        lr: the learning rate of this step.
        clip: the factor by which clipping multiplied the gradient before the step (``clip_grad_norm_``; 1 for none).
        loss_scale: the number by which the gradient was divided before that (``GradScaler``; 1 for none).
        skipped: whether the step was skipped, because the scaler found an infinity. Then nothing changes.
        scale: the factor by which the numbers of a quantized gradient are multiplied before that (1 for none).
    """

    count: int
    lr: float
    clip: float = 1.0
    loss_scale: float = 1.0
    skipped: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise ValueError(f"steps are counted from 1 to 2**53, not {self.count}")
        if not math.isfinite(self.lr) or not math.isfinite(self.loss_scale) or self.loss_scale == 0:
            raise ValueError(f"learning rate {self.lr} and loss scale {self.loss_scale}: finite, the scale not 0")
        if not math.isfinite(self.scale):
            raise ValueError(f"a scale of {self.scale}: it must be finite")

    @property
    def scales(self) -> tuple[float, ...]:
        """The factors of the gradient, in order, as fp32 numbers. Factors of exactly 1 are left out."""
        factors = (single(self.scale), single(1.0 / self.loss_scale), single(self.clip))
        return tuple(factor for factor in factors if factor != 1.0)


class Rule(Protocol):
    """One step's arithmetic, with every scalar already rounded to fp32. Decoding needs nothing else.

    Python computes powers with the platform's C library, whose last bit may differ. So the encoder computes the scalars
    once, and stores their bit patterns. Implementations are frozen and hashable.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """The tensors of a parameter's state, by torch's names, the weight first. All have the weight's shape."""

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which slots are predicted: each from the old slots and the new slots before it."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The slots that are predicted not to change."""

    @property
    def params(self) -> dict[str, Any]:
        """JSON parameters. ``optim.rule(params)`` makes an equal rule.

        ``rule`` is the id of the arithmetic, a name and a version. The arithmetic of an id never changes. Other
        arithmetic gets another version (if torch changes its kernels, for example), and readers keep the old one.
        """

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """Take the step on one tile, in place. ``gradient`` is not yet scaled, and is overwritten."""

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """Predict the new slot ``slot`` of a tile without the gradient, into ``out``.

        ``slot`` is not in ``kept``. ``new`` has the new slots that come earlier in ``order``.
        """


class Optimizer(Protocol):
    """A parameter group's optimizer and settings. Implementations are frozen and hashable."""

    @property
    def variants(self) -> tuple[str, ...]:
        """The ways in which different kernels round the same formulas. ``choose_variant`` finds the one in use."""

    def rule(self, step: Step, variant: str = "fma") -> Rule:
        """Make the arithmetic of one step. Raises ``ValueError`` for an unknown variant."""


def scale_gradient(gradient: Floats, scales: Sequence[float], maximize: bool) -> None:
    """Undo the loss scale, clip, and negate the gradient for ``maximize``: in place, in torch's order."""
    for factor in scales:
        np.multiply(gradient, np.float32(factor), out=gradient)
    if maximize:
        np.negative(gradient, out=gradient)


@dataclass(frozen=True, slots=True)
class Skip:
    """The rule of a skipped step, and of tensors that no optimizer changes. It predicts that nothing changes.

    ``predicted`` with this rule is a plain integer delta of each slot.
    """

    slots: tuple[str, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """See `Rule.order`."""
        return tuple(range(len(self.slots)))

    @property
    def kept(self) -> tuple[int, ...]:
        """See `Rule.kept`: all slots."""
        return self.order

    @property
    def params(self) -> dict[str, Any]:
        """See `Rule.params`."""
        return {"rule": SKIP, "slots": list(self.slots)}

    @staticmethod
    def parse(params: Mapping[str, Any]) -> Skip:
        """Make the rule of JSON parameters. Raises ``FormatError``."""
        reader = Reader(SKIP, params)
        slots = reader.names("slots", 8)
        reader.finish()
        return Skip(slots)

    def apply(self, state: Sequence[Floats], gradient: Floats) -> None:
        """See `Rule.apply`."""

    def predict(self, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> None:
        """See `Rule.predict`: all slots are in `kept`, so there is nothing to do."""


def copy_bits(source: Floats, out: Floats) -> None:
    """Copy bit patterns, not numbers, so that signaling NaNs do not change."""
    np.copyto(out.view(PATTERN), source.view(PATTERN))


def to_bits(value: float) -> int:
    """The bit pattern of an fp32 number."""
    return int(np.array([value], FLOAT).view(PATTERN)[0])


class Reader:
    """Reads a rule's JSON parameters strictly: every problem raises a ``FormatError`` naming rule and parameter."""

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
        """Read an fp32 number, stored as its bit pattern."""
        return self._number(key, self._left.pop(key, None))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read at most ``MAX_SCALES`` fp32 numbers."""
        value = self._left.pop(key, None)
        if not isinstance(value, list | tuple) or len(value) > MAX_SCALES:
            raise self._bad(key, value)
        return tuple(self._number(key, item) for item in value)

    def flag(self, key: str) -> bool:
        """Read a JSON boolean."""
        value = self._left.pop(key, None)
        if not isinstance(value, bool):
            raise self._bad(key, value)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """Read a string, one of ``allowed``."""
        value = self._left.pop(key, None)
        if value not in allowed:
            raise self._bad(key, value)
        return str(value)

    def names(self, key: str, most: int) -> tuple[str, ...]:
        """Read a list of one to ``most`` strings."""
        value = self._left.pop(key, None)
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= most:
            raise self._bad(key, value)
        if not all(isinstance(item, str) and len(item) <= 200 for item in value):
            raise self._bad(key, value)
        return tuple(value)

    def finish(self) -> None:
        """Raise `FormatError` if parameters are left: the rule does not know them, a newer encoder might."""
        if self._left:
            raise FormatError(f"optimizer rule {self._rule}: unknown parameter {next(iter(self._left))!r}")
