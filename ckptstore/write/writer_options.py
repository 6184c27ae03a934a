"""The options of a writer, all checked before a term is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptstore.errors import UsageError
from ckptstore.formats.history.retention_rules import checked
from ckptstore.formats.history.space_limits import LEAST_STATES, SpaceLimit, is_space, space_limit
from ckptstore.host import interpreter_exit
from ckptstore.host.arenas import Arenas
from ckptstore.host.buffers import DEFAULT_BUDGET, Staging
from ckptstore.host.option_checks import MOST_BYTES, MOST_THREADS, seconds, whole
from ckptstore.write.saves.save_metrics import OnMetrics

if TYPE_CHECKING:
    from ckptstore.write.policy.delta_options import DeltaOptions
    from ckptstore.write.policy.diff_options import DiffOptions

__all__ = ["WriterOptions"]

_MOST_IN_FLIGHT: Final = 1024


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """The options of a writer.

    Attributes:
        staging_bytes: host memory between state and medium; at least 32 MiB. Compressing deltas may take as much again.
        threads: threads that write blocks of one checkpoint; one or two saturate a local disk.
        max_in_flight: the most saves of `Writer.save_async` in flight. Uncompressed fulls are made durable
            concurrently, each by `threads` threads; deltas and step diffs one by one, because each is compressed
            against another.
        poll_seconds: how often an idle writer looks for requests of other processes; None or infinity: only at commits.
        deltas: how checkpoints are stored as deltas against earlier ones; None: every one is a full.
        diffs: how steps are stored as step diffs; None: there are no step diffs.
        memory: bytes of host memory for states that `Writer.save_async` has copied and that are not on the medium yet;
            training waits while it is used up. None: `max_in_flight` times the state. With deltas or step diffs: the
            memory beside the state that they are compressed against; then a save is compressed as it is copied, when
            its turn has come.
        on_metrics: called for each save; see `SaveMetrics`.
        keep: the new retention rules of the store; None: they stay as they are.
        space: the rule that limits the space of the store's checkpoints, added to `keep` or to the present rules: a
            number of bytes, ``4GB``, or ``3 states``. None: as the rules say.
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
    space: int | str | None = None

    @property
    def plain(self) -> bool:
        """Whether every checkpoint is an uncompressed full."""
        return self.deltas is None and self.diffs is None

    @property
    def keeps_copies(self) -> bool:
        """Whether a whole copied state stays in memory, because later saves are compressed against it."""
        if self.memory is not None:
            return False
        return self.diffs is not None or (self.deltas is not None and self.deltas.memory is None)

    def __post_init__(self) -> None:
        interpreter_exit.check()
        # Raises if it is invalid, before a term is opened and another one fenced.
        Staging.for_chunks(budget=whole("staging_bytes", self.staging_bytes, 0, MOST_BYTES))
        whole("threads", self.threads, 1, MOST_THREADS)
        whole("max_in_flight", self.max_in_flight, 1, _MOST_IN_FLIGHT)
        if self.memory is not None:
            Arenas(whole("memory", self.memory, 0, MOST_BYTES))
            self._check_memory_options()
        if self.on_metrics is not None and not callable(self.on_metrics):
            raise UsageError(f"on_metrics: {self.on_metrics!r}; it takes a function of one SaveMetrics")
        if self.keep is not None:
            object.__setattr__(self, "keep", self.rules(self.keep) if self.space is not None else checked(self.keep))
        elif self.space is not None:
            self._limit()
        object.__setattr__(self, "poll_seconds", seconds("poll_seconds", self.poll_seconds, above=True))

    def rules(self, present: Sequence[str]) -> tuple[str, ...]:
        """The rules of the store from now on, if `present` are its rules.

        Raises:
            UsageError: `space` alone limits the space, and no rule says what stays.
        """
        if self.space is None:
            return tuple(present if self.keep is None else self.keep)
        rules = self.keep if self.keep is not None else present
        return checked([*(rule for rule in rules if not is_space(str(rule))), self._limit().rule])

    def _limit(self) -> SpaceLimit:
        space = self.space
        found = None if isinstance(space, bool) or not isinstance(space, int | str) else space_limit(str(space))
        if found is None:
            raise UsageError(
                f"space: {space!r:.80}; pass bytes (4_000_000_000 or '4GB'), or a number of states from "
                f"{LEAST_STATES} on ('{LEAST_STATES} states'): one stays durable while the next is written"
            )
        return found

    def _check_memory_options(self) -> None:
        if self.deltas is not None and self.diffs is not None:
            raise UsageError("memory: with deltas or with diffs, but not with both: each keeps a state of its own")
        if self.deltas is not None and self.deltas.memory is not None:
            raise UsageError(
                "memory: not with DeltaOptions(memory=...), which has bases read back from the store; give one of them"
            )
        if self.diffs is not None and self.diffs.accumulate == "sum":
            raise UsageError("memory: not with DiffOptions(accumulate='sum'), which keeps whole gradients in memory")
        if self.diffs is not None and self.diffs.recompute:
            raise UsageError("memory: not with DiffOptions(recompute=True), which keeps the state before in memory")
