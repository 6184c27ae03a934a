"""`SavePath`: the interface of the paths that states take from the caller of a writer to their commits."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ckptstore.formats.states.state import FlatState
from ckptstore.host.progress import Progress
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.committer import Committer
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.stage import Copies, Stage
from ckptstore.write.steps.updates import Update, Updates

__all__ = ["SavePath"]

_T = TypeVar("_T")


class SavePath(ABC):
    """The path of a writer's states to their commits.

    The thread that saves calls the methods. If one raises, the job is given up, unless another thread has started it:
    then that thread ends it.

    Attributes:
        needs_caller: whether a waiting save holds what other calls of the same thread may need.
        recomputes: see `Writer.recomputes`.
    """

    needs_caller = True
    recomputes = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: BaseException | None = None

    def _check_taking(self) -> None:
        """Raise the error with which it ended, if it has. The caller holds the lock."""
        if self._ended is not None:
            raise self._ended

    @abstractmethod
    def save(
        self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """Begin to make training's own tensors durable. They may change once the job is done or interrupted."""

    @abstractmethod
    def begin(self, committer: Committer, job: SaveJob, flat: FlatState, updates: Updates | None) -> None:
        """Copy a state, and have it made durable in the background. When this returns, training continues."""

    def adopt(self, committer: Committer, job: SaveJob, copies: Copies) -> None:
        """Have a state made durable that the caller has copied. Its memory is freed then, also if this raises."""
        with copies.handover(job):
            self.submit(committer, job, copies)

    @abstractmethod
    def submit(self, committer: Committer, job: SaveJob, stage: Stage, progress: Progress | None = None) -> None:
        """Give a state to the thread that stores it. Raises the error with which this ended."""

    @staticmethod
    def _store(committer: Committer, job: SaveJob, stage: Stage, store: Callable[[], bool]) -> bool:
        """Store the state of a job that has started, and free it. Runs in the thread that stores.

        Args:
            store: stores it -> whether the snapshot of `stage` stays in memory, which this returns, too.
        """
        kept = False
        try:
            kept = store()
        except BaseException as error:  # noqa: BLE001  # the save reports it
            committer.fail(job, error, told=stage.told)
        finally:
            stage.let_go(kept=kept)
            job.finish()
        return kept

    def copied_updates(self, flat: FlatState, updates: Updates | None) -> tuple[Sequence[Update], Snapshot | None]:
        """The updates of an adopted state, with copied gradients, and the snapshot that holds the gradients."""
        del flat, updates
        return (), None

    def forget(self) -> None:  # noqa: B027  # only some paths keep one
        """Forget the last state: the next one does not follow from it."""

    @abstractmethod
    def prepare(self, flat: FlatState) -> None:
        """Touch memory for a state like `flat` in the background."""

    @abstractmethod
    def expect(self, nbytes: int) -> None:
        """Touch memory in the background for copies of a state of about `nbytes` bytes."""

    @abstractmethod
    def wake(self) -> None:
        """Start the threads that copy and write large states. Raises `RuntimeError` if no more can be started."""

    @abstractmethod
    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` in the committer's thread when every save submitted before is durable or has failed."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every save submitted before is durable or has failed. `RuntimeError`: it is closed."""

    def end(self, error: BaseException) -> None:
        """Accept no more saves: they raise `error`. Saves that are still being copied are given up with it."""
        with self._lock:
            self._ended = self._ended or error

    @abstractmethod
    def close(self) -> None:
        """Wait for all saves, and free the memory. May be called repeatedly."""
