"""The save path of uncompressed fulls, several at once: the caller copies, lanes make durable and commit in turn.

A full is copied unit by unit into memory with a byte budget, and frees it unit by unit as it is written
(`capture.unit_copy`).

A lane commits when its segments are durable, in its turn (`CommitTurn`): SPEC.md 7.4 lets a term commit an older step
after a newer one, and `latest` stays the highest. So no save waits for a slower earlier one, and after a kill of the
process the newest acknowledged checkpoint is there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ckptstore.backends.sharing import SaveSpace
from ckptstore.formats.states.state import FlatState
from ckptstore.host.cancellable_calls import in_scope
from ckptstore.host.progress import Progress
from ckptstore.write.capture.unit_copy import StagedMemory
from ckptstore.write.commit_turn import CommitTurn
from ckptstore.write.committer import Committer
from ckptstore.write.lanes import Lanes
from ckptstore.write.save_path import SavePath
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.stage import Bounded, InPlace, Stage
from ckptstore.write.steps.updates import Updates

__all__ = ["FullSaves"]

_T = TypeVar("_T")


class FullSaves(SavePath):
    """The save path that all uncompressed fulls of a writer share.

    Attributes:
        memory: the memory into which they are copied.
    """

    def __init__(
        self,
        lanes: int,
        begin_save: Callable[[], SaveSpace],
        threads: int,
        memory: StagedMemory,
        *,
        turn: CommitTurn,
        tend: Callable[[], None],
    ) -> None:
        """
        Args:
            lanes: how many fulls are written at once.
            begin_save: `Backend.begin_save` of the medium.
            threads: how many threads write in each lane.
            memory: the memory into which fulls are copied.
            turn: the turn to commit.
            tend: upkeep after each save.
        """
        super().__init__()
        self.memory = memory
        self._turn = turn
        self._tend = tend
        self._copied: set[Stage] = set()  # fulls that are being copied
        self._lanes = Lanes(lanes, threads, begin_save, self._end_of)

    # -- the caller's side

    def wake(self) -> None:
        """See `SavePath.wake`."""
        self.memory.wake()
        self._lanes.wake()

    def expect(self, nbytes: int) -> None:
        """See `SavePath.expect`."""
        self.memory.expect(nbytes)

    def prepare(self, flat: FlatState) -> None:
        """See `SavePath.prepare`. A second call does nothing."""
        self.memory.prepare(flat)

    def save(
        self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """See `SavePath.save`."""
        del updates  # fulls need none; the writer has warned of that
        self.submit(committer, job, InPlace(flat), progress)

    def begin(self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None) -> None:
        """See `SavePath.begin`. Raises the error of the copy."""
        del updates
        stage = Bounded(self.memory.copy_of(flat, ended=lambda: committer.ended))
        with stage.handover(job):
            with self._lock:
                self._copied.add(stage)
            try:
                stage.run(job, lambda: self.submit(committer, job, stage))
            finally:
                with self._lock:
                    self._copied.discard(stage)

    def submit(self, committer: Committer, job: SaveJob, stage: Stage, progress: Progress | None = None) -> None:
        """See `SavePath.submit`: the next free lane writes the state."""
        with self._lock:
            self._check_taking()
            self._lanes.submit(
                lambda writers: in_scope(job.scope, lambda: self._work(committer, job, stage, progress, writers))()
            )

    def _work(
        self, committer: Committer, job: SaveJob, stage: Stage, progress: Progress | None, writers: ThreadPoolExecutor
    ) -> None:
        """Hash and write the state of a job, which may still be copied, and commit it. Runs in a lane."""

        def store() -> bool:
            stage.arrive()
            made = committer.make(stage.flat, job, writers=writers, progress=progress)
            job.done.set_result(self._turn.run(lambda: committer.publish(made, job)))
            return False

        if job.start():
            self._store(committer, job, stage, store)

    def _end_of(self, space: SaveSpace) -> None:
        """Upkeep of the log after a save, then end its space. The save is acknowledged already.

        The upkeep retires the save's checkpoint if a newer save was faster, which frees space.
        """
        try:
            self._turn.run(self._tend)
        finally:
            space.end()

    # -- for the writer

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """See `SavePath.after`."""
        return self._lanes.after(lambda: self._turn.run(work))

    def settle(self) -> None:
        """See `SavePath.settle`."""
        self._lanes.wait()

    def end(self, error: BaseException) -> None:
        """See `SavePath.end`."""
        super().end(error)
        with self._lock:
            copied = list(self._copied)
        for stage in copied:
            stage.stop(error)  # the thread that copies it gives the save up: it may be waiting in a copy

    def close(self) -> None:
        """See `SavePath.close`."""
        self._lanes.close()
        self.memory.close()
