"""What a run without rules of retention will take: said once, when it is known, where ``auto`` says what it chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptstore.formats.byte_text import size
from ckptstore.write.metrics import SaveMetrics

__all__ = ["Unbounded"]

_STEPS: Final = 1000
_SEEN: Final = 20
"""Saves after which those so far say how large deltas are, and how often there is a full."""


class Unbounded:
    """Is told of each save, and says once how many bytes 1,000 steps take. One thread at a time calls it."""

    def __init__(self, say: Callable[[str], object], strategy: str, every: int | None, full_every: int) -> None:
        """
        Args:
            say: is given the sentence.
            every: steps from one save to the next; None: a controller says when.
            full_every: with step diffs, checkpoints from one full to the next.
        """
        self._say = say
        self._strategy = strategy
        self._every = every
        self._full_every = full_every
        self._full = 0
        self._stored: list[int] = []
        self._said = False

    def told(self, metrics: SaveMetrics) -> None:
        """One save has ended."""
        if self._said or metrics.error is not None:
            return
        self._stored.append(metrics.stored)
        if metrics.kind == "full":
            self._full = metrics.stored
        nbytes = self._in_all(_STEPS // (self._every or 1), metrics)
        if nbytes is None:
            return
        self._said = True
        what = f"{_STEPS:,} steps" if self._every is not None else f"{_STEPS:,} saves"
        self._say(
            f"no rules: every checkpoint is kept, about {size(nbytes)} in {what}; keep=['last:100', 'every:1000'] "
            "keeps fewer (docs/retention.md)"
        )

    def _in_all(self, saves: int, metrics: SaveMetrics) -> float | None:
        """Bytes of so many saves; None: nobody knows yet."""
        if self._strategy == "full":
            return float(saves * metrics.stored)
        if self._strategy == "gradient" and metrics.kind == "gradient" and self._full:
            fulls = -(-saves // self._full_every)
            return float(fulls * self._full + (saves - fulls) * metrics.stored)
        return saves * sum(self._stored) / len(self._stored) if len(self._stored) >= _SEEN else None
