"""Deltas and step diffs of copied states, made durable one after the other, since each is compressed against the last.

The committer's thread compresses, writes and commits. Training continues once its state is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ckptstore.formats.state import FlatState
from ckptstore.host.cancellable_calls import in_scope
from ckptstore.host.progress import Progress
from ckptstore.write.committer import Committer
from ckptstore.write.job import Job
from ckptstore.write.path import Copies, SavePath
from ckptstore.write.snapshot import Snapshot, SnapshotPool
from ckptstore.write.steps.updates import Explaining, Update, Updates, dense_gradients, with_copies

__all__ = ["Coded"]

_T = TypeVar("_T")


class Coded(SavePath):
    """Saves of whole copies."""

    needs_caller = False  # a save waits for its turn with nothing in hand

    def __init__(
        self,
        explaining: Explaining,
        snapshots: SnapshotPool,
        copiers: ThreadPoolExecutor,
        *,
        thread: ThreadPoolExecutor,
        tend: Callable[[], object],
    ) -> None:
        """
        Args:
            explaining: looks up what `updates` say of a state; wants them where steps are stored as step diffs.
            snapshots: the memory that states are copied to.
            copiers: the threads that copy.
            thread: the committer's.
            tend: upkeep of the log, after it.
        """
        super().__init__()
        self._explaining = explaining
        self._snapshots = snapshots
        self._copiers = copiers
        self._with_diffs = explaining.wanted
        self._first = self._with_diffs
        self._thread = thread
        self._tend = tend

    def save(
        self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """See `SavePath.save`."""
        found = self._explaining.found(updates, flat)
        self._first = False

        def store() -> None:
            if self._with_diffs:
                committer.diff_now(flat, found, job, progress)
            else:
                committer.persist(flat, job, progress=progress)

        def work() -> None:
            # What waits for its batch is written with it, and was given by others, who are not interrupted.
            with_scope = store if committer.waiting else in_scope(job.scope, store)
            self._work(committer, job, with_scope)

        self.submit(work)

    def begin(self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None) -> None:
        """See `SavePath.begin`."""
        snapshot = self._snapshots.placed(flat, self._copiers, queued=True)
        try:
            copies = Copies(snapshot, *self.copied_updates(flat, updates))
        except BaseException:
            snapshot.free()
            raise
        self.adopt(committer, job, copies)

    def copied_updates(self, flat: FlatState, updates: Updates | None) -> tuple[Sequence[Update], Snapshot | None]:
        """What the optimizers did to reach a state, with gradients of its own."""
        found = self._explaining.found(updates, flat)
        if self._first:
            # A full, which nothing explains: the gradients would be copied to memory that nobody has touched yet, for
            # nothing. By the next save it is touched.
            self._first = False
            if (gradients := dense_gradients(found)).tensors:
                self._snapshots.kept(gradients)
            return (), None
        return with_copies(found, self._snapshots, self._copiers, queued=True)

    def adopt(self, committer: Committer, job: Job, copies: Copies) -> None:
        """See `SavePath.adopt`."""
        self._first = False  # also for a state that somebody else has copied

        kept = False

        def store() -> None:
            nonlocal kept
            copies.arrive()
            if self._with_diffs:
                kept = committer.diff(copies.state, copies.updates, job)
            else:
                kept = committer.persist(copies.state.flat, job, snapshot=copies.state)
            if kept:
                self._snapshots.kept(copies.state.flat)

        with copies.given(job):
            self.submit(lambda: self._work(committer, job, store, lambda: copies.let_go(kept=kept)))
            if self._with_diffs:
                job.take()  # Prevents: a step of a sum, or one that the next is compressed against, that is cancelled.

    def _work(
        self,
        committer: Committer,
        job: Job,
        store: Callable[[], object],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """In the committer's thread: read the state of a job and store it, unless it was given up.

        Args:
            let_go: called then, when a failure is known to those who ask for it.
        """
        if not job.start(final=self._with_diffs):
            return
        try:
            store()
        except BaseException as error:  # noqa: BLE001  # its saver hears of it
            committer.fail(job, error)
        finally:
            let_go()
            job.finish()

    def prepare(self, flat: FlatState) -> None:
        """See `SavePath.prepare`."""
        self._snapshots.prepare(flat)

    def wake(self) -> None:
        """See `SavePath.wake`. The threads that copy and compress are the writer's."""

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """See `SavePath.after`."""
        return self._thread.submit(work)

    def close(self) -> None:
        """See `SavePath.close`. The committer's thread is the writer's."""

    def submit(self, work: Callable[[], None]) -> None:
        """Have a save's work done, and upkeep after it."""
        with self._lock:
            self._check_taking()
            self._thread.submit(work)
        self._tend()
