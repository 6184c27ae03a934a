"""The saves of an open term: passes a step's state to the writer, and handles the death of an agent.

The writer works in this process (`Writer`, `RankWriter`) or in an agent (`ckptstore.agent`). If an agent dies, the
saves that it had not made durable may or may not be in the store. Training continues: another agent saves the next
step, and its term begins with a full. `wait` saves the last step again. If each of many ranks has an agent, all agents
end with the one that died, and saving ends, too: no rank knows the others' steps, so all have to begin again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final

import torch

from ckptstore.errors import AgentLostError, UnmadeStateError, UsageError
from ckptstore.formats.step_text import named_steps
from ckptstore.host.caller_warnings import warn
from ckptstore.store import Store
from ckptstore.training.capture.planned_saves import PlannedSaves, SaveLabels, plannable
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.training.optimizers.optimizer_tracker import CollectedSteps, OptimizerTracker
from ckptstore.training.retention import Retention
from ckptstore.training.save_pace import SavePace
from ckptstore.training.settings import SaveSettings, UnsavedStepWarning
from ckptstore.training.strategies import Strategy
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_writer_factory import to_group
from ckptstore.write.saves.ledger import PendingSave, check_owner
from ckptstore.write.saves.lost_steps import first_of
from ckptstore.write.writer import Writer

__all__ = ["StateSaves", "ranks_of"]

_UNMADE: Final = (CancelledError, UnmadeStateError)
"""Errors of a save whose state this rank's agent, or that of another rank, could not make."""


