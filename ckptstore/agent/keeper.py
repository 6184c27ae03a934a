"""What an agent keeps: the writer with its term, the buffers, the newest state. It knows nothing of messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ckptstore.agent.changes import read_updates
from ckptstore.agent.digests import hash_of
from ckptstore.agent.forms import Layout, read, whole_number
from ckptstore.agent.pool import Buffer, Pool
from ckptstore.errors import AgentError, CkptError
from ckptstore.formats.state import TensorSource, unflatten
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.segments.regions import LaidOutState
from ckptstore.store import Store
from ckptstore.write.ledger import PendingSave
from ckptstore.write.snapshot import HostTensor, Snapshot
from ckptstore.write.steps.updates import Update

__all__ = ["Adopting", "Filled", "Keeper", "Kept", "Made", "laid_out"]


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


@dataclass(frozen=True, slots=True)
class Filled:
    """What the trainer says of a buffer that it has filled.

    Attributes:
        buffer: its number.
        layout: of what is in it.
        tree: of the state.
        metadata, tags: as `Writer.save` takes them.
        updates: as `changes.updates_form` makes it; None: none.
        gradients: the buffer that those refer to; None: none.
    """

    buffer: int
    layout: Layout
    tree: Any
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()
    updates: Any = None
    gradients: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A state that the agent has made (`replica`).

    Attributes:
        step: its step.
        filled: what is said of it.
        buffer, flat: where it is.
        updates: what the optimizers did in this step.
        due: it is to be written at the end, if it was not before.
    """

    step: int
    filled: Filled
    buffer: Buffer
    flat: LaidOutState
    updates: Sequence[Update]
    due: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The newest state.

    Attributes:
        step: its step.
        layout, buffer, flat: where it is.
        pending: its save; None: it is in memory alone.
        free: lets go of the memory.
        made: what made it; None: the trainer has handed it over.
    """

    step: int
    layout: Layout
    buffer: Buffer
    flat: LaidOutState
    pending: PendingSave | None
    free: Callable[[], None]
    made: Made | None = None

    @property
    def durable(self) -> CheckpointInfo | None:
        """The checkpoint that it became; None: none, or none yet."""
        if self.pending is None or not self.pending.done() or self.pending.exception() is not None:
            return None
        return self.pending.result()


class Keeper:
    """The state of an agent.

    Attributes:
        pool: its buffers.
        writer: its writer.
        run: the store's.
        newest: the newest state that a trainer has filled and said so, or that was made and proven; None: none yet.
        workers: threads that copy and hash.
    """

    def __init__(
        self, store: Store, writer: Adopting, max_in_flight: int, conclude: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            conclude: of one rank of many, whose states are parts of checkpoints: told that the trainer is gone, and
                that nothing more is given to the writer.
        """
        self._conclude = conclude
        self.writer = writer
        self.pool = Pool(max_in_flight)
        self.newest: Kept | None = None
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

    def keep(self, made: Made) -> None:
        """A state that was made is the newest from now on, in memory alone (`persist`)."""
        free = self.pool.hold(made.buffer)
        self.pool.take_back(made.buffer)
        self._keep(Kept(made.step, made.filled.layout, made.buffer, made.flat, None, free, made))

    def persist(
        self, told: Callable[[PendingSave], None], labels: tuple[Mapping[str, Any] | None, Sequence[str]] | None = None
    ) -> None:
        """Have the newest state written, if it was made here and is in memory alone.

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

    def _keep(self, newest: Kept | None) -> None:
        with self._lock:
            before, self.newest = self.newest, newest
        if before is not None:
            before.free()

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
        if self._conclude is not None:
            self._conclude()
        with contextlib.suppress(CkptError):  # told to nobody: `Kept.durable` says what became of the newest
            self.writer.wait()

    def persist_quietly(self, *, due: bool = False) -> None:
        """As `persist`, with nobody there who could be told.

        Args:
            due: only what was to be written.
        """
        newest = self.newest
        if newest is None or newest.made is None or (due and not newest.made.due):
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
        if info is not None and not info.lossy and info.step == kept.step and self._conclude is None:
            return info.state
        return hash_of(kept.flat, self.workers)

    def close(self) -> None:
        """Write what waits, and end. Raises what `Writer.close` raises."""
        try:
            self.writer.close()
        finally:
            self._keep(None)
            self.workers.shutdown()
            self.pool.close()


def laid_out(filled: Filled, buffer: Buffer) -> LaidOutState:
    """The state in a buffer. Raises `AgentError` if tree, layout and buffer do not fit together."""
    plan = filled.layout.plan
    if plan.size > buffer.nbytes:
        raise AgentError(f"a state of {plan.size} bytes in a buffer of {buffer.nbytes}")
    origins = {one.name: one.origin for one in filled.layout.tensors}
    found: list[str] = []

    def resolve(name: str, origin: str) -> None:
        if origins.get(name) != origin:
            raise AgentError(f"the tree names a tensor {name!r:.80} of {origin}, which the layout has not")
        found.append(name)

    read("tree", filled.tree, lambda tree: unflatten(tree, resolve))
    if found != list(origins):
        raise AgentError(f"the tree has {len(found)} tensors, the layout {len(origins)}, or in another order")
    memory = buffer.shared.memory
    tensors: dict[str, TensorSource] = {}
    for form in filled.layout.tensors:
        start = whole_number(plan.offsets[form.name])
        tensors[form.name] = HostTensor(form, memory[start : start + form.nbytes])  # type: ignore[arg-type]
    return LaidOutState(filled.tree, tensors, plan.regions(memory))
