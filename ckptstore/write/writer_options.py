"""What a writer may use: every number is checked before a term is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import UsageError
from ckptstore.formats.retention_rules import checked
from ckptstore.host import interpreter_exit
from ckptstore.host.arenas import Arenas
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.option_checks import MOST_BYTES, MOST_THREADS, seconds, whole
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.saves.save_metrics import OnMetrics

__all__ = ["WriterOptions"]

_MOST_IN_FLIGHT: Final = 1024


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """What a writer may use.

    Attributes:
        staging_bytes: host memory between state and medium; at least 32 MiB. Coding deltas may take as much again.
        threads: threads that write blocks of one checkpoint; one or two saturate a local disk.
        max_in_flight: saves that `Writer.save_async` may have on their way. Plain fulls are made durable at the same
            time, each by `threads` threads; deltas and step diffs in turn, because each is coded against another.
        poll_seconds: how often to look for requests of other processes while idle; None or infinity: only at commits.
        deltas: how checkpoints are stored as deltas against earlier ones; None: every one is a full.
        diffs: how steps are stored as step diffs; None: not at all.
        memory: bytes of host memory for what `Writer.save_async` has copied and the medium has not; training waits
            while it is spent. None: `max_in_flight` times the state. With deltas or step diffs it is what they take
            beside the state that they are coded against, and a save is coded as it is copied, when its turn has come.
        on_metrics: told of each save; see `SaveMetrics`.
        keep: the rules of retention that the store shall have from now on; None: as before.
    """

    staging_bytes: int = DEFAULT_BUDGET
    threads: int = 2
    max_in_flight: int = 1
    poll_seconds: float | None = 5.0
    deltas: DeltaOptions | None = None
    diffs: DiffOptions | None = None
    memory: int | None = None
    on_metrics: OnMetrics | None = None
    keep: Sequence[str] | None = None

    @property
    def plain(self) -> bool:
        """Whether every checkpoint is an uncompressed full."""
        return self.deltas is None and self.diffs is None

    @property
    def keeps_copies(self) -> bool:
        """Whether a state that was copied as a whole stays in memory: the next ones are coded against it."""
        if self.memory is not None:
            return False
        return self.diffs is not None or (self.deltas is not None and self.deltas.memory is None)

    def __post_init__(self) -> None:
        interpreter_exit.check()
        # Says what is wrong with it, before a term is opened and another one fenced.
        Staging.for_chunks(budget=whole("staging_bytes", self.staging_bytes, 0, MOST_BYTES))
        whole("threads", self.threads, 1, MOST_THREADS)
        whole("max_in_flight", self.max_in_flight, 1, _MOST_IN_FLIGHT)
        if self.memory is not None:
            Arenas(whole("memory", self.memory, 0, MOST_BYTES))
            self._check_fed()
        if self.on_metrics is not None and not callable(self.on_metrics):
            raise UsageError(f"on_metrics: {self.on_metrics!r}; it takes a function of one SaveMetrics")
        if self.keep is not None:
            object.__setattr__(self, "keep", checked(self.keep))
        object.__setattr__(self, "poll_seconds", seconds("poll_seconds", self.poll_seconds, above=True))

    def _check_fed(self) -> None:
        if self.deltas is not None and self.diffs is not None:
            raise UsageError("memory: with deltas or with diffs, but not with both: each keeps a state of its own")
        if self.deltas is not None and self.deltas.memory is not None:
            raise UsageError(
                "memory: not with DeltaOptions(memory=...), which has bases read back from the store; give one of them"
            )
        if self.diffs is not None and self.diffs.accumulate == "sum":
            raise UsageError("memory: not with DiffOptions(accumulate='sum'), which keeps whole gradients in memory")
