"""Keeps the states of one rank of many. When the trainers end, the agents agree on the last step to write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.agent.protocol.state_hash import hash_of
from ckptstore.agent.server.agent_snapshot import ALONE, AgentSnapshot
from ckptstore.agent.server.rank_saves import RankSaves
from ckptstore.agent.server.snapshot_keeper import SnapshotKeeper
from ckptstore.errors import CkptError
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.steps.updates import Update

__all__ = ["RankKeeper"]


class RankKeeper(SnapshotKeeper):
    """What the agent of one rank of many owns."""

    def __init__(self, store: Store, saves: RankSaves, max_in_flight: int) -> None:
        super().__init__(store, saves.writer, max_in_flight, saves.shutdown_wait)
        self._saves = saves
        self._agreed_on_last = False

    def _adopt(
        self,
        snapshot: Snapshot,
        step: int,
        metadata: Mapping[str, Any] | None,
        tags: Sequence[str],
        updates: Sequence[Update],
        gradients: Snapshot | None = None,
    ) -> PendingSave:
        """See `RankSaves.adopt`."""
        return self._saves.adopt(snapshot, step, metadata=metadata, tags=tags, updates=updates, gradients=gradients)

    def _drain(self) -> None:
        """See `SnapshotKeeper._drain`. A thread of `RankSaves` gives states to the writer."""
        self._saves.drain()

    def rollback(self, ref: str) -> CheckpointInfo:
        """See `SnapshotKeeper.rollback`."""
        parent = super().rollback(ref)
        self._saves.last = parent.step
        return parent

    def forgo(self, step: int, why: BaseException) -> None:
        """See `SnapshotKeeper.forgo`."""
        self._saves.forgo(step, why)

    def replicates(self) -> None:
        """See `SnapshotKeeper.replicates`. Two states are kept: another rank may be a step behind when it ends."""
        self._keeps_two = True

    def persist_quietly(self) -> None:
        """Does nothing: the ranks write the same steps, and agree on them in `settle` and `close`."""

    def hash_of(self, kept: AgentSnapshot) -> str:
        """The hash of this rank's state in memory: the checkpoint's hash covers the states of all ranks."""
        return hash_of(kept.flat, self.workers)

    def settle(self) -> None:
        """See `SnapshotKeeper.settle`."""
        self.pool.recall()
        self._drop_unproven()
        self._agree_on_last(lambda: None)

    def _agree_on_last(self, held_up: Callable[[], None]) -> None:
        """The trainer gives no more states: agree with the other agents on the newest step that all of them have.

        Keep that state. If it is only in memory, all agents write it.

        Args:
            held_up: see `RankSaves.agreed`.
        """
        self._saves.conclude()
        with contextlib.suppress(CkptError):  # no trainer hears it: `AgentSnapshot.durable` says it
            self.wait()
        if self._agreed_on_last:
            return
        self._agreed_on_last = True
        held = {one.step: one for one in (self._before, self.newest) if one is not None}
        for one in held.values():
            if one.pending is not None:
                one.pending.exception()  # wait until it has ended, either way
        newest = self.newest
        waits = self._keeps_two and newest is not None and newest.durable is None  # durable: all ranks had given it
        durability = {step: one.durability for step, one in held.items()}
        try:
            agreed = self._saves.agreed(durability, waits=waits, held_up=held_up)
            why = "no step is on all ranks"
        except CkptError as error:
            agreed, why = None, str(error)
        if agreed is not None:
            self._go_back_to(held[agreed[0]])
            if agreed[1]:
                self._write_alone()
        elif waits and newest is not None and newest.durability == ALONE:
            self.lost = f"step {newest.step} was only in memory, and is not written: {why}"

    def _go_back_to(self, kept: AgentSnapshot) -> None:
        """Keep one of two states. The newer one is missing on another rank, and stays so."""
        newest = self.newest
        if newest is not None and newest is not kept:
            with self._lock:
                self.newest, self._before = kept, None
            newest.free()

    def _write_alone(self) -> None:
        """Write the newest state, as all ranks do now."""
        with contextlib.suppress(CkptError):
            self.persist(lambda _: None)
            self.wait()
        newest = self.newest
        if newest is not None and newest.durable is None:
            why = None if newest.pending is None else newest.pending.exception()
            self.lost = f"step {newest.step} was only in memory, and could not be written: {why}"

    def close(self, held_up: Callable[[], None] = lambda: None) -> None:
        """See `SnapshotKeeper.close`. First all ranks write the newest state that is only in memory, if all have it."""
        try:
            self._agree_on_last(held_up)
            self._saves.close()
        finally:
            self._release()

    def leave(self, *, farewell: bool) -> None:
        """See `SnapshotKeeper.leave`."""
        self._saves.leave(farewell=farewell)
