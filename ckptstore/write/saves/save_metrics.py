"""What each save cost, told to whoever wants to know: how long training waited, for what, and how far the medium is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TypeAlias

from ckptstore.formats.state import FlatState
from ckptstore.host.caller_warnings import warn
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo

__all__ = ["Measured", "Meter", "OnMetrics", "SaveMetrics"]


@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """One save, as it ended.

    Attributes:
        step: the one that was given.
        kind: how it was stored: ``full``, ``delta`` or ``gradient``; None: it was not.
        nbytes: logical bytes of all tensors.
        stored: bytes on the medium; 0 if it failed.
        stall: seconds that the call kept training waiting: of `save` all, of `save_async` until the state was copied.
        waited: those of `stall` that went by until earlier saves gave way: memory, or a place in flight.
        durable: seconds from the call to the commit, or to the failure.
        in_flight: saves that were under way when this one was given, itself among them.
        lag: how many steps newer the newest step was that had been given when this one ended.
        error: what stopped it; None: it is durable.
        compacting: whether compaction in the writer's idle time was at work when it was given, and made way for it.
    """

    step: int
    kind: str | None
    nbytes: int
    stored: int
    stall: float
    waited: float
    durable: float
    in_flight: int
    lag: int
    error: BaseException | None = None
    compacting: bool = False

    @property
    def rate(self) -> float:
        """Logical bytes a second, from the call to the commit."""
        return self.nbytes / max(self.durable, 1e-9)


OnMetrics: TypeAlias = Callable[[SaveMetrics], object]
"""Is told of each save once, by a thread of the writer's."""


class Measured:
    """One save that is being measured. Its end is told when the call has returned, too, whichever comes last.

    Attributes:
        waited: see `SaveMetrics`.
        stored: bytes on the medium, if they are not those of the checkpoint: a rank's.
    """

    def __init__(self, meter: Meter, step: int, nbytes: int, began: float, in_flight: int, beside: bool) -> None:
        """
        Args:
            nbytes: of its tensors.
            began: when it was given, on the monotonic clock.
            in_flight: saves under way with it.
            beside: whether somebody works beside it.
        """
        self.waited = 0.0
        self.stored: int | None = None
        self._step = step
        self._nbytes = nbytes
        self._in_flight = in_flight
        self._beside = beside
        self._meter = meter
        self._began = began
        self._stall = 0.0
        self._ended: tuple[float, CheckpointInfo | None, BaseException | None] | None = None
        self._ends = False  # something else will say when
        self._left = 2
        self._lock = threading.Lock()

    def returned(self) -> None:
        """The call returns."""
        self._stall = time.monotonic() - self._began
        self._count()

    def ended(self, info: CheckpointInfo | None, error: BaseException | None = None) -> None:
        """It is durable, or was not saved."""
        self._ended = time.monotonic() - self._began, info, error
        self._count()

    def failed(self, error: BaseException) -> None:
        """The call raises `error`: so it ends, if nothing else has ended it."""
        with self._lock:
            if self._ends:
                return
        self.ended(None, error)

    def ends_with(self, done: Future[CheckpointInfo]) -> None:
        """It ends when `done` is."""
        with self._lock:
            self._ends = True

        def told(future: Future[CheckpointInfo]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            self.ended(None if error is not None else future.result(), error)

        done.add_done_callback(told)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        assert self._ended is not None
        seconds, info, error = self._ended
        self._meter.tell(
            SaveMetrics(
                self._step,
                None if info is None else info.kind,
                self._nbytes,
                0 if info is None else info.stored if self.stored is None else self.stored,
                self._stall,
                self.waited,
                seconds,
                self._in_flight,
                max(0, self._meter.newest - self._step),
                error,
                self._beside,
            )
        )


class Meter:
    """Tells of every save of a writer, one after the other.

    Attributes:
        newest: the newest step that was given.
        beside: whether somebody works beside the saves.
    """

    def __init__(self, on_metrics: OnMetrics | None) -> None:
        """
        Args:
            on_metrics: None: nobody wants to know.
        """
        self.newest = 0
        self.beside: Callable[[], bool] = lambda: False
        self._tell = on_metrics
        self._under_way = 0
        self._warned = False
        self._lock = threading.Lock()
        # A thread of its own: whoever is told may call the writer, whose threads would wait for themselves.
        self._thread = None if on_metrics is None else started_pool(1, "ckptstore-metrics")

    @property
    def under_way(self) -> int:
        """How many saves have been given and have not ended; for any thread."""
        return self._under_way

    def begin(self, flat: FlatState, step: int, began: float) -> Measured:
        """A step is given, since `began` on the monotonic clock."""
        nbytes = flat.nbytes
        with self._lock:
            self.newest = step
            self._under_way += 1
            return Measured(self, step, nbytes, began, self._under_way, self.beside())

    def tell(self, metrics: SaveMetrics) -> None:
        """A save has ended."""
        with self._lock:
            self._under_way -= 1
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is going
                self._thread.submit(self._told, metrics)

    def _told(self, metrics: SaveMetrics) -> None:
        assert self._tell is not None
        try:
            self._tell(metrics)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is no reason to harm a save
            if not self._warned:
                self._warned = True
                warn(f"on_metrics raised {type(error).__name__}, at step {metrics.step} and perhaps later: {error}")

    def close(self) -> None:
        """Wait until everything is told."""
        if self._thread is not None:
            self._thread.shutdown()
