"""The save path of deltas and step diffs: made durable one by one, since each is compressed against the last.

The committer's thread compresses, writes and commits. Without a byte budget, the caller copies its whole state first
and continues. With one, it waits for its turn and copies unit by unit what is compressed next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.cancellable_calls import in_scope
from ckptstore.host.progress import Progress
from ckptstore.write.capture.bounded_capture import Feeding
from ckptstore.write.capture.snapshot import Snapshot, SnapshotPool
from ckptstore.write.commit_turn import CommitTurn
from ckptstore.write.committer import Committer
from ckptstore.write.recomputed_states import RecomputedStates
from ckptstore.write.save_path import SavePath
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.stage import Bounded, Copies, InPlace, Stage
from ckptstore.write.steps.recomputed_steps import Recomputing
from ckptstore.write.steps.updates import (
    Explaining,
    Found,
    Update,
    Updates,
    dense_gradients,
    with_copies,
    with_sparse_copies,
)

__all__ = ["CompressedSaves"]

_T = TypeVar("_T")


class CompressedSaves(SavePath):
    """The save path of compressed saves.

    Attributes:
        feeding: the memory with a byte budget; None: states are copied whole.
    """

    def __init__(
        self,
        explaining: Explaining,
        snapshots: SnapshotPool,
        copiers: ThreadPoolExecutor,
        *,
        turn: CommitTurn,
        tend: Callable[[], object],
        feeding: Feeding | None = None,
        recomputing: Recomputing | None = None,
    ) -> None:
        """
        Args:
            recomputing: computes steps of devices again, so that their states need not be copied; None: nothing does.
            explaining: looks up the updates of a state; needs them if steps are stored as step diffs.
            snapshots: the memory into which whole states are copied.
            copiers: the threads that copy them.
            turn: has the committer's thread.
            tend: queues upkeep of the log after a save.
        """
        super().__init__()
        self.feeding = feeding
        self.needs_caller = feeding is not None  # without a budget, a waiting save holds nothing
        self._explaining = explaining
        self._snapshots = snapshots
        self._copiers = copiers
        self._with_diffs = explaining.wanted
        self._first = self._with_diffs
        self._turn = turn
        self._tend = tend
        self._recomputed = RecomputedStates(recomputing if feeding is None else None)
        self.recomputes = self._recomputed.active

    def save(
        self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """See `SavePath.save`. With a byte budget, the whole state is copied when this returns."""
        found = self._explaining.found(updates, flat)
        if self.feeding is not None:
            self._feed(self.feeding, committer, job, flat, found, progress)
        else:
            self.submit(committer, job, InPlace(flat, found), progress)

    def begin(self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None) -> None:
        """See `SavePath.begin`. Raises `UsageError`: the byte budget is too small for a unit."""
        if self.feeding is not None:
            self._feed(self.feeding, committer, job, flat, self._explaining.found(updates, flat), None)
            return
        found = self._explaining.found(updates, flat)
        hold = found.hold if isinstance(found, Found) else None
        with self._recomputed.sending(flat, found, hold, job.measured.crossing) as sending:
            snapshot = self._snapshots.placed(flat, self._copiers, queued=True, without=sending.names)
            Copies(snapshot).belongs_to(job)
            copies = Copies(snapshot, *self._copied(found, sending.tensors))
            copies.belongs_to(job)
            sending.copied(copies)
        self.adopt(committer, job, copies)

    def forget(self) -> None:
        """See `SavePath.forget`."""
        self._recomputed.forget()

    def _feed(
        self,
        feeding: Feeding,
        committer: Committer,
        job: SaveJob,
        flat: FlatState,
        found: Sequence[Update],
        progress: Progress | None,
    ) -> None:
        stage = Bounded(feeding.copy_of(flat), with_sparse_copies(found))
        with stage.handover(job):
            stage.run(job, lambda: self.submit(committer, job, stage, progress))

    def copied_updates(self, flat: FlatState, updates: Updates | None) -> tuple[Sequence[Update], Snapshot | None]:
        """The updates of a state, and a copy of their gradients; None: there is no copy."""
        return self._copied(self._explaining.found(updates, flat), {})

    def _copied(
        self, found: Sequence[Update], also: Mapping[str, TensorSource]
    ) -> tuple[Sequence[Update], Snapshot | None]:
        if self._first:
            # The first save is a full and needs no updates. Copying gradients would delay it, because their memory is
            # not prefaulted yet. It is reserved here, and prefaulted before the next save.
            self._first = False
            carried = {f"carried {place}": one.carried for place, one in enumerate(found) if one.carried is not None}
            gradients = FlatState(None, {**dense_gradients(found).tensors, **(carried if self.recomputes else {})})
            if gradients.tensors:
                self._snapshots.kept(gradients)
            return (), None
        return with_copies(found, self._snapshots, self._copiers, queued=True, also=also)

    def submit(self, committer: Committer, job: SaveJob, stage: Stage, progress: Progress | None = None) -> None:
        """See `SavePath.submit`: the committer's thread stores the state, and does upkeep of the log after it."""
        self._first = False  # also for a state that another caller has copied
        self._recomputed.follows(stage.snapshot)
        with self._lock:
            self._check_taking()
            self._turn.submit(lambda: self._work(committer, job, stage, progress))
        self._tend()
        if self._with_diffs and not isinstance(stage, InPlace):
            job.take()  # Prevents: cancelling a step that belongs to a sum, or that the next is compressed against.

    def _work(self, committer: Committer, job: SaveJob, stage: Stage, progress: Progress | None) -> None:
        """Read the state of a job and store it, unless the job was given up. Runs in the committer's thread."""

        def store() -> bool:
            return committer.store(job, stage, progress)

        if not job.start(final=self._with_diffs):
            return
        # Waiting steps are written with it. They belong to other calls, which an interrupt here must not stop.
        kept = self._store(committer, job, stage, store if committer.waiting else in_scope(job.scope, store))
        if kept and stage.feed is None:  # under a byte budget there is no memory for a second copy
            self._snapshots.kept(stage.flat)

    def prepare(self, flat: FlatState) -> None:
        """See `SavePath.prepare`."""
        self._snapshots.prepare(flat)
        if self.feeding is not None:
            self.feeding.prepare(flat)

    def expect(self, nbytes: int) -> None:
        """See `SavePath.expect`."""
        if self.feeding is not None:
            self._snapshots.expect(nbytes)
            self.feeding.expect(nbytes)

    def wake(self) -> None:
        """See `SavePath.wake`. The threads that compress belong to the writer."""
        if self.feeding is not None:
            self.feeding.wake()

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """See `SavePath.after`."""
        return self._turn.submit(work)

    def settle(self) -> None:
        """See `SavePath.settle`."""
        self._turn.submit(_nothing).result()

    def close(self) -> None:
        """See `SavePath.close`. The committer's thread belongs to the writer."""
        self._recomputed.close()
        if self.feeding is not None:
            self.feeding.close()


def _nothing() -> None:
    """Work that shows that the work before it is done."""
