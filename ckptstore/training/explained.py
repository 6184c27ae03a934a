"""Whether gradient diffs are as small as they should be: if not, somebody is told once, and why that may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptstore.write.metrics import OnMetrics, SaveMetrics

__all__ = ["Explained"]

_LARGE: Final = 0.6
"""Share of a full. A step that is explained takes 5 to 35 %, by its gradients; one that is not, 70 to 90 %."""
_IN_A_ROW: Final = 3


class Explained:
    """Looks at each save's metrics, and hands them on."""

    def __init__(self, hand_on: OnMetrics | None, durable: Callable[[float], None]) -> None:
        """
        Args:
            hand_on: who is told of them, too.
            durable: is told how long each save took.
        """
        self._hand_on = hand_on
        self._durable = durable
        self._in_a_row = 0
        self._told = False
        self._remark: str | None = None

    def told(self, metrics: SaveMetrics) -> None:
        """One save has ended (`Store.writer`'s `on_metrics`)."""
        if metrics.error is None:
            self._durable(metrics.durable)
        if metrics.kind == "gradient" and metrics.nbytes:
            share = metrics.stored / metrics.nbytes
            self._in_a_row = self._in_a_row + 1 if share > _LARGE else 0
            if self._in_a_row >= _IN_A_ROW and not self._told:
                self._told = True
                self._remark = (
                    f"gradient diffs take {share:.0%} of a full: the predicted updates explain next to nothing, "
                    "because the weights move in another way than the optimizer's arithmetic says: a subclass with a "
                    "step of its own, weights that are changed beside it (clamped, averaged, swapped), or a step that "
                    "was taken between two checkpoints; strategy='delta' would be as small, and quicker"
                )
        if self._hand_on is not None:
            self._hand_on(metrics)

    def remark(self) -> str | None:
        """What is to be said, once; None: nothing."""
        remark, self._remark = self._remark, None
        return remark
