"""The open term of a `Checkpointer`: its writer, the saves in flight, and retention."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any, cast

from ckptstore import agent
from ckptstore.store import Store
from ckptstore.training import strategies
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.optimizers.optimizer_tracker import OptimizerTracker
from ckptstore.training.replica.replica_saves import ReplicaSaves
from ckptstore.training.retention import Retention
from ckptstore.training.save_reports import GrowthForecast, SaveReports
from ckptstore.training.settings import SaveSettings
from ckptstore.training.state_saves import StateSaves
from ckptstore.training.strategies import Strategy
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.writer import Writer

__all__ = ["OpenTerm", "choose_strategy"]


class OpenTerm:
    """A term that is open for writing.

    Attributes:
        writer: writes states to the store.
        group: the ranks that save together; None: this process alone.
        saves: the saves in flight.
    """

    def __init__(
        self,
        store: Store,
        settings: SaveSettings,
        captured: ScriptState,
        tracker: OptimizerTracker,
        strategy: Strategy,
        group: Group | None,
        reports: SaveReports,
        ref: str | None,
    ) -> None:
        """Open a term that continues from `ref`; None: from scratch.

        Args:
            reports: gets the metrics of each save.

        Raises:
            UsageError: the writer cannot do what the strategy needs.
            as `Store.writer`, `ckptstore.agent.writer`.
        """
        self.group = group
        self._by_agent = settings.agent
        options = _writer_options(settings, captured, strategy, group) | {"on_metrics": reports.on_metrics}
        if settings.agent:
            self.writer: Writer = agent.writer(store, ref, linger_seconds=settings.linger_seconds, **options)
        else:
            self.writer = store.writer(ref, **options)
        self._retention: Retention | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.writer.close)
            tracker.install(predict=strategy == "gradient", carry=self.writer.recomputes)
            if self.is_first:
                self._retention = Retention(store, self.writer, settings.keep)
                undo.callback(self._retention.abandon)
            ruled = settings.keep.best is not None or (self.is_first and bool(store.rules()))
            if self.is_first and not ruled and self.writer.parent is None and reports.growth is None:
                say = partial(strategies.say, store.url)
                full_every = sys.maxsize if _stores_once(captured) else settings.full_every
                reports.growth = GrowthForecast(say, strategy, settings.every, full_every)
            kind = ReplicaSaves if strategy == "replica" else StateSaves
            self.saves = kind(store, self.writer, captured, tracker, strategy, settings, self.ranks, self._retention)
            undo.pop_all()

    @property
    def rank(self) -> int | None:
        """Which of the ranks this is; None: there are no others."""
        return None if self.group is None else self.group.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides for all; or there are no others."""
        return self.group is None or self.group.rank == 0

    @property
    def ranks(self) -> int:
        """How many ranks save together."""
        return 1 if self.group is None else self.group.size

    @property
    def follows(self) -> bool:
        """Whether steps that are not due are offered, too."""
        return self.saves.follows

    @property
    def written_by_agent(self) -> bool:
        """Whether an agent writes the last step at the end, due or not. With several ranks all have to agree to it."""
        return self.follows and self.group is None

    def finish(self) -> None:
        """Training is over: make all saves durable, and finish what retention has to do."""
        if self._retention is not None or self._by_agent:
            self.saves.ended()
        if self._retention is not None:
            self._retention.close()

    def end(self) -> None:
        """Close the writer, and release memory and threads."""
        try:
            if self._retention is not None:
                self._retention.abandon()
            self.writer.close()
        finally:
            self.saves.close()


def _writer_options(
    settings: SaveSettings, captured: ScriptState, strategy: Strategy, group: Group | None
) -> dict[str, Any]:
    """The options of `Store.writer`. Raises `UsageError`."""
    found = strategies.writer_options(
        strategy,
        settings.full_every,
        settings.batch,
        settings.deltas,
        settings.every,
        recompute=settings.recompute,
        once=_stores_once(captured),
    )
    found |= {"max_in_flight": settings.max_in_flight, "threads": settings.threads, "keep": settings.keep.store_rules}
    if settings.space is not None:
        found["space"] = settings.space
    if group is not None:
        found["group"] = group
        found["ranks"] = RankOptions(timeout=settings.rank_timeout, per_rank=captured.per_rank)
    if settings.compact is not None:
        found["compact"] = settings.compact
    return found


def choose_strategy(
    store: Store, settings: SaveSettings, captured: ScriptState, group: Group | None
) -> tuple[Strategy, str]:
    """The strategy, and why ``auto`` chose it; empty: it was asked for. A choice of ``auto`` is said in one line."""
    if settings.strategy != "auto":
        return cast(Strategy, settings.strategy), ""
    store.create()
    nbytes, frozen = _sizes(captured)
    strategy, why = strategies.chosen(
        strategies.Circumstances(
            nbytes=nbytes,
            rate=None if group is not None else strategies.measure_rate(store.backend),
            spare=strategies.spare_cores(captured.models),
            unpredicted=strategies.predicted(captured.optimizers, settings.every),
            frozen=frozen,
        )
    )
    if group is None or group.rank == 0:
        strategies.tell(store.url, strategy, why)
    return strategy, why


def _sizes(captured: ScriptState) -> tuple[int, int]:
    """About how many bytes a checkpoint has, and how many of them are frozen weights."""
    nbytes = strategies.state_bytes(captured.models, captured.optimizers) + captured.extra_bytes
    frozen = strategies.frozen_bytes(captured.models)
    return (nbytes - frozen, 0) if captured.leaves_out else (nbytes, frozen)


def _stores_once(captured: ScriptState) -> bool:
    """Whether all checkpoints refer to the frozen weights of one full."""
    nbytes, frozen = _sizes(captured)
    return strategies.stores_once(frozen, nbytes)
