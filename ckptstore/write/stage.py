"""How the state of a save reaches the thread that stores it: read in place, as a copy, or unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckptstore.formats.states.state import FlatState
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.capture.unit_copy import UnitCopy
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.steps.updates import Update

__all__ = ["Bounded", "Copies", "InPlace", "Stage"]


class Stage:
    """A state that is passed to the thread that stores it. It is in its caller's memory, unless a subclass differs.

    Attributes:
        flat: the state.
        updates: what the optimizers did to reach it.
        snapshot: the snapshot that holds the whole state; None: there is none, or none yet.
        feed: provides its units, each once it is copied; None: the whole state can be read.
    """

    snapshot: Snapshot | None = None
    feed: Feed | None = None

    def __init__(self, flat: FlatState, updates: Sequence[Update] = ()) -> None:
        self.flat = flat
        self.updates = updates

    @property
    def told(self) -> bool:
        """Whether the call that passed the state raises the error of the save."""
        return False

    def arrive(self) -> None:
        """Wait until the copy is complete. Raises the error of the copy."""

    def stop(self, error: BaseException) -> None:
        """Stop copying, because the save is given up with `error`. Waits for no copy."""

    def let_go(self, *, kept: bool = False) -> None:
        """Free the memory of the state, which nothing reads any more, but not that of the snapshot if it is `kept`."""
        if self.snapshot is not None and not kept:
            self.snapshot.free()

    def belongs_to(self, job: SaveJob) -> None:
        """Have the state freed if `job` is given up before another thread starts it.

        Prevents: a leak of the memory of a save that was cancelled, or that could not be submitted.
        """

        def stopped() -> None:
            error = job.done.exception()
            assert error is not None
            self.stop(error)
            if not job.started:
                self.let_go()

        job.stops_with(stopped)

    @contextmanager
    def handover(self, job: SaveJob) -> Iterator[None]:
        """Pass the state to another thread within this ``with``. From now on it belongs to `job`.

        If this ``with`` raises, the job is given up, or another thread has ended it.
        """
        self.belongs_to(job)
        try:
            yield
        except BaseException as error:
            if not job.give_up(error):
                job.wait_over()
            raise


class InPlace(Stage):
    """Training's own tensors, which do not change until the job is done or interrupted."""


class Copies(Stage):
    """A copied state, and copies of the gradients of its updates.

    Attributes:
        state: the copy.
        gradients: holds the gradients that `updates` refers to; None: there are none.
    """

    def __init__(self, state: Snapshot, updates: Sequence[Update] = (), gradients: Snapshot | None = None) -> None:
        """
        Args:
            state: the copy. A device, or threads, may still copy to it.
            updates: what the optimizers did; they refer to memory of `gradients`.
        """
        super().__init__(state.flat, updates)
        self.state = self.snapshot = state
        self.gradients = gradients

    def arrive(self) -> None:
        """See `Stage.arrive`."""
        self.state.arrive()
        if self.gradients is not None:
            self.gradients.arrive()

    def let_go(self, *, kept: bool = False) -> None:
        """See `Stage.let_go`."""
        self.state.land()
        if self.gradients is not None:
            self.gradients.free()
        super().let_go(kept=kept)


class Bounded(Stage):
    """A state that its caller copies unit by unit, under a byte budget, as another thread stores it.

    That thread sets `snapshot` to the memory that all of the state has arrived in, if a later state builds on it.
    """

    def __init__(self, copy: UnitCopy, updates: Sequence[Update] = ()) -> None:
        super().__init__(copy.flat, updates)
        self.feed = copy if isinstance(copy, Feed) else None
        self._copy = copy

    def run(self, job: SaveJob, begin: Callable[[], None]) -> None:
        """Copy the state, which is `given` for the job. See `UnitCopy.run`."""
        job.measured.waited += self._copy.run(begin)

    @property
    def told(self) -> bool:
        """See `Stage.told`."""
        return self._copy.told

    def stop(self, error: BaseException) -> None:
        """See `Stage.stop`."""
        self._copy.stop(error)

    def let_go(self, *, kept: bool = False) -> None:
        """See `Stage.let_go`."""
        self._copy.finish()
        super().let_go(kept=kept)
