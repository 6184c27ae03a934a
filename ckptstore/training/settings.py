"""The options of a `Checkpointer`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from ckptstore.errors import UsageError
from ckptstore.host.option_checks import seconds, whole
from ckptstore.maintenance.compact.idle_compaction import CompactOptions
from ckptstore.training.optimizers.optimizer_tracker import Compressor
from ckptstore.training.retention import Keep
from ckptstore.training.save_pace import SavePolicy
from ckptstore.training.save_reports import Scalars
from ckptstore.training.strategies import STRATEGIES
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.saves.save_metrics import OnMetrics

__all__ = ["CheckpointerOptions", "SaveSettings", "SlowSavesWarning", "UnsavedStepWarning"]


class UnsavedStepWarning(UserWarning):
    """A step was not saved, and training continues (``on_error="warn"``)."""


class SlowSavesWarning(UserWarning):
    """Training runs at less than half of its pace, because it waits for saves. Says what to choose."""


class CheckpointerOptions(TypedDict, total=False):
    """The options of a `Checkpointer`.

    Attributes:
        scaler: a ``GradScaler``. Its state is saved, and the steps that it skips are recognized.
        extra: anything else that training depends on, by name: objects with ``state_dict`` and ``load_state_dict``
            (averaged weights), random generators. Ranks that save together compare the states of such objects, which
            have to be equal. An object with a true attribute ``per_rank`` has a state of its own on each rank.
        only: ``trainable``: leave the frozen weights of ``model`` out of the checkpoints (``requires_grad=False``). The
            script loads them itself before `resume`, which compares their bits with those that the run had. Frozen
            weights that change during the run are stored from then on. None (default): everything is stored; frozen
            weights once, unless ``strategy="full"`` was asked for.
        compressor: a `TopKHook`. Step diffs store its sparse gradients, and a replica gets only these.
        save_every: optimizer steps from one checkpoint to the next (default 1), or a
            `ckptstore.tuning.IntervalController`, which chooses the interval so that saves slow training down by no
            more than its limit. ``continuous``: a save begins as soon as the one before is durable. Leaving the
            ``with`` without an error always saves the last step.
        full_every: with step diffs, checkpoints from one full to the next (default 100).
        batch: with step diffs, steps that are written together (default 1). If the process is killed, the steps that
            wait for their batch are lost.
        recompute: with step diffs and parameters on a device, compute each new state again on the host, so that a third
            of its bytes leaves the device; the optimizer's next step waits for it (default False: `DiffOptions`). Not
            with `agent`.
        deltas: options of delta compression.
        max_in_flight, threads: as for `Store.writer` (2 and 2).
        keep_last: keep this many newest checkpoints and retire the others.
        keep_every: keep the checkpoints whose step is a multiple of this.
        keep_best: also keep the checkpoint with the lowest metric of this name, and tag it ``best``. ``max:NAME``: the
            highest.
        keep: rules as `Store.keep` takes them, instead of these three: ``["last:100", "every:1000"]``. Without any of
            the four the store's own rules apply.
        space: the most space that the store's checkpoints may take, in bytes (``4GB``) or states (``3 states``; N + 1
            for N in flight); see `Store.writer`. Not with ranks.
        compact: compact the store while no save is in flight, as `Store.writer` does; not with `agent` or ranks.
        deadline_seconds: seconds from now until the job is ended. When the next step might be too late, the current
            step is made durable and `Checkpointer.should_stop` becomes True.
        grace_seconds: seconds after SIGTERM in which the current step may still be saved (default 15).
        signals: handle SIGTERM and SIGUSR1 (default True).
        on_error: ``raise`` (default), or ``warn`` and continue training.
        on_metrics: gets the metrics of every save, as that of `Store.writer`.
        group: the process group that saves together (`Store.writer`); by default all ranks, if there are several.
            None: this process alone.
        rank_timeout: seconds that ranks wait for one another (default 600).
        agent: True: an agent process saves (`ckptstore.agent`), which outlives this one. Default: False.
        linger_seconds: seconds that the agent keeps the newest state after this process has ended (default 300).
        tensorboard: an object with ``add_scalar(name, value, step)``, such as a ``SummaryWriter``. It gets metrics and
            the numbers of saves.
    """

    scaler: Any
    extra: Mapping[str, Any] | None
    only: Literal["trainable"] | None
    compressor: Compressor | None
    save_every: int | SavePolicy | Literal["continuous"]
    full_every: int
    batch: int
    recompute: bool
    deltas: DeltaOptions | None
    max_in_flight: int
    threads: int
    keep_last: int | None
    keep_every: int | None
    keep_best: str | None
    keep: Sequence[str] | None
    space: int | str | None
    compact: CompactOptions | None
    deadline_seconds: float | None
    grace_seconds: float
    signals: bool
    on_error: Literal["raise", "warn"]
    on_metrics: OnMetrics | None
    group: Any
    rank_timeout: float
    agent: bool
    linger_seconds: float
    tensorboard: Scalars | None


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """The options that concern how states are saved, checked. See `CheckpointerOptions`."""

    strategy: str = "auto"
    only: Literal["trainable"] | None = None
    compressor: Compressor | None = None
    save_every: int | SavePolicy | Literal["continuous"] = 1
    full_every: int = 100
    batch: int = 1
    recompute: bool = False
    deltas: DeltaOptions | None = None
    max_in_flight: int = 2
    threads: int = 2
    deadline_seconds: float | None = None
    grace_seconds: float = 15.0
    signals: bool = True
    on_error: str = "raise"
    on_metrics: OnMetrics | None = None
    group: Any = "all"
    rank_timeout: float = 600.0
    agent: bool = False
    linger_seconds: float = 300.0
    tensorboard: Scalars | None = None
    compact: CompactOptions | None = None
    space: int | str | None = None
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy: {self.strategy!r}; it may be {', '.join(map(repr, STRATEGIES))}")
        if self.only not in (None, "trainable"):
            raise UsageError(
                f"only: {self.only!r:.80}; it may be 'trainable', which leaves frozen weights out, or None"
            )
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"on_error: {self.on_error!r}; it may be 'raise' or 'warn'")
        if isinstance(self.save_every, str) and self.save_every != "continuous":
            raise UsageError(f"save_every: {self.save_every!r}; a number of steps, 'continuous', or a controller")
        if not isinstance(self.save_every, str | SavePolicy):
            whole("save_every", self.save_every, 1)
        elif self.strategy == "replica":
            raise UsageError("save_every: with strategy='replica' the agent decides what is saved; give a number")
        whole("full_every", self.full_every, 1)
        whole("batch", self.batch, 1)
        seconds("deadline_seconds", self.deadline_seconds, above=True)
        if seconds("grace_seconds", self.grace_seconds) is None:
            raise UsageError("grace_seconds: a number of seconds is needed")
        if not isinstance(self.agent, bool):
            raise UsageError(f"agent: {self.agent!r:.80}; it may be True or False")
        if not isinstance(self.recompute, bool):
            raise UsageError(f"recompute: {self.recompute!r:.80}; it may be True or False")
        if self.agent and self.recompute:
            raise UsageError("recompute: not with agent=True; strategy='replica' computes the steps in the agent")
        if self.compact is not None and not isinstance(self.compact, CompactOptions):
            raise UsageError(f"compact: {self.compact!r:.80}; it takes CompactOptions, as compact=CompactOptions()")
        if self.agent and self.compact is not None:
            raise UsageError("compact: cannot be combined with agent=True; run `ckpt compact` in another process")
        if seconds("linger_seconds", self.linger_seconds) is None:
            raise UsageError("linger_seconds: a number of seconds is needed")
        if self.tensorboard is not None and not callable(getattr(self.tensorboard, "add_scalar", None)):
            raise UsageError(f"tensorboard: {type(self.tensorboard).__name__} has no add_scalar(name, value, step)")
        if self.strategy == "replica" and not self.agent:
            raise UsageError("strategy='replica': an agent keeps the replica, so it needs agent=True")
        if self.strategy == "gradient" and self.every != 1:
            every = "a controller" if self.every is None else self.every
            raise UsageError(
                f"save_every={every} with strategy='gradient': a step diff is one optimizer step; save "
                "every step (batch= writes several at once), or take strategy='delta'"
            )

    @property
    def every(self) -> int | None:
        """Steps from one checkpoint to the next; None: a controller decides."""
        return self.save_every if isinstance(self.save_every, int) else None

    @classmethod
    def of(cls, strategy: str, options: Mapping[str, Any]) -> SaveSettings:
        """The options passed to a `Checkpointer`. Raises `UsageError` for an unknown or invalid option."""
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            if unknown[0] in _OF_OPEN:
                where = f"Checkpointer(ckptstore.open(PATH, {unknown[0]}=...), model=...)"
                raise UsageError(f"{unknown[0]!r} is an option of the store: {where}")
            raise UsageError(f"a Checkpointer has no option {unknown[0]!r}; it has {', '.join(sorted(_OPTIONS))}")
        names = ("keep_last", "keep_every", "keep_best", "keep")
        keep = Keep(*(options.get(name) for name in names))
        own = {name: value for name, value in options.items() if name in cls.__dataclass_fields__ and name not in names}
        return cls(strategy=strategy, keep=keep, **own)


_OPTIONS: Final = frozenset(CheckpointerOptions.__annotations__)

_OF_OPEN: Final = frozenset(
    ("remote", "remote_options", "bandwidth", "lag_bytes", "storage_options", "filesystem", "create")
)
