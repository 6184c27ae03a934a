"""Remember the ranks that timed out, so that no other step in flight waits for a lost rank again."""

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
    """The ranks that timed out in one term, as one rank knows them.

    Thread-safe: single operations of a dict are atomic.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Found] = {}

    def note(self, ranks: Iterable[int], step: int, why: str) -> None:
        """Note that these ranks did not do their part of a step in time.

        Args:
            why: names the ranks, what they did not do, and the timeout.
        """
        found = _Found(time.monotonic(), step, why)
        self._found.update(dict.fromkeys(ranks, found))

    def since(self, given: float) -> bool:
        """Whether a wait for any rank timed out after `given` (``time.monotonic()``)."""
        return any(found.when > given for found in list(self._found.values()))

    def about(self, ranks: Iterable[int], given: float) -> str | None:
        """Why a step saved at `given` that lacks the parts of `ranks` need not wait for them; None: it has to wait.

        A step that is saved later waits the full time: the rank may be back.
        """
        for rank in ranks:
            found = self._found.get(rank)
            if found is not None and found.when > given:
                return f"as step {found.step}: {found.why}"
        return None
