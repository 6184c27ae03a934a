"""Step diffs that take more bytes than they might: measured in what was stored, whatever the reason is, and told once.

What an optimizer did to a parameter is known from its gradient: 32 bits a number at most. Where moments are kept and
the payload takes more, the step is not what its updates say. No bit is lost by that: what they do not explain is stored
beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.formats.html_tables import counted
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn

__all__ = ["Excess", "Unexplained"]

_EXPLAINED: Final = 36
"""Bits of a number of a parameter up to which a step counts as explained: its gradient, and rounding."""
_LITTLE: Final = 4096
"""Bytes of a payload that is not worth a word."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Parameters, compressed together, that take more than an explained step does.

    Attributes:
        leader: the first of their tensors. Another of them may be the one that takes so much.
        parameters: how many.
        bits: stored for each of their numbers; None: more than the tensors themselves take, so they are stored as
            differences.
    """

    leader: str
    parameters: int
    bits: float | None

    @classmethod
    def of(cls, leader: str, parameters: int, width: int, numbers: int, stored: int | None) -> Excess | None:
        """What is too much of a payload; None: nothing.

        Args:
            width: tensors of each parameter: without moments a difference is no longer than a gradient.
            numbers: of all of the parameters.
            stored: bytes of the payload; None: it was longer than what it restores.
        """
        if width < 2:
            return None
        if stored is None:
            return cls(leader, parameters, None)
        if stored <= _LITTLE or 8 * stored <= _EXPLAINED * numbers:
            return None
        return cls(leader, parameters, 8 * stored / numbers)


class Unexplained:
    """Says it, once for each of two reasons. One term's steps; one thread calls it."""

    def __init__(self) -> None:
        self._said: set[bool] = set()

    def look(self, step: int, base: int, excess: Sequence[Excess]) -> None:
        """A step was compressed against that of `base`."""
        skipped = step > base + 1
        if not excess or skipped in self._said:
            return
        self._said.add(skipped)
        if skipped:
            gone = f"step {base + 1}" if step == base + 2 else f"steps {base + 1} to {step - 1}"
            why = (
                f"{gone} before it {'is' if step == base + 2 else 'are'} not in the store, and updates= explains one "
                "step: save every step, or leave updates= out where steps were skipped"
            )
        else:
            why = (
                "parameters or moments changed in another way than updates= says: they were changed beside the "
                "optimizer (clamped, averaged, replaced), it has arithmetic of its own, or an optimizer step lies "
                "between that was not saved. If every step is like that, deltas= without diffs= (strategy='delta') "
                "takes as little, and less time"
            )
        warn(
            f"step {step} takes more bytes than an explained step for {_parameters(excess)}: {why}. No bit is lost",
            UnexplainedStepWarning,
        )


def _parameters(excess: Sequence[Excess]) -> str:
    """Which they are, as far as it is known, and what they take: the one that takes most, and how many more."""
    largest = max(excess, key=lambda one: math.inf if one.bits is None else one.bits)
    taken = "more bits than its tensors have" if largest.bits is None else f"{largest.bits:.0f} bits a number"
    name = f"{largest.leader!r}"
    if largest.parameters > 1:
        # Small parameters have one payload together. Which of them was changed it does not say.
        name = f"one or more of {largest.parameters} small parameters that are compressed together, {name} the first"
    more = counted(len(excess) - 1, "more payload") if excess[1:] else ""
    return f"{name} ({taken}, where 32 are enough)" + (f" and {more}" if more else "")
