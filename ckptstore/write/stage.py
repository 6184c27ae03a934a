"""How the state of a save reaches the thread that stores it: read in place, as a copy, or unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptstore.formats.state import FlatState
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.layer_copies import Filling
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.saves.job import Job
from ckptstore.write.steps.updates import Update

__all__ = ["Bounded", "Copies", "InPlace", "Stage"]


class Stage:
    """A state on its way to the thread that stores it: all of it in its caller's memory, unless a subclass says else.

    Attributes:
        flat: the state.
        updates: what the optimizers did to reach it.
        snapshot: the copy that it is; None: it is no copy.
        feed: gives its units, each once it is copied; None: all of it can be read.
    """

    snapshot: Snapshot | None = None
    feed: Feed | None = None

    def __init__(self, flat: FlatState, updates: Sequence[Update] = ()) -> None:
        self.flat = flat
        self.updates = updates

    @property
    def told(self) -> bool:
        """Whether the call that gave the state raises what went wrong."""
        return False

    def arrive(self) -> None:
        """Wait until the copy is complete. Raises what stopped it."""

    def let_go(self, *, kept: bool = False) -> None:
        """Nobody reads the state any more: give its memory back, but not that of the snapshot if it is `kept`."""

    @contextmanager
    def given(self, job: Job) -> Iterator[None]:
        """Hand the state on for `job`, which gives it back if it is given up before another thread starts it.

        If this ``with`` raises, the job is given up, or another thread has ended it.

        Prevents: memory of a save that was cancelled, or handed on in vain, which nobody gives back.
        """

        def stopped() -> None:
            if not job.started:
                self.let_go()

        job.stops_with(stopped)
        try:
            yield
        except BaseException as error:
            if not job.give_up(error):
                job.wait_over()
            raise


class InPlace(Stage):
    """Training's own tensors, which do not change until the job is done or interrupted."""


class Copies(Stage):
    """A copied state, and copies of the gradients that explain it."""

    def __init__(
        self,
        state: Snapshot,
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
        filling: Filling | None = None,
    ) -> None:
        """
        Args:
            updates: what the optimizers did; they refer to memory of `gradients`.
            filling: what still copies into `state` (`layerwise_save`).
        """
        super().__init__(state.flat, updates)
        self.state = self.snapshot = state
        self._gradients = gradients
        self._filling = filling

    def arrive(self) -> None:
        """See `Stage.arrive`."""
        if self._filling is not None:
            self._filling.check()
        self.state.arrive()
        if self._gradients is not None:
            self._gradients.arrive()

    def let_go(self, *, kept: bool = False) -> None:
        """See `Stage.let_go`."""
        if self._filling is not None:
            self._filling.wait()  # Prevents: a copy into memory that is another snapshot's already.
        self.state.land()
        if self._gradients is not None:
            self._gradients.free()
        if not kept:
            self.state.free()


class Bounded(Stage):
    """A state that its caller copies unit by unit, under a byte budget, as another thread compresses it."""

    def __init__(self, feed: Feed, updates: Sequence[Update]) -> None:
        super().__init__(feed.flat, updates)
        self.feed = feed

    @property
    def told(self) -> bool:
        """See `Stage.told`."""
        assert self.feed is not None
        return self.feed.told or self.feed.spoiled

    def let_go(self, *, kept: bool = False) -> None:
        """See `Stage.let_go`."""
        del kept
        assert self.feed is not None
        self.feed.finish()
