"""The metrics of saves, handed to the function that asked for them and to a TensorBoard writer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from ckptstore.write.metrics import OnMetrics, SaveMetrics

__all__ = ["Explained", "Scalars", "curves"]

_LOG: Final = logging.getLogger("ckptstore.training")


class Scalars(Protocol):
    """What draws curves: torch's ``SummaryWriter``, and others'."""

    def add_scalar(self, name: str, value: float, step: int, /) -> object:
        """One point of a curve."""


def curves(metrics: SaveMetrics) -> dict[str, float]:
    """A save's numbers by name: seconds, bytes, and as ``ratio`` what was stored of each byte. A failed one has few."""
    found = {"stall": metrics.stall, "waited": metrics.waited, "in_flight": metrics.in_flight, "lag": metrics.lag}
    if metrics.error is None:
        found |= {"durable": metrics.durable, "stored": metrics.stored}
        if metrics.nbytes:
            found["ratio"] = metrics.stored / metrics.nbytes
    return {name: float(value) for name, value in found.items()}


class Explained:
    """Looks at each save's metrics, and hands them on."""

    def __init__(
        self, hand_on: OnMetrics | None, durable: Callable[[float], None], board: Scalars | None = None
    ) -> None:
        """
        Args:
            hand_on: who is told of them, too.
            durable: is told how long each save took.
            board: gets them as curves.
        """
        self._board = board
        self._hand_on = hand_on
        self._durable = durable

    def told(self, metrics: SaveMetrics) -> None:
        """One save has ended (`Store.writer`'s `on_metrics`)."""
        _LOG.debug(
            "step %d: %s, %d of %d bytes, stall %.4f s, durable after %.3f s, lag %d",
            metrics.step, metrics.kind or f"not saved ({metrics.error})", metrics.stored, metrics.nbytes,
            metrics.stall, metrics.durable, metrics.lag,
        )  # fmt: skip
        if metrics.error is None:
            self._durable(metrics.durable)
        if self._hand_on is not None:
            self._hand_on(metrics)
        if self._board is not None:
            for name, value in curves(metrics).items():
                self._board.add_scalar(f"ckptstore/{name}", value, metrics.step)

    def draw(self, metrics: Mapping[str, Any], step: int) -> None:
        """A step was given with these metrics: they are curves, too."""
        if self._board is None:
            return
        for name, value in metrics.items():
            self._board.add_scalar(name, float(value.item() if hasattr(value, "item") else value), step)
