"""How a writer stores steps as step diffs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ckptstore.errors import UsageError
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.host.option_checks import seconds, whole

__all__ = ["Adapting", "DiffOptions"]


class DiffSettings(Protocol):
    """A configuration of the LowDiff model: checkpoints from one full to the next, and steps in a batch."""

    @property
    def interval(self) -> int:
        """Checkpoints from one full to the next: 1/f in the paper."""

    @property
    def batch(self) -> int:
        """Steps in a batch: b in the paper."""


class Adapting(Protocol):
    """The interface of a controller that adapts (f, b) while training runs: `tuning.Controller`."""

    @property
    def configuration(self) -> DiffSettings:
        """The best configuration now."""

    def wrote(self, nbytes: float, seconds: float) -> None:
        """Note that a full was written: its size and duration."""

    def ran(self, seconds: float) -> None:
        """Note that training ran for `seconds` without a failure."""

    def adapt(self) -> object:
        """Change the configuration, if that pays."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How a writer stores steps.

    Attributes:
        full_every: checkpoints from one full to the next: restoring a step replays fewer diffs than this.
        batch: steps that are written together. Steps that wait for their batch are lost if the process is killed; a
            `PendingSave` is done only when the batch is durable. `PendingSave.result` writes the batch at once, and so
            does `Writer.save`.
        seconds: the longest time that a step waits for its batch; None or infinity: until the batch is full.
        batch_bytes: compressed bytes that may wait in memory.
        flush_on_sigterm: write waiting steps when the process receives SIGTERM (only for writers that the main thread
            opens).
        policy: which codecs are used for tensors that no optimizer updates. With ``context=True`` (``SMALL_POLICY``)
            Adam's steps take fewer bytes, too, at about half the speed; versions before this one cannot read them.
        accumulate: ``concatenate``: every step of a batch is an exact checkpoint. ``sum``: the gradients of the batch
            are added and applied as one step; the last step of the batch is its only checkpoint, *lossy* under every
            optimizer, and marked so wherever it appears. Saves of the other steps return that checkpoint, their tags
            name it, and its metadata are those of the last step.
        recompute: where parameters are on a device, compute each new state again on the host, from its gradient and the
            state before. A third of the state's bytes leaves the device, and the stored bytes are the same. The
            optimizer's next step waits for this computation, which takes about 11 ms of processor time a million
            parameters; False: the whole state is copied, and nothing waits. Ranks that save together compute their
            shares. Not with `memory`, an agent or ``accumulate="sum"``.
        controller: chooses `full_every` and `batch` instead, and changes them when a full is due: a
            `tuning.Controller` that receives how long fulls take and how long training has run.
    """

    full_every: int = 100
    batch: int = 1
    seconds: float | None = 30.0
    batch_bytes: int = 256 << 20
    flush_on_sigterm: bool = True
    policy: Policy = FAST_POLICY
    accumulate: Literal["concatenate", "sum"] = "concatenate"
    recompute: bool = False
    controller: Adapting | None = None

    @property
    def waits(self) -> bool:
        """Whether a step may wait for other steps."""
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
        if not isinstance(self.recompute, bool):
            raise UsageError(f"recompute: {self.recompute!r:.80}; it may be True or False")
        if self.recompute and self.accumulate == "sum":
            raise UsageError("recompute: not with accumulate='sum', which stores no step by itself")
