"""Times of failures: recorded preemptions, and failures that are independent of each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["RECORDED", "Failure", "exponential", "recorded"]

SAMPLE: Final = 63.0
"""Seconds between two samples of the recorded trace."""
SAMPLES: Final = 215
LARGEST: Final = 64
"""GPUs that the trace's user asked for."""
RECORDED: Final = (
    *((10, 56, 36), (11, 36, 31), (14, 31, 29), (18, 29, 31), (19, 31, 33), (27, 33, 41), (28, 41, 52), (33, 52, 51)),
    *((38, 51, 56), (40, 56, 55), (45, 55, 54), (46, 54, 53), (52, 53, 51), (54, 51, 53), (55, 53, 54), (56, 54, 55)),
    *((64, 55, 52), (71, 52, 51), (74, 51, 53), (83, 53, 55), (88, 55, 54), (89, 54, 53), (92, 53, 54), (100, 54, 52)),
    *((102, 52, 53), (103, 53, 49), (105, 49, 48), (106, 48, 47), (112, 47, 51), (113, 51, 47), (120, 47, 39)),
    *((123, 39, 47), (127, 47, 39), (130, 39, 45), (131, 45, 46), (140, 46, 44), (144, 44, 41), (146, 41, 42)),
    *((149, 42, 46), (152, 46, 42), (153, 42, 40), (154, 40, 42), (159, 42, 46), (165, 46, 42), (166, 42, 46)),
    *((168, 46, 48),),
)
"""(sample, GPUs before, GPUs after) of every change in the allocation of A100 spot GPUs at Google Cloud, recorded by
André et al. in May 2022: the trace that PCcheck replays. It ends where all GPUs were taken away for good."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A time at which the job stops and rolls back.

    Attributes:
        at: seconds since the start.
        lost: how many workers lost their machine, with its memory. 0: only processes died, or workers came back.
        workers: how many the job had.
    """

    at: float
    lost: int
    workers: int


def recorded(seconds: float | None = None, until: int = SAMPLES) -> list[Failure]:
    """The recorded trace: every change of the allocation stops the job, as in PCcheck's replay.

    Args:
        seconds: of the whole, scaled; None: as recorded, 3.76 hours.
        until: samples of it.
    """
    scale = 1.0 if seconds is None else seconds / (until * SAMPLE)
    return [
        Failure(sample * SAMPLE * scale, max(0, before - after), before)
        for sample, before, after in RECORDED
        if sample < until
    ]


def exponential(
    seconds: float, workers: int, mtbf: float, *, hardware: float = 0.2, seed: int = 1
) -> Sequence[Failure]:
    """Independent failures.

    Args:
        seconds: of the run.
        mtbf: mean seconds between failures of one worker.
        hardware: the part of the failures that take a machine, with its memory and its disk.
    """
    chance, at, found = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(workers / mtbf)) < seconds:
        found.append(Failure(at, int(chance.random() < hardware), workers))
    return found
