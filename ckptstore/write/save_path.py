"""How states get from the caller of a writer to their commits: what every way has in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ckptstore.formats.state import FlatState
from ckptstore.host.progress import Progress
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.committer import Committer
from ckptstore.write.saves.job import Job
from ckptstore.write.stage import Copies
from ckptstore.write.steps.updates import Update, Updates

__all__ = ["SavePath"]

_T = TypeVar("_T")


class SavePath(ABC):
    """How a writer's states get to their commits.

    Each method is called by the thread that saves. Where one raises, the job is given up, unless another thread has
    started it: then that one ends it.

    Attributes:
        needs_caller: a save that waits holds what other calls of its thread may need.
    """

    needs_caller = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: BaseException | None = None

    def _check_taking(self) -> None:
        """Raise what ended it. Its lock is held."""
        if self._ended is not None:
            raise self._ended

    @abstractmethod
    def save(
        self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """Begin to make training's own tensors durable. They may change once the job is done or interrupted."""

    @abstractmethod
    def begin(self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None) -> None:
        """Copy a state, and have it made durable: training goes on when this returns."""

    @abstractmethod
    def adopt(self, committer: Committer, job: Job, copies: Copies) -> None:
        """Have made durable what somebody else has copied. The memory is given back then, also if this raises."""

    def copied_updates(self, flat: FlatState, updates: Updates | None) -> tuple[Sequence[Update], Snapshot | None]:
        """What the optimizers did to reach a state, with gradients of its own: what explains an adopted state."""
        del flat, updates
        return (), None

    @abstractmethod
    def prepare(self, flat: FlatState) -> None:
        """Touch memory for such a state in the background."""

    @abstractmethod
    def wake(self) -> None:
        """A large state comes: start the threads that copy and write it. Raises `RuntimeError`: there are no more."""

    @abstractmethod
    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """Have the committer's thread do `work` when all that was given before is durable or has failed."""

    def end(self, error: BaseException) -> None:
        """Take no more saves: they raise `error`. What is still being copied is given up with it."""
        with self._lock:
            self._ended = self._ended or error

    @abstractmethod
    def close(self) -> None:
        """Wait for everything, and let go of memory. May be repeated."""
