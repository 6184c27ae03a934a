"""Saves of strategy ``replica``: the trainer sends its gradients, and the agent repeats the optimizers' steps.

The first state of a form is sent whole. After that a step costs a copy of the gradients (with a `TopKHook`, of the
entries that are left, as LowDiff's), a copy of what no optimizer moves (buffers, generators, averages), and a digest of
what the agent computes. The digest is taken in every step: only a proven state may be written or passed to a successor,
and the next state is computed from it. Tensors that the agent computed wrongly are sent whole with the next step, and
the others stay. After any other error the next state is sent whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptstore.agent.client.agent_writer import AgentWriter
from ckptstore.agent.client.replica_client import ReplicaClient
from ckptstore.agent.client.replica_client import ReplicaStep as Told
from ckptstore.errors import AgentError, AgentLostError, UnmadeStateError, UsageError
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.training.capture.capture_plan import StatePlan
from ckptstore.training.replica.arithmetic_probe import Probed, Probes, UnknownArithmeticError
from ckptstore.training.replica.consumed_gradients import ConsumedGradients, ConsumedStep
from ckptstore.training.replica.replica_form import FilledStep, ReplicaForm
from ckptstore.training.replica.replicable_state import Replicable
from ckptstore.training.replica.unproven_tensors import UnprovenTensors
from ckptstore.training.settings import SaveSettings
from ckptstore.training.state_saves import StateSaves
from ckptstore.write.saves.ledger import Labels, PendingSave
from ckptstore.write.writer import Writer

__all__ = ["ReplicaSaves"]

_LOG: Final = logging.getLogger("ckptstore.training")
_PLANS: Final = 4
"""Consecutive plans that did not hold for a step. After that the state is flattened in every step."""


class ReplicaSaves(StateSaves):
    """As `StateSaves`, for states that an agent computes.

    Ranks that save together have an agent each, which computes the whole state, because their optimizers consume the
    same gradients. The agents do not know one another, so what is written may depend only on what all of them receive:
    every step that is due is written, whatever the medium's pace, and no other.
    """

    follows = True
    given_again: tuple[type[BaseException], ...] = (AgentLostError, CancelledError)

    def _set_up(self, writer: Writer, settings: SaveSettings) -> None:
        """See `StateSaves._set_up`."""
        if not isinstance(writer, AgentWriter):
            raise UsageError("strategy='replica': an agent keeps the replica; give agent=True")
        self._agent: AgentWriter = writer
        if self._ranked:
            self.given_again = (CancelledError, UnmadeStateError)
        writer.prepare_replica()
        self._limit = settings.max_in_flight
        self._pool = started_pool(default_threads(), "ckptstore-replica")
        # Of ranks gradients are final when they were averaged, which a parameter's hook does not see.
        early = not self._captured.scaled and not self._ranked
        self._consumed = ConsumedGradients(
            self._captured.optimizers,
            self._pool,
            settings.compressor,
            register=writer.register,
            early=early,
            counted=self._ranked,
        )
        self._probes = Probes()
        self._unlike = False  # a device's arithmetic is not one that the agent computes: states are sent whole
        self._replicated: ReplicaClient | None = None
        self._form: ReplicaForm | None = None
        self._plan: StatePlan | None = None
        self._plans_left = 0 if self._captured.sharding else _PLANS
        self._at: int | None = None  # the newest step that the agent has or will have
        self._held: FlatState | None = None  # that step, flattened, while it is only in memory
        self._given_save: PendingSave | None = None  # the newest step's save, once it has begun
        self._owed = False  # it is only in memory
        self._unproven = UnprovenTensors()
        self._remarked = False

    def offer(
        self, step: int, metrics: Mapping[str, Any] | None, tags: str | Sequence[str], *, due: bool, forced: bool
    ) -> PendingSave | None:
        """See `StateSaves.offer`. None also if the medium is too slow for a step: only the agent's memory has it."""
        self._check_process()
        if self._unlike and not (due or forced):
            return None
        began = time.monotonic()
        persist = forced or (due and (self._has_place() or self._unlike))
        try:
            said = _BothLabels.of(metrics, tags)
            self._last = (step, metrics, tags)
            self._owed = True  # until its save has begun
            try:
                pending = self._offered(step, said, began, persist=persist, forced=forced)
            except self._forgiven as error:  # with an earlier save
                self._hear_of_agent(error)
                self._at = None
                pending = self._offered(step, said, began, persist=persist, forced=forced)
        except BaseException:
            self._missed()
            raise
        if pending is None:
            return None
        self._owed = False
        if pending is not self._given_save:
            self._given_save = pending
            if self._retention is not None:
                pending.when_done(self._retention.durable)
        if pending not in self._under_way:
            self._under_way.append(pending)
        return pending

    def _has_place(self) -> bool:
        """Whether a due step is written now. Ranks wait until it can be."""
        under_way = [one for one in self._under_way if not one.done()]
        if not self._ranked:
            return len(under_way) < self._limit
        for one in under_way[: max(0, len(under_way) - self._limit + 1)]:
            one.exception()  # `settle` reports it
        return True

    def save(self, step: int, metrics: Mapping[str, Any] | None, tags: str | Sequence[str]) -> PendingSave:
        """See `StateSaves.save`."""
        pending = self.offer(step, metrics, tags, due=True, forced=True)
        assert pending is not None  # it was forced
        return pending

    def settle(self, again: int | None = None) -> list[tuple[int, BaseException]]:
        """See `StateSaves.settle`. After a failed save the next step is sent whole."""
        try:
            lost = super().settle(again)
        except BaseException:  # a warning that is an error
            self._missed()
            raise
        if lost:
            self._missed()
        return lost

    def _missed(self) -> None:
        """A step has not reached the agent, and its gradients are lost: the next step is sent whole."""
        self._at = self._held = None
        self._consumed.dropped()

    def restored(self) -> None:
        """See `StateSaves.restored`."""
        self._missed()
        self._owed = False

    def wait(self) -> None:
        """See `StateSaves.wait`. If the newest step is only in memory, it is written now."""
        if self._owed and self._last is not None and not self._tracker.any and not self._ended_with(self._last[0]):
            self.save(*self._last)
        super().wait()

    def ended(self) -> None:
        """See `StateSaves.ended`.

        Ranks may end after different steps, for example if one of them failed. Their agents write the newest step that
        all of them have in memory (`agent.server.snapshot_keeper`).
        """
        if self._ranked:
            super().wait()
        else:
            self.wait()

    def _ended_with(self, step: int) -> bool:
        """Whether the agent has ended and written the step: it must not be saved once more."""
        if self._replicated is None or self._replicated.alive:
            return False
        newest = self._store.latest_step()
        return newest is not None and newest >= step

    def durable(self, pending: PendingSave) -> PendingSave:
        """See `StateSaves.durable`."""
        try:
            return super().durable(pending)
        except (CancelledError, UnmadeStateError):  # an agent could not make it
            self.wait()
            return self._under_way[-1] if self._under_way else pending

    def _again(self) -> None:
        """See `StateSaves._again`. All ranks send it whole, also those whose agents had computed it."""
        self._missed()
        super()._again()

    def close(self) -> None:
        """See `StateSaves.close`."""
        self._consumed.detach()
        self._replicated = self._form = None
        super().close()
        self._pool.shutdown()

    # -- one step

    def _offered(
        self, step: int, said: _BothLabels, began: float, *, persist: bool, forced: bool
    ) -> PendingSave | None:
        self._tracker.collected()
        self._note_wrong()
        replicated = self._replicated
        follows = replicated is not None and replicated.alive and replicated.lost is None and self._at is not None
        if follows and step == self._at and not (persist and self._unproven.lacks(step)):
            assert replicated is not None
            return self._persisted(replicated, step, said.labels, began) if persist else None
        flat = self._flat(step)
        consumed = self._consumed.taken()
        # A step that has to be written is sent whole: if the agent computed it wrongly, that would be known only after
        # the next step, and the step would be lost.
        if (
            not forced
            and follows
            and step != self._at
            and self._form is not None
            and consumed.why is None
            and self._form.fits(flat, self._plan)
        ):
            assert replicated is not None
            consumed.area = consumed.area or replicated.area(wait=True)
            filled = self._filled(replicated, consumed, flat)
            if filled is not None:
                return self._advanced(replicated, step, flat, (consumed, filled, said.labels, persist, began))
        self._leave(replicated, consumed)
        if consumed.why is not None and follows:
            self._remark(f"{consumed.why}: such a step is handed over as a whole state, as without strategy='replica'")
        return self._whole(step, flat, said, persist=persist or not self._ranked)

    def _persisted(self, replicated: ReplicaClient, step: int, labels: Labels, began: float) -> PendingSave | None:
        held, self._held = self._held, None
        if held is None:
            # Prevents: an error at the end of a run, because its last step is being written already.
            return self._given_save
        return replicated.persist(held, step, labels, began)

    def _advanced(
        self,
        replicated: ReplicaClient,
        step: int,
        flat: FlatState,
        what: tuple[ConsumedStep, FilledStep, Labels, bool, float],
    ) -> PendingSave | None:
        """Send what the agent cannot compute, and the digests that prove the rest."""
        consumed, filled, labels, persist, began = what
        assert consumed.area is not None
        assert self._form is not None
        assert self._at is not None
        threads = torch.get_num_threads()
        filling = filled.whole, filled.arrive
        told = Told(step, self._at, consumed.calls, threads, flat, labels, persist, began, *filling)
        try:
            pending = replicated.advance(consumed.area, told)
        except BaseException:
            filled.drop()
            self._leave(replicated, consumed)
            raise
        for one in filled.whole:
            self._unproven.sent(one.starts, step)
        self._at = step
        self._held = None if persist else flat
        if self._form.refused != self._unproven.refused:
            self._begun(flat, self._unproven.refused)  # from the next step on these tensors are always sent
        return pending

    def _filled(self, replicated: ReplicaClient, consumed: ConsumedStep, flat: FlatState) -> FilledStep | None:
        """Fill the area of a step, or queue the copies of devices. None: the state has to be sent whole."""
        area, form = consumed.area, self._form
        if area is None or replicated.lost is not None:
            return None
        assert form is not None
        filled = FilledStep([*consumed.arriving, *consumed.late], [])
        try:
            if due := self._unproven.due(replicated.recipe):
                form.whole(due, flat, filled, self._agent, self._pool)
            form.fill(area, flat, filled, self._agent, self._pool)
        except (AgentError, MemoryError) as error:
            filled.drop()
            _LOG.debug("a state is handed over whole: %s", error)
            return None
        except BaseException:
            filled.drop()
            self._leave(replicated, consumed)
            raise
        return filled

    def _leave(self, replicated: ReplicaClient | None, consumed: ConsumedStep) -> None:
        """Return the area of a step that is not sent."""
        if replicated is not None:
            consumed.left(replicated)

    def _whole(self, step: int, flat: FlatState, said: _BothLabels, *, persist: bool) -> PendingSave | None:
        """Send a whole state, from which the agent computes the next ones."""
        self._at = self._held = None
        pending: PendingSave | None = None
        if persist:
            pending = self._writer.save_async(flat, step, metadata=said.metadata, tags=said.tags)
        else:
            self._agent.hold(flat, step, metadata=said.metadata, tags=said.tags)
        form, replicated = self._form, self._replicated
        refused = self._unproven.refused
        self._unproven.forget()
        usable = replicated is not None and replicated.alive
        if not usable or form is None or form.refused != refused or not form.fits(flat, self._plan):
            replicated = self._begun(flat, refused)
        if replicated is not None:
            replicated.again()
            self._at = step
            self._held = None if persist else flat
        return pending

    def _begun(self, flat: FlatState, refused: set[str]) -> ReplicaClient | None:
        """Tell the agent how to compute the next states. None: it cannot; they are sent whole."""
        self._consumed.detach()
        before, self._replicated, self._form = self._replicated, None, None
        if before is not None:
            before.close()
        replicable = Replicable.of(flat, self._captured, refused)
        probed = self._probed(replicable)
        if probed is None:
            return None
        exact = {place: one.variant for place, one in probed.items() if one.exact and one.variant is not None}
        form = ReplicaForm(replicable.with_variants(exact), refused)
        try:
            self._replicated = self._agent.replicate(form.replicable.recipe)
        except (AgentError, MemoryError) as error:
            self._remark(f"no replica can be kept, and every state is handed over whole: {error}")
            return None
        self._form = form
        instead = {place: one.settings for place, one in probed.items()}
        self._consumed.attach(self._replicated, form.replicable, instead)
        _LOG.debug("replica: %s", form)
        return self._replicated

    def _probed(self, form: Replicable) -> dict[tuple[int, int], Probed] | None:
        """How the agent gets the bits of a device, by the positions of optimizer and group. None: it does not."""
        if self._unlike:
            return None
        try:
            return self._probes.of(self._captured.optimizers, form)
        except UnknownArithmeticError as error:
            self._unlike = True
            warn(f"strategy='replica': {error}", UnexplainedStepWarning)
            return None

    def _flat(self, step: int) -> FlatState:
        """The flattened state, by plan if one holds."""
        if self._plan is not None:
            light = self._plan.taken(step, self._ranks)
            if light is not None:
                self._plans_left = _PLANS
                return self._plan.whole(light)
            self._plan = None
        state = self._captured.state(step, self._ranks)
        flat = bridge.flattened(state, sharded=bool(self._captured.sharding))
        if self._plans_left:
            self._plans_left -= 1
            self._plan = StatePlan.made(self._captured, state, flat, step, self._ranks)
        return flat

    def _note_wrong(self) -> None:
        replicated = self._replicated
        if replicated is None:
            return
        names: list[str] = []
        wrong: set[int] = set()
        for one in replicated.mismatches():
            names += self._unproven.heard(one, replicated.recipe)
            wrong.update(number for number, fresh in one.unproven.items() if fresh)
        if names:
            self._consumed.differed(replicated.recipe.rows_of(wrong))
            self._remark(
                f"replica: the agent computed other values than training for {names[0]}"
                f"{f' and {len(names) - 1} others' if len(names) > 1 else ''}, so that step is not saved (weights are "
                "changed outside the optimizer: clamped, averaged, swapped; or a hook changes gradients). Such tensors "
                "are sent whole with the next step, and the agent computes the others. A tensor that differs again is "
                "sent in every step"
            )

    def _remark(self, text: str) -> None:
        if not self._remarked:
            self._remarked = True
            warn(text, UnexplainedStepWarning)


@dataclass(frozen=True, slots=True)
class _BothLabels:
    """Metadata and tags of a checkpoint, as passed and as written."""

    metadata: Mapping[str, Any] | None
    tags: str | Sequence[str]
    labels: Labels

    @classmethod
    def of(cls, metrics: Mapping[str, Any] | None, tags: str | Sequence[str]) -> _BothLabels:
        metadata = {"metrics": dict(metrics)} if metrics else None
        return cls(metadata, tags, Labels.of(metadata, tags))
