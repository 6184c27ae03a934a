"""What the caller of a writer knows of its steps: which are taken, which are on their way, which failed unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from ckptstore.checkpoint import CheckpointInfo
from ckptstore.formats.errors import CommitUnknownError, StepOrderError

__all__ = ["PendingSave", "Saves"]

_MAX_STEP: Final = 2**53 - 1


class PendingSave:
    """A checkpoint on its way to the medium, as `Writer.save_async` returns it."""

    def __init__(self, step: int, future: Future[CheckpointInfo], seen: Callable[[int], None]) -> None:
        self.step = step
        self._future = future
        self._seen = seen

    def done(self) -> bool:
        """Whether it is durable or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until it is durable.

        Raises:
            TimeoutError: not within `timeout` seconds; the save goes on.
            StorageError, FencedError, CommitUnknownError: what stopped it.
        """
        wait([self._future], timeout)
        if not self._future.done():
            raise TimeoutError(f"step {self.step} is not durable after {timeout} s")
        if self._future.exception() is not None:
            self._seen(self.step)
        return self._future.result()


class Saves:
    """The steps of one term, for any thread."""

    def __init__(self, term: int, parent: CheckpointInfo | None) -> None:
        self.term = term
        self.parent = parent
        self._taken: set[int] = set()
        self._unseen: dict[int, BaseException] = {}  # by step: of `Writer.save_async`
        self._lock = threading.Lock()

    def check(self, step: int) -> None:
        """Raises `StepOrderError` for a step that no checkpoint of this term may have."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _MAX_STEP:
            raise StepOrderError(f"step {step!r}: a whole number from 0 to 2^53 - 1 is needed")
        if self.parent is not None and step <= self.parent.step:
            raise StepOrderError(
                f"step {step} is not above step {self.parent.step}, from which term {self.term} continues "
                f"({self.parent.ref}); to go back further open a writer with parent=<an earlier checkpoint>"
            )

    def take(self, step: int) -> None:
        """Nobody else may save `step` from now on. Raises `StepOrderError` if somebody did or does."""
        with self._lock:
            if step in self._taken:
                raise StepOrderError(f"step {step} exists already in term {self.term}")
            self._taken.add(step)

    def release(self, step: int, error: BaseException | None) -> None:
        """A step that failed for good may be tried again; one that may have been committed may not."""
        if not isinstance(error, CommitUnknownError):
            with self._lock:
                self._taken.discard(step)

    def fail(self, step: int, error: BaseException, done: Future[CheckpointInfo]) -> None:
        """A step whose saver has not been told was not saved: he hears of it from `done`, or from `raise_unseen`."""
        self.release(step, error)
        # Before anyone can ask for the result: who then sees the error takes it back.
        self._unseen[step] = error
        done.set_exception(error)

    def seen(self, step: int) -> None:
        """Somebody knows that `step` failed."""
        self._unseen.pop(step, None)

    def seen_error(self, error: BaseException) -> None:
        """Somebody knows of every step that `error` stopped."""
        for step in [step for step, other in list(self._unseen.items()) if other is error]:
            self.seen(step)

    def raise_unseen(self) -> None:
        """Raise what nobody has seen: the first failure, with a note of every other one."""
        failures: list[tuple[int, BaseException]] = []
        while self._unseen:
            failures.append(self._unseen.popitem())
        if not failures:
            return
        failures.reverse()
        _, first = failures[0]
        for step, other in failures[1:]:
            first.add_note(f"step {step} was not saved, either: {other}")
        raise first