class StateSaves:
    """The saves of one term. The script's thread calls it.

    Attributes:
        follows: whether steps that are not due are offered, too.
        given_again: errors after which the last step is saved once more.
    """

    follows = False
    given_again: tuple[type[BaseException], ...] = (AgentLostError,)

    def __init__(
        self,
        store: Store,
        writer: Writer,
        captured: ScriptState,
        tracker: OptimizerTracker,
        strategy: Strategy,
        settings: SaveSettings,
        ranks: int,
        retention: Retention | None,
    ) -> None:
        """
        Args:
            ranks: how many ranks save together.
            retention: starts its rounds when a save is durable; None: another rank does that.
        """
        self._store = store
        self._writer = writer
        self._captured = captured
        self._tracker = tracker
        self._coded = strategy == "gradient"
        self._strategy = strategy
        self._ranks = ranks
        self._retention = retention
        self._under_way: list[PendingSave] = []
        self._last: tuple[int, Mapping[str, Any] | None, str | Sequence[str]] | None = None
        self._process = os.getpid()
        self._forgiven: tuple[type[AgentLostError], ...] = (AgentLostError,)
        self._ranked = getattr(writer, "rank", None) is not None
        if self._ranked:  # no other agent replaces one of many
            self._forgiven = self.given_again = ()
        self._planned: PlannedSaves | None = None
        if plannable(writer) and not captured.sharding:
            kept = int(strategy != "full")
            self._planned = PlannedSaves(captured, writer, settings.max_in_flight, predict=self._coded, kept=kept)
        self._set_up(writer, settings)

    def _set_up(self, writer: Writer, settings: SaveSettings) -> None:
        """Set up what a subclass needs.

        Raises:
            UsageError: the writer cannot do it.
        """

    def offer(
        self, step: int, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], *, due: bool, forced: bool
    ) -> PendingSave | None:
        """Save a finished step if it is due or forced -> its save; None: it is not saved.

        Args:
            due: the step should be saved.
            forced: it must be saved, even if training has to wait.

        Raises:
            as `save`.
        """
        return self.save(step, metrics, tags) if due or forced else None

    def passed(self, step: int) -> None:
        """A step is not saved. Meanwhile prepare what the first save needs, as far as it is known."""
        if self._planned is not None:
            self._planned.foresee(step, self._ranks)

    def slowed_by(self, pace: SavePace) -> str | None:
        """What to say, once, if saves slow training down; None: nothing."""
        return pace.slow_saves(self._store.url, self._strategy, bucket=self._store.backend.costs is not None)

    def restored(self) -> None:
        """The script's state was replaced, as by a rollback."""

    def save(self, step: int, metrics: Mapping[str, Any] | None, tags: str | Sequence[str]) -> PendingSave:
        """Pass the current state to the writer. Raises what `Writer.save_async` does."""
        self._check_process()
        labels = SaveLabels({"metrics": dict(metrics)} if metrics else None, tags)
        collected = self._tracker.collected()
        if self._last is None:
            collected.why = None  # the first checkpoint of a term is a full: nothing has to explain it
        try:
            try:
                pending = self._given(step, labels, collected)
            except self._forgiven as error:  # of an earlier save; the retry finds out whether another agent starts
                self._hear_of_agent(error)
                pending = self._given(step, labels, collected)
        except BaseException:
            self._tracker.put_back(collected)
            raise
        self._last = (step, metrics, tags)
        self._under_way.append(pending)
        if self._retention is not None:
            pending.when_done(self._retention.durable)
        return pending

    def _given(self, step: int, labels: SaveLabels, collected: CollectedSteps) -> PendingSave:
        if self._planned is not None:
            pending = self._planned.save(step, self._ranks, collected, labels)
            if pending is not None:
                return pending
        state = self._captured.state(step, self._ranks)
        updates = collected.updates if self._coded else None
        return self._writer.save_async(state, step, metadata=labels.metadata, tags=labels.tags, updates=updates)

    def _check_process(self) -> None:
        """Refuse to save in a fork, before anything is copied: it has neither the threads nor its own memory."""
        check_owner(self._process, self._writer.term)

    def settle(self, again: int | None = None) -> list[tuple[int, BaseException]]:
        """Collect the saves that have ended -> the steps of those that failed, each once, and their errors.

        Steps that died with an agent, or that it could not make, are not returned: a warning names them.

        Args:
            again: a step that will be saved once more; no warning names it.
        """
        ended = [one for one in self._under_way if one.done()]
        self._under_way = [one for one in self._under_way if not one.done()]
        failures = [(one.step, error) for one in ended if (error := one.exception()) is not None]
        self._remark_lost([one for one in failures if isinstance(one[1], self._forgiven)])
        dropped = [step for step, error in failures if isinstance(error, _UNMADE) and error.args]
        if dropped := [step for step in dropped if step != again]:
            steps = ", ".join(map(str, dropped))
            warn(
                f"{self._store.url}: not saved, because the agent could not make their states: {steps}",
                UnsavedStepWarning,
            )
        return [one for one in failures if not isinstance(one[1], (*self._forgiven, *_UNMADE))]

    def wait(self) -> None:
        """Wait until all saves are durable. If an agent died with the last step, save that again."""
        try:
            self._writer.wait()
        except self._forgiven as error:
            self._hear_of_agent(error)
        except UnmadeStateError:
            pass  # `settle` names the step
        last = self._under_way[-1] if self._under_way else None
        lost = last is not None and isinstance(last.exception(), self.given_again)
        # Prevents: a step that is lost silently, because it cannot be saved again once the state is the next one's.
        again = lost and not self._tracker.any
        if failures := self.settle(last.step if again and last is not None else None):
            raise first_of(failures)
        if lost:
            self._again()

    def ended(self) -> None:
        """There are no more steps: wait until all saves are durable."""
        self.wait()

    def durable(self, pending: PendingSave) -> PendingSave:
        """Wait until the save of the last step is durable -> that save, or the one that replaced it."""
        try:
            pending.result()
        except self._forgiven:
            self.wait()
            return self._under_way[-1] if self._under_way else pending
        return pending

    def _again(self) -> None:
        """Save the last step once more, unless it is in the store or the state has changed since."""
        newest = self._store.latest_step()
        if self._last is None or self._tracker.any or (newest is not None and newest >= self._last[0]):
            return
        self.save(*self._last)
        try:
            self._writer.wait()
        except self._forgiven as error:  # of an earlier save, reported late by the receiving thread
            self._hear_of_agent(error)
            self._writer.wait()

    def _hear_of_agent(self, error: AgentLostError) -> None:
        """A call reports that an agent has died: warn of the steps that it had, or else only of its death."""
        known = [one for one in self._under_way if one.done() and isinstance(one.exception(), self._forgiven)]
        if not known:
            self._remark_lost([(None, error)])

    def _remark_lost(self, lost: Sequence[tuple[int | None, BaseException]]) -> None:
        """Warn of an agent's death, once, with every step that was lost with it."""
        if not lost:
            return
        (first, error), *others = lost
        more = [step for step, _ in others if step is not None and step != first]
        also = f"; likewise {named_steps(more)}" if more else ""
        text = f"{error}{also}; training continues, and another agent saves the next step"
        warn(f"{self._store.url}: {text}", UnsavedStepWarning)

    def close(self) -> None:
        """Release memory and threads. Call it when the writer is closed."""
        if self._planned is not None:
            self._planned.close()


def ranks_of(group: Any, sharding: str = "") -> Group | None:
    """The ranks that save together; None: this process alone.

    Args:
        sharding: how DTensor parameters are sharded; empty: there are none.

    Raises:
        UsageError: `group` is not a process group, or this process is not in it; one process alone cannot save shards.
    """
    distributed = torch.distributed
    if isinstance(group, str) and group == "all":
        # Also a group of one rank if parameters are DTensors: a writer without ranks does not take them.
        fewest = 1 if sharding else 2
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        return to_group(distributed.group.WORLD) if distributed.get_world_size() >= fewest else None
    if group is None and sharding:
        raise UsageError("group=None: parameters are DTensors (FSDP2), of which each rank has a shard: all ranks save")
    return None if group is None else to_group(group)
