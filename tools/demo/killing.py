"""The plan of the kills, drawn from the seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

POINTS_IN_COMMIT: Final = ("save.before-header", "commit.before-create", "commit.created")
"""Instants inside a commit (`ckptstore.host.crash_points`), each passed once per checkpoint: data written but no header
yet; segment durable but nothing in the log; log slot created but not acknowledged."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned SIGKILL.

    With `point`, the worker kills itself there while it saves `step`. Without, the supervisor kills it from outside
    `delay` typical steps after it saw `step` begin: somewhere in that step or the next, wherever that may be.
    """

    step: int
    point: str | None
    delay: float

    def describe(self) -> str:
        """For tables."""
        return f"inside a commit, at {self.point}" if self.point else "from outside, by the clock"


def plan_kills(seed: int, *, steps: int, kills: int, in_commit: int) -> list[Kill]:
    """`kills` kills in the order of their steps, spread over the run, `in_commit` of them at points inside a commit."""
    draw = random.Random(f"{seed} kills")
    first, last = 2, steps - 3
    width = (last - first) / max(1, kills)
    inside = set(draw.sample(range(kills), in_commit))
    points = draw.sample(POINTS_IN_COMMIT, len(POINTS_IN_COMMIT))
    planned: list[Kill] = []
    for number in range(kills):
        # half of each stratum stays free: the next kill must find a worker that has made progress
        step = first + int(width * (number + draw.random() / 2))
        point = points[len([kill for kill in planned if kill.point]) % len(points)] if number in inside else None
        planned.append(Kill(step, point, draw.uniform(0.0, 1.5)))
    return planned
