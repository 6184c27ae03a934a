"""One save of a writer, from the call that begins it to its commit or its failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Final

from ckptstore.host.cancellable_calls import Scope
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.ledger import Labels, PendingSave, Saves
from ckptstore.write.saves.save_metrics import SaveMeasurement

if TYPE_CHECKING:
    from ckptstore.write.second_tier import SecondTier

__all__ = ["SaveJob"]

_GRACE: Final = 2.0
"""Seconds for which an interrupted `Writer.save` waits for the medium. Then it abandons the requests in progress."""


class SaveJob:
    """A save: its step, its place in flight, and its outcome. Thread-safe.

    It ends with a commit, with a failure, or by being given up, whichever comes first. If it is given up before
    `start`, nothing of its state is read.

    Attributes:
        step: a step that is taken in its term (`Saves.take`).
        labels: metadata and tags.
        measured: the measurements of the save; set by `begin`.
        done: resolves to the committed checkpoint.
        scope: the scope of the call that waits until it is durable (`Writer.save`); None: no call waits.
        interrupted: that call has stopped waiting, so its caller may change the state.
    """

    measured: SaveMeasurement

    def __init__(self, saves: Saves, step: int, labels: Labels, scope: Scope | None = None) -> None:
        """
        Args:
            saves: the steps of its term.
        """
        self.step = step
        self.labels = labels
        self.scope = scope
        self.done: Future[CheckpointInfo] = Future()
        self.interrupted = False
        self._saves = saves
        self._stop: Callable[[], None] | None = None
        self._place: Place | None = None
        self._taken = False  # by its commit or its failure
        self._given_up = False
        self._started = False
        self._over = threading.Event()
        self._lock = threading.Lock()

    def stops_with(self, stop: Callable[[], None]) -> None:
        """Call `stop` when it is given up, to free what no other thread will free if it was not started."""
        self._stop = stop

    def begin(self, measured: SaveMeasurement) -> None:
        """Put the save in flight: its state was passed in, or is copied completely."""
        self.measured = measured
        measured.ends_with(self.done)
        self._saves.watch(self.step, self.done)

    # -- its outcome

    def take(self) -> bool:
        """Claim the outcome, for a commit or a failure -> False: it was given up. May be called repeatedly."""
        with self._lock:
            self._taken = not self._given_up
            return self._taken

    def fail(self, error: BaseException, *, told: bool = False) -> None:
        """Fail the save with `error`. Does nothing if it is durable or was given up.

        Args:
            told: the call that began it raises `error`. If False and no call waits for it, the writer's next call does.
        """
        if self.done.done() or not self.take():
            return
        if told or self.scope is not None:
            self._saves.release(self.step, error)
            self.done.set_exception(error)
        else:
            self._saves.fail(self.step, error, self.done)

    def give_up(self, error: BaseException) -> bool:
        """Give the save up: `done` raises `error`, and its step may be saved again -> whether it was early enough."""
        with self._lock:
            if self._taken or self._given_up:
                return False
            self._given_up = True
        self._saves.release(self.step, None)
        self.done.set_exception(error)
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
        if not self._started:
            self.leave()
        return True

    def cancel(self) -> bool:
        """Give the save up on request of its caller -> whether it is cancelled, now or before."""
        if self.give_up(CancelledError(f"step {self.step} was cancelled")):
            return True
        return self._given_up and isinstance(self.done.exception(), CancelledError)

    # -- the thread that reads its state

    @property
    def started(self) -> bool:
        """Whether `start` has returned True."""
        return self._started

    def start(self, *, final: bool = False) -> bool:
        """Begin to read its state in another thread than its caller's, until `finish` -> False: it was given up.

        Args:
            final: from now on it cannot be given up.
        """
        with self._lock:
            self._started = not self._given_up
            self._taken = self._taken or (final and self._started)
            return self._started

    def finish(self) -> None:
        """End the reading of its state, and give its place in flight to another save."""
        self._stop = None  # Prevents: keeping the memory of a copy as long as the `PendingSave` exists.
        self._over.set()
        self.leave()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait for `finish`, if it was started -> False: not within `timeout` seconds."""
        return not self._started or self._over.wait(timeout)

    # -- its place in flight

    def enter(self, place: Place) -> None:
        """Take this place in flight, until `leave`."""
        self._place = place

    def leave(self) -> None:
        """Give its place in flight to another save. A second call does nothing."""
        if self._place is not None:
            self._place.leave()

    # -- its caller

    def result(self) -> CheckpointInfo:
        """Wait until it is durable. Raises the error that stopped it."""
        return self.done.result()

    def pending(self, hurry: Callable[[], None], tier: SecondTier | None) -> PendingSave:
        """What `Writer.save_async` returns.

        Args:
            hurry: has it written now, if it waits for its batch.
            tier: the second tier, to which the store copies it.
        """
        return PendingSave(self.step, self.done, lambda: self._saves.seen(self.step), hurry, self.cancel, tier)

    def interrupt(self, error: BaseException) -> None:
        """End the call that waits for the save with `error`. Returns when nothing reads the state any more.

        A commit that has begun is finished.
        """
        self.interrupted = True
        self.give_up(error)  # Prevents: committing tensors that the caller changes.
        if not self.wait_over(_GRACE):
            if self.scope is not None:
                self.scope.abandon()  # a server that does not answer would block it for minutes
            self.wait_over()
        self._saves.seen(self.step)
