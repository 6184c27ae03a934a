"""How far the simulated job is from a real one that was killed at the same times.

The model gets from the real job how long its steps took and how long it was down after a kill, so that a busy machine
slows both alike. It has to find by itself what each kill loses: which checkpoint is the newest durable one, and so how
many steps are trained again and how many count in the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tools.goodput import model
from tools.goodput.kills import Lives
from tools.goodput.model import Way
from tools.goodput.traces import Failure

__all__ = ["TOLERANCE", "Agreement", "agreement"]

TOLERANCE: Final = 0.1
"""By how much the model's goodput may differ from the real job's, relative; its wasted time then differs less."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A real job beside the simulated one.

    Attributes:
        useful: iterations that count, real and simulated.
        goodput: these by those of a job without saves and failures, likewise.
        again: iterations trained more than once, likewise.
        wasted: the part of the time that trained nothing that counts, likewise.
    """

    useful: tuple[int, int]
    goodput: tuple[float, float]
    again: tuple[int, int]
    wasted: tuple[float, float]

    @property
    def off(self) -> float:
        """The error that `TOLERANCE` bounds. One iteration more or less is none."""
        real, simulated = self.useful
        return max(0, abs(simulated - real) - 1) / max(1, real)


def agreement(lives: Lives, way: Way, iteration: float, kills: Sequence[float], workers: int = 1) -> Agreement:
    """Compare a job that was killed with the model of its way.

    Args:
        way: its interval, and when a save is durable. Stalls and restores are taken from the lives: they are parts of
            their steps and of their down times.
        iteration: seconds of an iteration of a job without saves.
        kills: seconds from the start.
    """
    each = statistics.fmean(lives.each) if lives.each else iteration
    down = statistics.fmean(lives.down) if lives.down else 0.0
    quiet = replace(way, stall=0.0, restore=0.0, near_restore=0.0)
    start = lives.start or 0.0
    failures = [Failure(at, 0, workers) for at in kills if start <= at < lives.seconds]
    found = model.simulated(quiet, each, lives.seconds, failures, restart=down, begin=start)
    useful = lives.useful, found.useful
    real, simulated = (one * iteration / lives.seconds for one in useful)
    return Agreement(useful, (real, simulated), (lives.again, found.again), (1 - real, 1 - simulated))
