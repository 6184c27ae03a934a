"""What an agent keeps: the writer with its term, the buffers, the newest state. It knows nothing of messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ckptstore.agent.changes import read_updates
from ckptstore.agent.digests import hash_of
from ckptstore.agent.forms import read
from ckptstore.agent.kept import ALONE, Filled, Kept, Made, Standing, laid_out
from ckptstore.agent.pool import Pool
from ckptstore.errors import CkptError
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.store import Store
from ckptstore.write.ledger import PendingSave
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.updates import Update

__all__ = ["Adopting", "Keeper", "Ranked"]


class Adopting(Protocol):
    """What a keeper asks of a writer: `Writer`, or a rank's (`ranks.RankSaves`)."""

    @property
    def term(self) -> int: ...  # noqa: D102 - the term's number

    @property
    def parent(self) -> CheckpointInfo | None: ...  # noqa: D102 - what it continues from

    def adopt(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
    ) -> PendingSave:
        """See `Writer.adopt`."""

    def wait(self) -> None:
        """See `Writer.wait`."""

    def poll(self) -> None:
        """See `Writer.poll`."""

    def tag(self, name: str, ref: str) -> CheckpointInfo:
        """See `Writer.tag`."""

    def untag(self, name: str) -> None:
        """See `Writer.untag`."""

    def rollback(self, ref: str) -> CheckpointInfo:
        """See `Writer.rollback`."""

    def close(self) -> None:
        """See `Writer.close`."""


class Ranked(Adopting, Protocol):
    """What it asks of the writer of one rank of many besides: its states are parts of checkpoints."""

    def conclude(self) -> None:
        """See `RankSaves.conclude`."""

    def forgo(self, step: int, why: BaseException) -> None:
        """See `RankSaves.forgo`."""

    def agreed(
        self, held: Mapping[int, Standing], *, waits: bool, held_up: Callable[[], None]
    ) -> tuple[int, bool] | None:
        """See `RankSaves.agreed`."""


