"""One save of a writer, from the call that gives it to its commit or its failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final

from ckptstore.host.cancellable_calls import Scope
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.saves.in_flight import Place
from ckptstore.write.saves.ledger import Labels, PendingSave, Saves
from ckptstore.write.saves.save_metrics import Measured
from ckptstore.write.second_tier import SecondTier

__all__ = ["Job"]

_GRACE: Final = 2.0
"""Seconds for which an interrupted `Writer.save` waits for the medium. Then requests under way are left alone."""


class Job:
    """A save: its step, its place in flight, and what becomes of it. Thread-safe.

    Its commit, its failure or whoever gives it up decides what becomes of it: whichever comes first. If it is given up
    before `start`, nothing of its state is read.

    Attributes:
        step: a step that is taken in its term (`Saves.take`).
        labels: metadata and tags.
        measured: what the save costs; given with `begin`.
        done: answers with the committed checkpoint.
        scope: of the call that waits until it is durable (`Writer.save`); None: no call does.
        interrupted: that call has stopped waiting, so its caller may change the state.
    """

    measured: Measured

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
        """Call `stop` when it is given up: to give back what nobody else will, if it was not started."""
        self._stop = stop

    def begin(self, measured: Measured) -> None:
        """The state is given, or copied as a whole: from now on it is a save on its way."""
        self.measured = measured
        measured.ends_with(self.done)
        self._saves.watch(self.step, self.done)

    # -- what becomes of it

    def take(self) -> bool:
        """It is committed now, or has failed -> False: it was given up. May be repeated."""
        with self._lock:
            self._taken = not self._given_up
            return self._taken

    def fail(self, error: BaseException, *, told: bool = False) -> None:
        """It was not saved. Does nothing where it is durable, or was given up.

        Args:
            told: the call that gave it raises `error`. Else, and if no call waits for it, the writer's next one does.
        """
        if self.done.done() or not self.take():
            return
        if told or self.scope is not None:
            self._saves.release(self.step, error)
            self.done.set_exception(error)
        else:
            self._saves.fail(self.step, error, self.done)

    def give_up(self, error: BaseException) -> bool:
        """Nothing becomes of it: `done` raises `error`, and its step may be given again -> False: too late for that."""
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
        """Give it up because its caller asks for that -> whether it is cancelled, now or before."""
        if self.give_up(CancelledError(f"step {self.step} was cancelled")):
            return True
        return self._given_up and isinstance(self.done.exception(), CancelledError)

    # -- what its state is read by

    @property
    def started(self) -> bool:
        """Whether `start` has answered yes."""
        return self._started

    def start(self, *, final: bool = False) -> bool:
        """Another thread than its caller's begins to read its state, until `finish` -> False: it was given up.

        Args:
            final: it cannot be given up any more.
        """
        with self._lock:
            self._started = not self._given_up
            self._taken = self._taken or (final and self._started)
            return self._started

    def finish(self) -> None:
        """Nobody reads its state any more, and another save may have its place in flight."""
        self._stop = None  # Prevents: memory of a copy that lives as long as the `PendingSave`.
        self._over.set()
        self.leave()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait for `finish`, if it was started -> False: not within `timeout` seconds."""
        return not self._started or self._over.wait(timeout)

    # -- its place in flight

    def enter(self, place: Place) -> None:
        """It has this place in flight, until `leave`."""
        self._place = place

    def leave(self) -> None:
        """Another save may have its place in flight. A second time does nothing."""
        if self._place is not None:
            self._place.leave()

    # -- its caller

    def result(self) -> CheckpointInfo:
        """Wait until it is durable. Raises what stopped it."""
        return self.done.result()

    def pending(self, hurry: Callable[[], None], tier: SecondTier | None) -> PendingSave:
        """What `Writer.save_async` returns.

        Args:
            hurry: has it written, if it waits for its batch.
            tier: where it goes from the store.
        """
        return PendingSave(self.step, self.done, lambda: self._saves.seen(self.step), hurry, self.cancel, tier)

    def interrupt(self, error: BaseException) -> None:
        """The call that waits for it ends with `error`. Returns when nobody reads the state any more.

        What is being committed is committed all the same.
        """
        self.interrupted = True
        self.give_up(error)  # Prevents: a commit of tensors that the caller changes.
        if not self.wait_over(_GRACE):
            if self.scope is not None:
                self.scope.abandon()  # a server that does not answer would keep it for minutes
            self.wait_over()
        self._saves.seen(self.step)
