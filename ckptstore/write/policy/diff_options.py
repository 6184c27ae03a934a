"""How a writer stores steps as step diffs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ckptstore.errors import UsageError
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.host.option_checks import seconds, whole

__all__ = ["Adapting", "DiffOptions"]


class DiffSettings(Protocol):
    """A configuration of the LowDiff model: checkpoints from one full to the next, steps of a batch."""

    @property
    def interval(self) -> int:
        """1/f."""

    @property
    def batch(self) -> int:
        """b."""


class Adapting(Protocol):
    """What adapts (f, b) while training runs: `tuning.Controller`."""

    @property
    def configuration(self) -> DiffSettings:
        """What is best now."""

    def wrote(self, nbytes: float, seconds: float) -> None:
        """A full was written."""

    def ran(self, seconds: float) -> None:
        """So much time went by without a failure."""

    def adapt(self) -> object:
        """Move, if it pays."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How a writer stores steps.

    Attributes:
        full_every: checkpoints from one full to the next: restoring any step replays fewer than that.
        batch: steps that are written at once. What waits for its batch is lost if the process is killed; a
            `PendingSave` is done only when the batch is durable. Asking for its result writes it, as `Writer.save`
            does.
        seconds: the longest that a step waits for its batch; None or infinity: until it is full.
        batch_bytes: compressed bytes that may wait in memory.
        flush_on_sigterm: write what waits when the process is told to end (only for writers that the main thread
            opens).
        policy: which codecs tensors get that no optimizer moves.
        accumulate: ``concatenate``: every step of a batch is a checkpoint, exact. ``sum``: their gradients are added
            up and applied as one step; the batch's last step is its only checkpoint, *lossy* under every optimizer,
            and is marked so wherever it appears. Saves of the other steps answer with that one, their tags name it, and
            its metadata are the last step's.
        controller: chooses `full_every` and `batch` instead, and changes them when a full is due: a
            `tuning.Controller` is told how long fulls take and how long training has run.
    """

    full_every: int = 100
    batch: int = 1
    seconds: float | None = 30.0
    batch_bytes: int = 256 << 20
    flush_on_sigterm: bool = True
    policy: Policy = FAST_POLICY
    accumulate: Literal["concatenate", "sum"] = "concatenate"
    controller: Adapting | None = None

    @property
    def waits(self) -> bool:
        """Whether a step may wait for others."""
        return self.batch > 1 or self.controller is not None

    def __post_init__(self) -> None:
        for name, number in (("full_every", self.full_every), ("batch", self.batch)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"{name}: {number!r}; a whole number from 1 on is needed")
        object.__setattr__(self, "seconds", seconds("seconds", self.seconds, above=True))
        whole("batch_bytes", self.batch_bytes, 0)
        if not isinstance(self.policy, Policy):
            raise UsageError(f"policy: {self.policy!r:.80}; a Policy of ckptstore.formats.codecs is needed")
        if self.controller is not None and not hasattr(self.controller, "adapt"):
            raise UsageError(f"controller: {self.controller!r:.80}; a tuning.Controller is needed")
        if self.accumulate not in ("concatenate", "sum"):
            raise UsageError(f"accumulate: {self.accumulate!r}, 'concatenate' or 'sum'")