class Keeper:
    """The state of an agent.

    Attributes:
        pool: its buffers.
        writer: its writer.
        run: the store's.
        newest: the newest state that a trainer has filled and said so, or that was made and proven; None: none yet.
        workers: threads that copy and hash.
        lost: which state was in memory alone, and is not written, and why; None: there is none such.
    """

    def __init__(self, store: Store, writer: Adopting, max_in_flight: int, ranked: Ranked | None = None) -> None:
        """
        Args:
            ranked: the writer, if it is that of one rank of many.
        """
        self._ranked = ranked
        self.writer = writer
        self.pool = Pool(max_in_flight)
        self.newest: Kept | None = None
        self.lost: str | None = None
        self._before: Kept | None = None  # the state before the newest, where two are kept
        self._keeps_two = False
        self._parted = False
        self.run = store.run
        self._store = store
        self._pending: dict[int, PendingSave] = {}
        self._latest = writer.parent
        self.workers = started_pool(default_threads(), "ckptstore-agent")
        self._written = -1  # the newest step that the writer was given
        self._lock = threading.Lock()

    # -- saving

    def save(self, filled: Filled, step: int, told: Callable[[PendingSave], None]) -> None:
        """Have a buffer that was filled written: it is the newest state from now on.

        Args:
            told: is given the save once it is durable or has failed, by the thread that knows.

        Raises:
            AgentError: what is said of the buffer cannot be.
            and what `Writer.adopt` raises. The buffer is free again then.
        """
        buffer = self.pool.lent(filled.buffer)
        beside = None if filled.gradients is None else self.pool.lent(filled.gradients)
        frees = [self.pool.hold(one) for one in (buffer, beside) if one is not None]
        for one in (buffer, beside):
            if one is not None:
                self.pool.take_back(one)
        try:
            flat = laid_out(filled, buffer)
            memory = np.empty(0, np.uint8) if beside is None else beside.shared.memory
            updates: list[Update] = []
            if filled.updates is not None:
                updates = read("updates", filled.updates, lambda form: read_updates(form, filled.layout, memory))
            snapshot = Snapshot(flat, lambda: self.pool.landed(buffer), frees[0])
            gradients = None if beside is None else Snapshot(LaidOutState(None, {}, ()), lambda: None, frees[1])
            keep = self.pool.hold(buffer)
            frees.append(keep)
            pending = self.writer.adopt(
                snapshot, step, metadata=filled.metadata, tags=filled.tags, updates=updates, gradients=gradients
            )
        except BaseException:
            self.pool.landed(buffer)
            for free in frees:
                free()
            raise
        self._keep(Kept(step, filled.layout, buffer, flat, pending, keep))
        self._watch(pending, told)

    def _watch(self, pending: PendingSave, told: Callable[[PendingSave], None]) -> None:
        step = pending.step
        self._pending[step] = pending
        self._written = step

        def done(_: bool) -> None:
            self._pending.pop(step, None)
            if pending.exception() is None:  # asked, so that the writer takes it for seen
                self._committed(pending.result())
            told(pending)

        pending.when_done(done)

    def hold(self, filled: Filled, step: int) -> None:
        """Take a buffer that was filled for the newest state, in memory alone (`persist`).

        Raises:
            AgentError: what is said of the buffer cannot be. It is free again then.
        """
        self.replicates()
        buffer = self.pool.lent(filled.buffer)
        try:
            flat = laid_out(filled, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        self.keep(Made(step, filled, buffer, flat, ()))
        self.pool.landed(buffer)

    def keep(self, made: Made) -> None:
        """A state that was made is the newest from now on, in memory alone (`persist`)."""
        free = self.pool.hold(made.buffer)
        self.pool.take_back(made.buffer)
        self._keep(Kept(made.step, made.filled.layout, made.buffer, made.flat, None, free, made))

    def persist(
        self, told: Callable[[PendingSave], None], labels: tuple[Mapping[str, Any] | None, Sequence[str]] | None = None
    ) -> None:
        """Have the newest state written, if it is in memory alone.

        Args:
            told: as for `save`.
            labels: metadata and tags; None: those that came with the step.

        Raises:
            what `Writer.adopt` raises.
        """
        newest = self.newest
        if newest is None or newest.made is None:
            return
        earlier = newest.pending
        if earlier is not None and not (earlier.done() and earlier.exception() is not None):
            earlier.when_done(lambda _: told(earlier))
            return
        made = newest.made
        metadata, tags = (made.filled.metadata, made.filled.tags) if labels is None else labels
        free = self.pool.hold(newest.buffer)
        updates = made.updates if self._written == made.step - 1 else ()
        try:
            snapshot = Snapshot(newest.flat, lambda: None, free)
            pending = self.writer.adopt(snapshot, made.step, metadata=metadata, tags=tags, updates=updates)
        except BaseException:
            free()
            raise
        with self._lock:
            self.newest = replace(newest, pending=pending)
        self._watch(pending, told)

    def forgo(self, step: int, why: BaseException) -> None:
        """A step that was to be written has no state here. Other ranks, which may have it, need not wait for that."""
        if self._ranked is not None:
            self._ranked.forgo(step, why)

    def replicates(self) -> None:
        """States are in memory alone. One of many ranks keeps two: another may be a step behind when it ends."""
        self._keeps_two = self._ranked is not None

    def _keep(self, newest: Kept | None) -> None:
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
        """The newest checkpoint of this term; of one without checkpoints, its parent."""
        return self._latest

    def pending(self, step: int) -> PendingSave | None:
        """The save of a step that is on its way."""
        return self._pending.get(step)

    def rollback(self, ref: str) -> CheckpointInfo:
        """See `Writer.rollback`. The newest state is the abandoned branch's: it is kept no more."""
        parent = self.writer.rollback(ref)
        self._keep(None)
        with self._lock:
            self._latest = parent
        return parent

    # -- between two trainers

    def settle(self) -> None:
        """The trainer is gone: what it was filling is nothing, and what waits is written. Raises nothing."""
        self.pool.recall()
        self.persist_quietly()
        if self._ranked is not None:
            self._part(self._ranked)
            return
        with contextlib.suppress(CkptError):  # told to nobody: `Kept.durable` says what became of the newest
            self.writer.wait()

    def _part(self, ranked: Ranked, held_up: Callable[[], None] = lambda: None) -> None:
        """This rank is given no more: of the states that are kept, keep the newest that all ranks' agents have.

        If that is in memory alone all of them write it.

        Args:
            held_up: see `RankSaves.agreed`.
        """
        ranked.conclude()
        with contextlib.suppress(CkptError):  # told to nobody, as above
            self.writer.wait()
        if self._parted:
            return
        self._parted = True
        held = {one.step: one for one in (self._before, self.newest) if one is not None}
        for one in held.values():
            if one.pending is not None:
                one.pending.exception()  # whatever became of it, it has ended
        newest = self.newest
        waits = self._keeps_two and newest is not None and newest.durable is None  # else all others had given it
        standing = {step: one.standing for step, one in held.items()}
        try:
            agreed = ranked.agreed(standing, waits=waits, held_up=held_up)
            why = "no step is there that all ranks have"
        except CkptError as error:
            agreed, why = None, str(error)
        if agreed is not None:
            self._go_back_to(held[agreed[0]])
            if agreed[1]:
                self._write_alone()
        elif waits and newest is not None and newest.standing == ALONE:
            self.lost = f"step {newest.step} was in memory alone, and is not written: {why}"

    def _go_back_to(self, kept: Kept) -> None:
        """Keep one of two states: no other rank has the newer one, nor can it have any more."""
        newest = self.newest
        if newest is not None and newest is not kept:
            with self._lock:
                self.newest, self._before = kept, None
            newest.free()

    def _write_alone(self) -> None:
        """Write the newest state, as all ranks do now."""
        with contextlib.suppress(CkptError):
            self.persist(lambda _: None)
            self.writer.wait()
        newest = self.newest
        if newest is not None and newest.durable is None:
            why = None if newest.pending is None else newest.pending.exception()
            self.lost = f"step {newest.step} was in memory alone, and could not be written: {why}"

    def persist_quietly(self) -> None:
        """As `persist`, with nobody there who could be told; not of one of many ranks: these write the same steps."""
        newest = self.newest
        if self._ranked is not None or newest is None or newest.made is None:
            return
        with contextlib.suppress(CkptError):
            self.persist(lambda _: None)

    def stale(self) -> str:
        """Why a successor should not go on from here; empty: it should."""
        try:
            catalog = self._store.view().catalog
        except CkptError as error:
            return f"the store cannot be read: {error}"
        if catalog.term != self.writer.term:
            return f"term {catalog.term} was opened after term {self.writer.term}"
        return ""

    def hash_of(self, kept: Kept) -> str:
        """The hash of the newest state, as the store knows it; of one that it does not have, as it is in memory."""
        info = kept.durable
        if info is not None and not info.lossy and info.step == kept.step and self._ranked is None:
            return info.state
        return hash_of(kept.flat, self.workers)

    def close(self, *, parts: bool = False, held_up: Callable[[], None] = lambda: None) -> None:
        """Write what waits, and end. Raises what `Writer.close` raises.

        Args:
            parts: of one of many ranks: first the newest state is written that is in memory alone on all of them.
            held_up: see `RankSaves.agreed`.
        """
        try:
            if parts and self._ranked is not None:
                self._part(self._ranked, held_up)
            self.writer.close()
        finally:
            self._keep(None)
            self.workers.shutdown()
            self.pool.close()
