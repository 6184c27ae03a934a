"""Opening a store for a `Checkpointer`: the strategy is chosen once, its options go to the writer, a term begins."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from ckptstore import agent
from ckptstore.errors import UsageError
from ckptstore.store import Store
from ckptstore.training import strategies
from ckptstore.training.captured import Captured
from ckptstore.training.replicated import ReplicaSaving
from ckptstore.training.retention import Retention
from ckptstore.training.saving import Saving, ranks_of
from ckptstore.training.settings import Settings
from ckptstore.training.taken import TakenSteps
from ckptstore.training.tenure import Tenure
from ckptstore.training.unbounded import Unbounded
from ckptstore.write.metrics import OnMetrics, SaveMetrics
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.writer import Writer

__all__ = ["Opening"]


class Opening:
    """Opens the terms of one run, all of them with one strategy.

    Attributes:
        strategy: how checkpoints are stored; None: that is chosen when the first term is opened.
        why: why ``auto`` is that; empty: it was asked for.
    """

    def __init__(
        self, store: Store, settings: Settings, captured: Captured, taken: TakenSteps, on_metrics: OnMetrics
    ) -> None:
        """
        Args:
            on_metrics: is told of every save.
        """
        self.strategy: strategies.Strategy | None = None
        self.why = ""
        self._store = store
        self._settings = settings
        self._captured = captured
        self._taken = taken
        self._on_metrics = on_metrics
        self._unbounded: Unbounded | None = None

    def term(self, ref: str | None) -> Tenure:
        """Open a term that continues from `ref`; None: from nothing. Before `begin` nothing can be saved in it.

        Raises:
            UsageError: the ranks' controllers would say different things.
            as `Store.writer`, `ckptstore.agent.writer`, `ranks_of`.
        """
        settings = self._settings
        group = ranks_of(settings.group, self._captured.sharding)
        if group is not None and settings.every is None:
            raise UsageError("save_every: the ranks' controllers would say different things; give a number")
        if self.strategy is None:
            self.strategy = self._chosen(group)
        told = self._told(self.strategy, group)
        if settings.agent:
            writer: Writer = agent.writer(self._store, ref, linger_seconds=settings.linger_seconds, **told)
        else:
            writer = self._store.writer(ref, **told)
        return Tenure(writer, group, by_agent=settings.agent)

    def begin(self, tenure: Tenure) -> None:
        """Have everything ready for the first step of a term that is open.

        Raises:
            UsageError: the writer cannot do what the strategy needs.
        """
        store, settings, strategy = self._store, self._settings, self.strategy
        assert strategy is not None  # a term is open
        self._taken.install(predict=strategy == "gradient")
        if tenure.is_first:
            tenure.retention = Retention(store, tenure.writer, settings.keep)
        ruled = settings.keep.best is not None or (tenure.is_first and bool(store.rules()))
        if tenure.is_first and not ruled and tenure.writer.parent is None:
            say = partial(strategies.say, store.url)
            self._unbounded = self._unbounded or Unbounded(say, strategy, settings.every, settings.full_every)
        kind = ReplicaSaving if strategy == "replica" else Saving
        tenure.saving = kind(
            store, tenure.writer, self._captured, self._taken, strategy, settings, tenure.ranks, tenure.retention
        )

    def _heard(self, metrics: SaveMetrics) -> None:
        self._on_metrics(metrics)
        if self._unbounded is not None:
            self._unbounded.told(metrics)

    def _told(self, strategy: strategies.Strategy, group: Group | None) -> dict[str, Any]:
        """The options of the writer."""
        settings = self._settings
        told = strategies.writer_options(strategy, settings.full_every, settings.batch, settings.deltas, settings.every)
        told |= {"max_in_flight": settings.max_in_flight, "threads": settings.threads}
        told |= {"on_metrics": self._heard, "keep": settings.keep.store_rules}
        if group is not None:
            told["group"] = group
            told["ranks"] = RankOptions(timeout=settings.rank_timeout, per_rank=self._captured.per_rank)
        if settings.compact is not None:
            told["compact"] = settings.compact
        return told

    def _chosen(self, group: Group | None) -> strategies.Strategy:
        """The strategy; what ``auto`` takes is said in one line."""
        captured, settings = self._captured, self._settings
        if settings.strategy != "auto":
            return cast(strategies.Strategy, settings.strategy)
        self._store.create()
        strategy, self.why = strategies.chosen(
            strategies.Circumstances(
                nbytes=strategies.state_bytes(captured.models, captured.optimizers) + captured.extra_bytes,
                rate=None if group is not None else strategies.measured_rate(self._store.backend),
                spare=strategies.spare_cores(captured.models),
                unpredicted=strategies.predicted(captured.optimizers, settings.every),
            )
        )
        if group is None or group.rank == 0:
            strategies.tell(self._store.url, strategy, self.why)
        return strategy
