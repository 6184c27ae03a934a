"""Keeps what an agent owns: the writer with its term, the buffers, the newest state. It knows nothing of messages."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckptstore.agent.protocol.message_fields import read
from ckptstore.agent.protocol.state_hash import hash_of
from ckptstore.agent.protocol.update_fields import read_updates
from ckptstore.agent.server.agent_snapshot import (
    AgentSnapshot,
    FilledBuffer,
    UnprovenState,
    UnwrittenState,
    state_in_buffer,
)
from ckptstore.agent.server.shared_buffers import SharedBuffers
from ckptstore.agent.server.shutdown_wait import ShutdownWait
from ckptstore.errors import CkptError
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.store import Store
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.local_writer import LocalWriter
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.steps.updates import Update
from ckptstore.write.writer import Writer

__all__ = ["LocalKeeper", "SnapshotKeeper"]


class SnapshotKeeper(ABC):
    """What an agent owns, whatever its writer is: that of one process, or of one rank of many.

    Attributes:
        pool: the buffers.
        run: the store's run.
        newest: the newest state that the trainer has handed over, or that was computed and proven; None: none yet.
        workers: threads that copy and hash.
        lost: a text that names a state that was only in memory and was not written, and why; None: there is none.
        shutdown_wait: how long it waits for other ranks' agents once its trainer gives no more states.
    """

    def __init__(self, store: Store, writer: Writer, max_in_flight: int, shutdown_wait: ShutdownWait) -> None:
        self._writer = writer
        self.shutdown_wait = shutdown_wait
        self.pool = SharedBuffers(max_in_flight)
        self.newest: AgentSnapshot | None = None
        self.lost: str | None = None
        self._before: AgentSnapshot | None = None  # the state before the newest, if two are kept
        self._unproven: tuple[UnprovenState, Callable[[], None]] | None = None  # newer than the newest
        self._keeps_two = False
        self.run = store.run
        self._store = store
        self._pending: dict[int, PendingSave] = {}
        self._latest = writer.parent
        self.workers = started_pool(default_threads(), "ckptstore-agent")
        self._written = -1  # the newest step that the writer was given
        self._lock = threading.Lock()

    @abstractmethod
    def _adopt(
        self,
        snapshot: Snapshot,
        step: int,
        metadata: Mapping[str, Any] | None,
        tags: Sequence[str],
        updates: Sequence[Update],
        gradients: Snapshot | None = None,
    ) -> PendingSave:
        """Have the writer save a state in a buffer.

        Args:
            updates: what the optimizers did; they refer to the memory of `gradients`.
        """

    @abstractmethod
    def _drain(self) -> None:
        """Return when the writer has every state that `_adopt` was given."""

    # -- the writer

    @property
    def term(self) -> int:
        """The number of the term."""
        return self._writer.term

    def wait(self) -> None:
        """See `Writer.wait`."""
        self._drain()
        self._writer.wait()

    def poll(self) -> None:
        """See `Writer.poll`."""
        self._writer.poll()

    def tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `Writer.tag`."""
        self._drain()
        return self._writer.tag(name, ref)

    def untag(self, name: str) -> None:
        """See `Writer.untag`."""
        self._drain()
        self._writer.untag(name)

    def rollback(self, ref: str) -> CheckpointInfo:
        """See `Writer.rollback`. The newest state belongs to the abandoned branch, and is dropped."""
        self._drain()
        parent = self._writer.rollback(ref)
        self._keep(None)
        with self._lock:
            self._latest = parent
        return parent

    # -- saving

    def save(self, filled: FilledBuffer, step: int, told: Callable[[PendingSave], None]) -> None:
        """Start to write a filled buffer; it is the newest state from now on.

        Args:
            told: called with the save once it is durable or has failed; by any thread.

        Raises:
            AgentError: the description of the buffer is invalid.
            and what the writer raises. The buffer is free again then.
        """
        buffer = self.pool.lent(filled.buffer)
        beside = None if filled.gradients is None else self.pool.lent(filled.gradients)
        frees = [self.pool.hold(one) for one in (buffer, beside) if one is not None]
        for one in (buffer, beside):
            if one is not None:
                self.pool.take_back(one)
        try:
            flat = state_in_buffer(filled, buffer)
            memory = np.empty(0, np.uint8) if beside is None else beside.shared.memory
            updates: list[Update] = []
            if filled.updates is not None:
                updates = read("updates", filled.updates, lambda form: read_updates(form, filled.layout, memory))
            snapshot = Snapshot(flat, lambda: self.pool.landed(buffer), frees[0])
            gradients = None if beside is None else Snapshot(LaidOutState(None, {}, ()), lambda: None, frees[1])
            keep = self.pool.hold(buffer)
            frees.append(keep)
            pending = self._adopt(snapshot, step, filled.metadata, filled.tags, updates, gradients)
        except BaseException:
            self.pool.landed(buffer)
            for free in frees:
                free()
            raise
        self._keep(AgentSnapshot(step, filled.layout, buffer, flat, pending, keep))
        self._watch(pending, told)

    def _watch(self, pending: PendingSave, told: Callable[[PendingSave], None]) -> None:
        step = pending.step
        self._pending[step] = pending
        self._written = step

        def done(_: bool) -> None:
            self._pending.pop(step, None)
            if pending.exception() is None:  # asking marks the failure as seen
                self._committed(pending.result())
            told(pending)

        pending.when_done(done)

    def hold(self, filled: FilledBuffer, step: int) -> None:
        """Keep a filled buffer as the newest state, only in memory until `persist`.

        Raises:
            AgentError: the description of the buffer is invalid. The buffer is free again then.
        """
        self.replicates()
        buffer = self.pool.lent(filled.buffer)
        try:
            flat = state_in_buffer(filled, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        self.keep(UnwrittenState(step, filled, buffer, flat, ()))
        self.pool.landed(buffer)

    def keep(self, made: UnwrittenState) -> None:
        """Keep a computed state as the newest, only in memory until `persist`."""
        free = self.pool.hold(made.buffer)
        self.pool.take_back(made.buffer)
        self._keep(AgentSnapshot(made.step, made.filled.layout, made.buffer, made.flat, None, free, made))

    def keep_unproven(self, made: UnprovenState) -> None:
        """Keep a state that is not proven, until the next state: only to compute that from it."""
        free = self.pool.hold(made.buffer)
        self.pool.take_back(made.buffer)
        self._drop_unproven()
        self._unproven = made, free

    def _drop_unproven(self) -> None:
        found, self._unproven = self._unproven, None
        if found is not None:
            found[1]()

    def base(self, step: int) -> AgentSnapshot | UnprovenState | None:
        """The state of a step, from which the next one is computed. None: it is not the last one."""
        last = self.newest if self._unproven is None else self._unproven[0]
        return last if last is not None and last.step == step else None

    def persist(
        self, told: Callable[[PendingSave], None], labels: tuple[Mapping[str, Any] | None, Sequence[str]] | None = None
    ) -> None:
        """Start to write the newest state, if it is only in memory.

        Args:
            told: as for `save`.
            labels: metadata and tags; None: those that came with the step.

        Raises:
            what the writer raises.
        """
        newest = self.newest
        if newest is None or newest.unwritten is None:
            return
        earlier = newest.pending
        if earlier is not None and not (earlier.done() and earlier.exception() is not None):
            earlier.when_done(lambda _: told(earlier))
            return
        made = newest.unwritten
        metadata, tags = (made.filled.metadata, made.filled.tags) if labels is None else labels
        free = self.pool.hold(newest.buffer)
        updates = made.updates if self._written == made.step - 1 else ()
        try:
            snapshot = Snapshot(newest.flat, lambda: None, free)
            pending = self._adopt(snapshot, made.step, metadata, tags, updates)
        except BaseException:
            free()
            raise
        with self._lock:
            self.newest = replace(newest, pending=pending)
        self._watch(pending, told)

    @abstractmethod
    def forgo(self, step: int, why: BaseException) -> None:
        """This agent has no state of a step that was to be written. Other ranks need not wait for it."""

    @abstractmethod
    def replicates(self) -> None:
        """From now on the trainer gives states that are only in memory."""

    def _keep(self, newest: AgentSnapshot | None) -> None:
        self._drop_unproven()
        with self._lock:
            gone = [self._before]
            before, self.newest = self.newest, newest
            if self._keeps_two and newest is not None:
                self._before = before
            else:
                self._before = None
                gone.append(before)
        for one in gone:
            if one is not None:
                one.free()

    def _committed(self, info: CheckpointInfo) -> None:
        with self._lock:
            latest = self._latest
            if latest is None or (info.term, info.step) > (latest.term, latest.step):
                self._latest = info

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of this term, or the term's parent."""
        return self._latest

    def pending(self, step: int) -> PendingSave | None:
        """The pending save of a step; None: there is none."""
        return self._pending.get(step)

    # -- between two trainers

    def settle(self) -> None:
        """The trainer is gone: drop buffers that it was filling, and write what is pending. Raises nothing."""
        self.pool.recall()
        self._drop_unproven()
        self.persist_quietly()
        with contextlib.suppress(CkptError):  # no trainer hears it: `AgentSnapshot.durable` says it
            self.wait()

    def persist_quietly(self) -> None:
        """As `persist`, without a report of the result."""
        if self.newest is not None and self.newest.unwritten is not None:
            with contextlib.suppress(CkptError):
                self.persist(lambda _: None)

    def stale(self) -> str:
        """Why a successor must not continue with this agent; empty: it may."""
        try:
            catalog = self._store.view().catalog
        except CkptError as error:
            return f"the store cannot be read: {error}"
        if catalog.term != self.term:
            return f"term {catalog.term} was opened after term {self.term}"
        return ""

    def hash_of(self, kept: AgentSnapshot) -> str:
        """The hash of the newest state: that of its checkpoint, or else of its memory."""
        info = kept.durable
        if info is not None and not info.lossy and info.step == kept.step:
            return info.state
        return hash_of(kept.flat, self.workers)

    # -- the end

    def close(self, held_up: Callable[[], None] = lambda: None) -> None:
        """Write what is pending, and close the writer. Raises what `Writer.close` raises.

        Args:
            held_up: called once if other ranks' agents take so long that the trainer should not wait for them.
        """
        del held_up
        try:
            self._writer.close()
        finally:
            self._release()

    def _release(self) -> None:
        self._keep(None)
        self.workers.shutdown()
        self.pool.close()

    @abstractmethod
    def leave(self, *, farewell: bool) -> None:
        """Disconnect from the other ranks' agents, after `close`.

        Args:
            farewell: the trainer has closed its writer. False: the other agents end, too.
        """


class LocalKeeper(SnapshotKeeper):
    """What the agent of a single trainer owns."""

    def __init__(self, store: Store, writer: LocalWriter, max_in_flight: int) -> None:
        super().__init__(store, writer, max_in_flight, ShutdownWait(0.0, 0.0))
        self._local = writer

    def _adopt(
        self,
        snapshot: Snapshot,
        step: int,
        metadata: Mapping[str, Any] | None,
        tags: Sequence[str],
        updates: Sequence[Update],
        gradients: Snapshot | None = None,
    ) -> PendingSave:
        """See `LocalWriter.adopt`."""
        return self._local.adopt(snapshot, step, metadata=metadata, tags=tags, updates=updates, gradients=gradients)

    def _drain(self) -> None:
        """Nothing to do: `_adopt` gives each state to the writer."""

    def forgo(self, step: int, why: BaseException) -> None:
        """Nothing to do: there are no other ranks."""

    def replicates(self) -> None:
        """Nothing to do: one state is enough."""

    def leave(self, *, farewell: bool) -> None:
        """Nothing to do: there are no other agents."""
