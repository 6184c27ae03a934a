"""What every way to checkpoint a training loop has to do: save a step, and restore after a SIGKILL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tools.bench.training.training_loop import Trainer

__all__ = ["AbsentError", "Ledger", "Nothing", "Options", "Strategy"]


class AbsentError(Exception):
    """The strategy needs something that this build of ckptstore, or this device, lacks."""


@dataclass(slots=True)
class Ledger:
    """When saves began and when they were durable, reported from any thread; seconds of the monotonic clock."""

    began: dict[int, float] = field(default_factory=dict)
    durable: dict[int, float] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        self.began[step] = time.perf_counter()

    def done(self, step: int) -> None:
        self.durable[step] = time.perf_counter()

    def seconds(self, after: int) -> list[float]:
        """Seconds until durable, of every durable save after step `after`."""
        return [self.durable[step] - self.began[step] for step in sorted(self.durable) if step > after]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of strategies beside the trainer.

    Attributes:
        interval: iterations from one save to the next.
        full_every: checkpoints from one full to the next, of strategies with differences.
        batch: step diffs in one write; None: as many as `interval`.
    """

    interval: int = 1
    full_every: int = 100
    batch: int | None = None


class Strategy(ABC):
    """One way to checkpoint, in one loop.

    Attributes:
        label: for tables.
        every_step: `save` is called after every step, not only at the interval: it includes the steps in between.
        lossy: the restored state differs from the trained one.
    """

    label: ClassVar[str]
    every_step: ClassVar[bool] = False
    lossy: ClassVar[bool] = False

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        self.folder = folder
        self.trainer = trainer
        self.options = options
        self.ledger = ledger

    def before_update(self) -> None:  # noqa: B027  # most have nothing to wait for
        """Called right before the optimizer's step: tensors that are being copied must not change."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save the trainer's present state; the ledger has noted the begin."""

    def settle(self) -> None:  # noqa: B027  # synchronous saves are already settled
        """Return when everything is durable. Raises the error of a failed save."""

    def close(self) -> None:
        """Settle, and stop threads."""
        self.settle()

    def hidden_wait(self) -> float:
        """Seconds that training has waited so far within the optimizer's step (hooks)."""
        return 0.0

    @staticmethod
    @abstractmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        """Load the newest complete checkpoint into a trainer that has taken a step -> its step, if any."""


class Nothing(Strategy):
    label = "none"

    def save(self, step: int) -> None:
        self.ledger.began.pop(step, None)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:  # noqa: ARG004  # there is nothing
        return None
