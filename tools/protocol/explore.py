"""Breadth-first search through every reachable state of a model, until one breaks an invariant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = ["Model", "Result", "ViolationError", "explore"]


class ViolationError(Exception):
    """An invariant does not hold in the state whose successors were requested."""


class Model(Protocol):
    """A transition system. States are hashable values."""

    def initial(self) -> Hashable:
        """The initial state."""

    def successors(self, state: Any) -> Iterable[tuple[str, Hashable]]:
        """The possible next steps: (event, state). Raises `ViolationError` if `state`, or the step, is wrong."""


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Attributes:
        verdict: ``holds``: every reachable state was visited; ``violated``; ``bounded``: none found within the bound.
        states: how many states were expanded.
        seconds: how long it took.
        message: the invariant that broke.
        trace: the shortest way there, one event per line.
    """

    verdict: Literal["holds", "violated", "bounded"]
    states: int
    seconds: float
    message: str = ""
    trace: tuple[str, ...] = ()


def explore(model: Model, max_states: int = 5_000_000) -> Result:
    """Visit every reachable state, nearest first, so that traces are as short as possible."""
    begun = time.monotonic()
    start = model.initial()
    came_from: dict[Hashable, tuple[str, Hashable] | None] = {start: None}
    queue = deque([start])
    expanded = 0
    while queue:
        state = queue.popleft()
        expanded += 1
        try:
            for label, following in model.successors(state):
                if following not in came_from:
                    came_from[following] = (label, state)
                    queue.append(following)
        except ViolationError as violation:
            trace = _trace(came_from, state)
            return Result("violated", expanded, time.monotonic() - begun, str(violation), trace)
        if len(came_from) > max_states:
            return Result("bounded", expanded, time.monotonic() - begun)
    return Result("holds", expanded, time.monotonic() - begun)


def _trace(came_from: dict[Hashable, tuple[str, Hashable] | None], state: Hashable) -> tuple[str, ...]:
    labels: list[str] = []
    while (step := came_from[state]) is not None:
        labels.append(step[0])
        state = step[1]
    return tuple(reversed(labels))
