"""What each save's metrics are used for: the log, the deadline, the caller's function, curves, a forecast of growth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from ckptstore.formats.byte_text import size
from ckptstore.write.saves.save_metrics import OnMetrics, PromptFunction, SaveMetrics

__all__ = ["GrowthForecast", "SaveReports", "Scalars", "curves"]

_LOG: Final = logging.getLogger("ckptstore.training")

_STEPS: Final = 1000
_SEEN: Final = 20
"""Saves after which those so far tell how large deltas are, and how often a full is stored."""


class Scalars(Protocol):
    """What draws curves: torch's ``SummaryWriter``, and similar classes."""

    def add_scalar(self, name: str, value: float, step: int, /) -> object:
        """Add one point of a curve."""


def curves(metrics: SaveMetrics) -> dict[str, float]:
    """A save's numbers by name: seconds, bytes, and as ``ratio`` the stored part of each byte. A failed one has few."""
    found = {"stall": metrics.stall, "waited": metrics.waited, "in_flight": metrics.in_flight, "lag": metrics.lag}
    if metrics.error is None:
        found |= {"durable": metrics.durable, "stored": metrics.stored}
        if metrics.nbytes:
            found["ratio"] = metrics.stored / metrics.nbytes
    return {name: float(value) for name, value in found.items()}


class SaveReports:
    """Passes each save's metrics to all who use them.

    Attributes:
        growth: forecasts what a run without retention rules takes; None: there are rules, or no term is open yet.
    """

    def __init__(
        self, durable: Callable[[float], None], on_metrics: OnMetrics | None = None, board: Scalars | None = None
    ) -> None:
        """
        Args:
            durable: gets the seconds that each save took until it was durable.
            on_metrics: the caller's function; it gets the metrics.
            board: gets the numbers as curves.
        """
        self.growth: GrowthForecast | None = None
        self._durable = durable
        self._on_metrics = on_metrics
        self._board = board

    @property
    def on_metrics(self) -> OnMetrics:
        """`ended`, for a writer's ``on_metrics``. Only the caller's own function or board needs a thread for it."""
        if self._on_metrics is None and self._board is None:
            return PromptFunction(self.ended)
        return self.ended

    def ended(self, metrics: SaveMetrics) -> None:
        """One save has ended."""
        _LOG.debug(
            "step %d: %s, %d of %d bytes, stall %.4f s, durable after %.3f s, lag %d",
            metrics.step, metrics.kind or f"not saved ({metrics.error})", metrics.stored, metrics.nbytes,
            metrics.stall, metrics.durable, metrics.lag,
        )  # fmt: skip
        if metrics.error is None:
            self._durable(metrics.durable)
        if self._on_metrics is not None:
            self._on_metrics(metrics)
        if self._board is not None:
            for name, value in curves(metrics).items():
                self._board.add_scalar(f"ckptstore/{name}", value, metrics.step)
        if self.growth is not None:
            self.growth.saved(metrics)

    def draw(self, metrics: Mapping[str, Any], step: int) -> None:
        """Draw the metrics that the script passed with a step."""
        if self._board is None:
            return
        for name, value in metrics.items():
            self._board.add_scalar(name, float(value.item() if hasattr(value, "item") else value), step)


class GrowthForecast:
    """Says once how many bytes 1,000 steps of a run without retention rules take. One thread at a time calls it."""

    def __init__(self, say: Callable[[str], object], strategy: str, every: int | None, full_every: int) -> None:
        """
        Args:
            say: gets the sentence.
            every: steps from one save to the next; None: a controller decides.
            full_every: with step diffs, checkpoints from one full to the next.
        """
        self._say = say
        self._strategy = strategy
        self._every = every
        self._full_every = full_every
        self._full = 0
        self._stored: list[int] = []
        self._said = False

    def saved(self, metrics: SaveMetrics) -> None:
        """One save has ended."""
        if self._said or metrics.error is not None:
            return
        self._stored.append(metrics.stored)
        if metrics.kind == "full":
            self._full = metrics.stored
        nbytes = self._total(_STEPS // (self._every or 1), metrics)
        if nbytes is None:
            return
        self._said = True
        what = f"{_STEPS:,} steps" if self._every is not None else f"{_STEPS:,} saves"
        self._say(
            f"no rules: every checkpoint is kept, about {size(nbytes)} in {what}; keep=['last:100', 'every:1000'] "
            "keeps fewer (docs/retention.md)"
        )

    def _total(self, saves: int, metrics: SaveMetrics) -> float | None:
        """Bytes of so many saves; None: not known yet."""
        if self._strategy == "full":
            return float(saves * metrics.stored)
        if self._strategy == "gradient" and metrics.kind == "gradient" and self._full:
            fulls = -(-saves // self._full_every)
            return float(fulls * self._full + (saves - fulls) * metrics.stored)
        return saves * sum(self._stored) / len(self._stored) if len(self._stored) >= _SEEN else None
