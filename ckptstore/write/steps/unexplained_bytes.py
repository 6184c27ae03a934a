"""Warns once of step diffs that take more bytes than an explained step. Looks only at stored bytes, not at causes.

The gradient explains what an optimizer did to a parameter: at most 32 bits per number. If there are moments and the
payload takes more, the step differs from its updates. No bit is lost: what the updates do not explain is stored beside
them.
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
"""A step counts as explained up to so many bits per number of a parameter: its gradient, and rounding."""
_LITTLE: Final = 4096
"""Payloads of at most this many bytes cause no warning."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Parameters, compressed together, that take more bytes than an explained step.

    Attributes:
        leader: the first of their tensors. The one that takes too much may be another.
        parameters: the number of parameters.
        bits: bits stored per number; None: more than the tensors themselves have, so they are stored as differences.
    """

    leader: str
    parameters: int
    bits: float | None

    @classmethod
    def of(cls, leader: str, parameters: int, width: int, numbers: int, stored: int | None) -> Excess | None:
        """The excess of a payload; None: there is none.

        Args:
            width: tensors of each parameter: without moments, a difference is no larger than a gradient.
            numbers: how many numbers all of the parameters have.
            stored: bytes of the payload; None: it was larger than the bytes that it restores.
        """
        if width < 2:
            return None
        if stored is None:
            return cls(leader, parameters, None)
        if stored <= _LITTLE or 8 * stored <= _EXPLAINED * numbers:
            return None
        return cls(leader, parameters, 8 * stored / numbers)


class Unexplained:
    """Warns of unexplained steps of one term, once for each of two reasons. One thread calls it."""

    def __init__(self) -> None:
        self._said: set[bool] = set()

    def look(self, step: int, base: int, excess: Sequence[Excess]) -> None:
        """Warn if `step`, compressed against step `base`, has an excess."""
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
                "parameters or moments changed in another way than updates= says: they were changed outside the "
                "optimizer (clamped, averaged, replaced), it has its own arithmetic, or an optimizer step in "
                "between was not saved. If every step is like that, deltas= without diffs= (strategy='delta') "
                "takes as little, and less time"
            )
        warn(
            f"step {step} takes more bytes than an explained step for {_parameters(excess)}: {why}. No bit is lost",
            UnexplainedStepWarning,
        )


def _parameters(excess: Sequence[Excess]) -> str:
    """A text on the payload with the most bits per number: its parameters, its size, and how many more payloads."""
    largest = max(excess, key=lambda one: math.inf if one.bits is None else one.bits)
    taken = "more bits than its tensors have" if largest.bits is None else f"{largest.bits:.0f} bits a number"
    name = f"{largest.leader!r}"
    if largest.parameters > 1:
        # Small parameters share one payload, which does not tell which of them was changed.
        name = f"one or more of {largest.parameters} small parameters that are compressed together, {name} the first"
    more = counted(len(excess) - 1, "more payload") if excess[1:] else ""
    return f"{name} ({taken}, where 32 are enough)" + (f" and {more}" if more else "")
