"""Ranks that were waited for in vain: one loss is found out once, and not again for each step in flight."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["SilentRanks"]


class _Found(NamedTuple):
    when: float
    step: int
    why: str


class SilentRanks:
    """What the time-outs of one term have shown, on one rank. Thread-safe: single operations of a dict are whole."""

    def __init__(self) -> None:
        self._found: dict[int, _Found] = {}

    def note(self, ranks: Iterable[int], step: int, why: str) -> None:
        """These ranks did not do their part of a step in time.

        Args:
            why: names them, what they did not do, and how long they were waited for.
        """
        found = _Found(time.monotonic(), step, why)
        self._found.update(dict.fromkeys(ranks, found))

    def since(self, given: float) -> bool:
        """Whether any rank was waited for in vain after `given` (``time.monotonic()``)."""
        return any(found.when > given for found in list(self._found.values()))

    def about(self, ranks: Iterable[int], given: float) -> str | None:
        """Why a step that was given at `given`, and lacks the parts of `ranks`, need not wait for them; None: it must.

        A step that is given later waits for the full time: the rank may be there again.
        """
        for rank in ranks:
            found = self._found.get(rank)
            if found is not None and found.when > given:
                return f"as step {found.step}: {found.why}"
        return None
