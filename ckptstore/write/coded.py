"""Saves whose snapshot is a whole state: coded by the committer's thread in turn, filled by layers, or adopted.

Each is coded against the one before it, so they are made durable one after the other; training goes on once the state
is copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptstore.errors import UsageError, WriterClosedError
from ckptstore.formats.state import FlatState
from ckptstore.host.carriers import Scope, within
from ckptstore.host.progress import Progress
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.write.committer import Committer
from ckptstore.write.deltas import Deltas
from ckptstore.write.filling import Filling
from ckptstore.write.ledger import Claim, Labels, PendingSave
from ckptstore.write.metrics import Measured
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.updates import Explaining, Update, Updates, dense_gradients, with_copies

__all__ = ["Coded", "Copies"]


@dataclass(frozen=True, slots=True)
class Copies:
    """What has been copied, so that training may go on.

    Attributes:
        updates: what the optimizers did; they refer to what `gradients` holds.
        filling: what still copies into `state` (`layered`).
    """

    state: Snapshot
    updates: Sequence[Update]
    gradients: Snapshot | None
    filling: Filling | None = None

    def arrive(self) -> None:
        """Wait until everything is copied. Raises what stopped a copy."""
        if self.filling is not None:
            self.filling.check()
        self.state.arrive()
        if self.gradients is not None:
            self.gradients.arrive()

    def let_go(self, *, kept: bool) -> None:
        """It is no longer in flight. Give its memory back: all of it, or if the state is `kept`, the gradients'."""
        if self.filling is not None:
            self.filling.wait()  # Prevents: a copy into memory that is another snapshot's already.
        self.state.land()
        if self.gradients is not None:
            self.gradients.free()
        if not kept:
            self.state.free()


class Coded:
    """What such saves of a writer share.

    Attributes:
        explaining: looks up what `updates` say of a state.
        snapshots: the memory that states are copied to.
    """

    def __init__(
        self,
        explaining: Explaining,
        snapshots: SnapshotPool,
        copiers: ThreadPoolExecutor,
        *,
        with_diffs: bool,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        tend: Callable[[], object],
    ) -> None:
        """
        Args:
            copiers: the threads that copy.
            with_diffs: steps are stored as step diffs.
            submit: has the committer's thread do something after all that was given before; raises once it is closed.
            tend: upkeep of the log, after it.
        """
        self.explaining = explaining
        self.snapshots = snapshots
        self._copiers = copiers
        self._with_diffs = with_diffs
        self._first = with_diffs
        self._submit = submit
        self._tend = tend

    def save(
        self,
        committer: Committer,
        flat: FlatState,
        step: int,
        labels: Labels,
        updates: Updates | None,
        progress: Progress | None,
        interrupted: threading.Event,
        scope: Scope,
    ) -> Future[CheckpointInfo]:
        """Have training's own tensors made durable; they may change once it is done, or `interrupted` is set.

        Args:
            scope: of the caller's wait: abandoned, requests that are under way for this alone are left alone.
        """
        found = self.explaining.found(updates, flat)
        self._first = False

        def work() -> CheckpointInfo:
            if not self._with_diffs:
                return committer.persist(flat, step, progress=progress, interrupted=interrupted, labels=labels)[0]
            return committer.diff_now(flat, found, step, progress, interrupted, labels)

        def job() -> CheckpointInfo:
            # What waits for its batch is written with it, and was given by others, who are not interrupted.
            return work() if committer.waiting else within(scope, work)()

        future: Future[CheckpointInfo] = self._submit(job)
        self._tend()
        return future

    def copy(self, flat: FlatState, updates: Updates | None, measured: Measured) -> Copies:
        """Wait until fewer snapshots are in flight, then copy a state, and the gradients that explain it."""
        snapshot, measured.waited = self.snapshots.take(flat, self._copiers, queued=True)
        try:
            return Copies(snapshot, *self.copied_updates(flat, updates))
        except BaseException:
            snapshot.land()
            snapshot.free()
            raise

    def copied_updates(self, flat: FlatState, updates: Updates | None) -> tuple[Sequence[Update], Snapshot | None]:
        """What the optimizers did to reach a state, with gradients of its own."""
        found = self.explaining.found(updates, flat)
        if self._first:
            # A full, which nothing explains: the gradients would be copied to memory that nobody has touched yet, for
            # nothing. By the next save it is touched.
            self._first = False
            if (gradients := dense_gradients(found)).tensors:
                self.snapshots.kept(gradients)
            return (), None
        return with_copies(found, self.snapshots, self._copiers, queued=True)

    def hand_over(
        self, committer: Committer, copies: Copies, step: int, labels: Labels, measured: Measured
    ) -> PendingSave:
        """Have a snapshot made durable by the committer's thread."""
        self._first = False  # also for a state that somebody else has copied
        unclaimed = threading.Lock()  # whoever takes it decides what becomes of the snapshot
        claim = Claim(committer.saves, step)
        measured.ends_with(claim.done)
        committer.saves.watch(step, claim.done)

        def work() -> None:
            if unclaimed.acquire(blocking=False):
                self._store(committer, copies, step, labels, claim)

        try:
            self._submit(work)
            self._tend()
        except BaseException as error:
            # Prevents: a snapshot that Ctrl-C leaves in flight for ever, for which the next save_async would wait.
            if unclaimed.acquire(blocking=False):
                copies.let_go(kept=False)
                committer.saves.release(step, error)
                claim.done.cancel()
            raise
        return PendingSave(
            step, claim.done, lambda: committer.saves.seen(step), self.hurry(committer, step), claim.cancel
        )

    def _store(self, committer: Committer, copies: Copies, step: int, labels: Labels, claim: Claim) -> None:
        """In the committer's thread."""
        kept, state, done = False, copies.state, claim.done
        try:
            copies.arrive()
            if self._with_diffs:
                claim.take()
                kept = committer.diff(state, copies.updates, step, done, labels)
            elif not done.done():
                info, kept = committer.persist(
                    state.flat, step, interrupted=threading.Event(), snapshot=state, labels=labels, claim=claim.take
                )
                done.set_result(info)
        except BaseException as error:
            if claim.taken or claim.take():
                committer.fail(step, error, done)
            raise
        finally:
            if kept:
                self.snapshots.kept(state.flat)
            copies.let_go(kept=kept)

    def hurry(self, committer: Committer, step: int) -> Callable[[], None]:
        """What has a step written that waits for its batch."""

        def write() -> None:
            with contextlib.suppress(WriterClosedError, RuntimeError):  # closing flushes; the interpreter is going
                self._submit(partial(committer.flush_step, step))

        return write

    def mapped(self, committer: Committer, deltas: Deltas, flat: FlatState, step: int, url: str) -> Snapshot:
        """A snapshot whose memory is the medium's.

        Raises:
            UsageError: the store is coded, or its medium cannot be copied into.
            StorageError: the medium failed or is full.
        """
        if self._with_diffs or deltas.schedule is not None:
            raise UsageError("direct: deltas and step diffs are coded from copies in host memory; leave it out")
        landed = self.snapshots.hold()
        try:
            found = deltas.map_full(flat, step)
            if found is None:
                raise UsageError(f"direct: {url} has no memory to be copied into, as pmem:// has; leave it out")
        except BaseException:
            landed()
            raise

        def free() -> None:
            lost = found.abort()  # harmless to those that are sealed
            with contextlib.suppress(WriterClosedError):  # a collector finds them once the term is over
                self._submit(lambda: committer.abandon(lost))

        return Snapshot(found, landed, free)
