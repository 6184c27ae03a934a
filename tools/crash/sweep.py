"""The results of a sweep of faults."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sweep"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Counts of injected faults and their outcomes.

    Attributes:
        injected: kind of fault -> places.
        surfaced: error class -> how often a life ended with it.
        survived: lives that ran to their end despite the fault.
        states: post-crash states checked after faults.
        restored: checkpoints restored and compared.
    """

    injected: dict[str, int]
    surfaced: dict[str, int]
    survived: int
    states: int
    restored: int
