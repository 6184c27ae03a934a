"""Reports the cost of each save to `on_metrics`: how long training waited, for what, and how far the medium lags."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TypeAlias

from ckptstore.formats.sources import BoxSource
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warn
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoint_info import CheckpointInfo

__all__ = ["Crossing", "Meter", "OnMetrics", "PromptFunction", "SaveMeasurement", "SaveMetrics", "from_devices"]


@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """The metrics of one save that has ended.

    Attributes:
        step: the step of the save.
        kind: how it was stored: ``full``, ``delta`` or ``gradient``; None: it was not stored.
        nbytes: logical bytes of all tensors.
        stored: bytes on the medium; 0 if it failed.
        stall: seconds that the call blocked training: the whole time of `save`, or of `save_async` until the state was
            copied.
        waited: the part of `stall` spent waiting for earlier saves to free memory or a place in flight.
        durable: seconds from the call to the commit, or to the failure.
        in_flight: saves in flight when this one began, including itself.
        lag: when this save ended, how many steps its step was behind the newest step passed to the writer.
        error: the error that stopped it; None: it is durable.
        compacting: whether compaction in the writer's idle time was active when the save began, and paused for it.
        device_bytes: device memory that ckptstore held in this process when the save was called, besides the state's
            own tensors: the residuals of a `TopKHook`, copies of layers, constants of digests.
        from_device: bytes that devices sent to the host for this save.
        resent: of these, the bytes of tensors that were sent whole because the host computed them otherwise.
        sent_whole: with `DiffOptions.recompute`, why devices sent the whole state; None: they did not.
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
    device_bytes: int = 0
    from_device: int = 0
    resent: int = 0
    sent_whole: str | None = None

    @property
    def rate(self) -> float:
        """Logical bytes per second, from the call to the commit."""
        return self.nbytes / max(self.durable, 1e-9)


OnMetrics: TypeAlias = Callable[[SaveMetrics], object]
"""Called once for each save, by a thread of the writer."""


@dataclass(frozen=True, slots=True)
class PromptFunction:
    """A function for `on_metrics` that returns at once and calls no writer.

    The thread that ends a save calls it directly. Other functions are called by a thread of their own.
    """

    function: OnMetrics

    def __call__(self, metrics: SaveMetrics) -> object:
        """Call the function."""
        return self.function(metrics)


@dataclass(slots=True)
class Crossing:
    """What crosses from devices to the host for one save: see `SaveMetrics`.

    Attributes:
        nbytes: `SaveMetrics.from_device`.
        resent, sent_whole: see there.
    """

    nbytes: int = 0
    resent: int = 0
    sent_whole: str | None = None


class SaveMeasurement:
    """The measurement of one save. It is reported once the save has ended and the call has returned.

    Attributes:
        waited: see `SaveMetrics`.
        stored: bytes on the medium, if they differ from those of the checkpoint: the bytes of one rank.
        crossing: what devices send.
    """

    def __init__(
        self, meter: Meter, step: int, nbytes: int, began: float, in_flight: int, beside: bool, device_bytes: int = 0
    ) -> None:
        """
        Args:
            nbytes: the size of its tensors.
            began: when it began, on the monotonic clock.
            in_flight: saves in flight, including this one.
            beside: whether background work was active when it began.
            device_bytes: see `SaveMetrics`.
        """
        self.waited = 0.0
        self.stored: int | None = None
        self.crossing = Crossing()
        self._step = step
        self._nbytes = nbytes
        self._in_flight = in_flight
        self._beside = beside
        self._device_bytes = device_bytes
        self._meter = meter
        self._began = began
        self._stall = 0.0
        self._ended: tuple[float, CheckpointInfo | None, BaseException | None] | None = None
        self._ends = False  # a future will report its end
        self._left = 2
        self._lock = threading.Lock()

    def returned(self) -> None:
        """Note that the call returns."""
        self._stall = time.monotonic() - self._began
        self._count()

    def ended(self, info: CheckpointInfo | None, error: BaseException | None = None) -> None:
        """Note that the save is durable, or has failed."""
        self._ended = time.monotonic() - self._began, info, error
        self._count()

    def failed(self, error: BaseException) -> None:
        """Note that the call raises `error`: this ends the save, unless a future reports its end."""
        with self._lock:
            if self._ends:
                return
        self.ended(None, error)

    def ends_with(self, done: Future[CheckpointInfo]) -> None:
        """End the save when `done` resolves."""
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
                self._device_bytes,
                self.crossing.nbytes,
                self.crossing.resent,
                self.crossing.sent_whole,
            )
        )


def from_devices(flat: FlatState) -> int:
    """The bytes of the tensors, and of parts of tensors, that are on devices."""
    return sum(one.nbytes for one in flat.tensors.values() if bridge.away(_inner(one)))


def _inner(source: TensorSource) -> TensorSource:
    while isinstance(source, BoxSource):
        source = source.source
    return source


class Meter:
    """Reports every save of a writer, one after the other.

    Attributes:
        newest: the newest step passed to the writer.
        beside: returns whether background work is active.
    """

    def __init__(self, on_metrics: OnMetrics | None) -> None:
        """
        Args:
            on_metrics: called for each save; None: nothing is reported.
        """
        self.newest = 0
        self.beside: Callable[[], bool] = lambda: False
        self._tell = on_metrics
        self._under_way = 0
        self._warned = False
        self._lock = threading.Lock()
        self._unreported: deque[SaveMetrics] = deque()
        self._reporting = threading.Lock()
        # In a separate thread: `on_metrics` may call the writer, whose own threads would wait for themselves.
        prompt = on_metrics is None or isinstance(on_metrics, PromptFunction)
        self._thread = None if prompt else started_pool(1, "ckptstore-metrics")

    @property
    def under_way(self) -> int:
        """How many saves have begun and have not ended. Any thread may ask."""
        return self._under_way

    def begin(self, flat: FlatState, step: int, began: float) -> SaveMeasurement:
        """Begin to measure a save whose call began at `began` on the monotonic clock."""
        nbytes = flat.nbytes
        held = 0 if self._tell is None else bridge.device_bytes()
        with self._lock:
            self.newest = step
            self._under_way += 1
            found = SaveMeasurement(self, step, nbytes, began, self._under_way, self.beside(), held)
        if self._tell is not None and bridge.uses_devices():
            found.crossing.nbytes = from_devices(flat)
        return found

    def tell(self, metrics: SaveMetrics) -> None:
        """Report a save that has ended."""
        with self._lock:
            self._under_way -= 1
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                self._thread.submit(self._call_back, metrics)
        elif self._tell is not None:
            self._report(metrics)

    def _report(self, metrics: SaveMetrics) -> None:
        """Call a `PromptFunction` for `metrics`, or leave that to the thread that calls it now.

        Nobody waits here: a signal handler may save, and wait for this writer's threads, while its own thread reports.
        """
        self._unreported.append(metrics)
        while self._unreported and self._reporting.acquire(blocking=False):
            try:
                while self._unreported:
                    self._call_back(self._unreported.popleft())
            finally:
                self._reporting.release()

    def _call_back(self, metrics: SaveMetrics) -> None:
        """Call `on_metrics`. Its first error is a warning."""
        assert self._tell is not None
        try:
            self._tell(metrics)
        except Exception as error:  # noqa: BLE001  # no error of `on_metrics` may harm a save
            if not self._warned:
                self._warned = True
                warn(f"on_metrics raised {type(error).__name__}, at step {metrics.step} and perhaps later: {error}")

    def close(self) -> None:
        """Wait until every save is reported."""
        if self._thread is not None:
            self._thread.shutdown()
