"""Asynchronous copies from devices to host memory: the host waits only when it needs the bytes.

A device copies to *registered* memory (`cudaHostRegister`, CUDA's Runtime API) without the host, at the speed of the
bus. It copies to other memory through a buffer of the driver, and the host waits. Registering takes as long as touching
the memory, so memory is registered once, in the background, and kept.

A save queues its copies on a separate stream for each device. That stream waits for the work that was queued before.
`CopyQueue.gate` makes all work that is queued later wait for the copies. So the device sees the same order as with a
blocking copy, and the host does not wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Final

import torch

from ckptstore.formats.sources import BoxSource, Bytes, TensorSource
from ckptstore.frameworks.torch_digest import device_digests
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.host.buffers import MappedRegion, region_of

__all__ = [
    "CopyQueue",
    "PinnedCopy",
    "QueuedSource",
    "copy_queue",
    "device_of",
    "register",
    "registered",
    "uses_devices",
]

_log: Final = logging.getLogger("ckptstore")
_lock: Final = threading.Lock()
_registered: Final[weakref.WeakKeyDictionary[MappedRegion, bool]] = weakref.WeakKeyDictionary()
"""Every region that was tried, and whether the driver registered it."""


def register(memory: Bytes, device: torch.device) -> bool:
    """Register host memory with CUDA, so that devices copy to it without the host. A second call does nothing.

    Takes about as long as touching the memory, and releases the interpreter lock. The memory is excluded from forks of
    this process: otherwise the kernel would copy all of it at a fork, because registered pages cannot move.

    Args:
        memory: made by `host.buffers.aligned`. The whole mapping that contains it is registered.
        device: a device that copies there. The registration holds for all devices.

    Returns:
        Whether the memory is registered.
    """
    region = region_of(memory)
    if region is None or not uses_devices():
        return False
    # Prevents: a CUDA context of half a gigabyte on the first GPU, because that is the default device of a new thread.
    with _lock, torch.cuda.device(device):
        if region in _registered:
            return _registered[region]
        status = torch.cuda.cudart().cudaHostRegister(region.address, region.nbytes, 0)  # type: ignore[no-untyped-call]
        _registered[region] = taken = int(status) == 0
        if not taken:
            # Prevents: a later kernel of this thread that fails with this error: CUDA keeps a thread's last error.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            _say_refused(int(status))
            return False
        # Prevents: a later mapping at the same address for which the device would write to the pages of this one.
        region.before_unmapping(partial(_unregister, region.address, device, os.getpid()))
        region.stay_out_of_forks()
    return True


@lru_cache(maxsize=64)
def _say_refused(status: int) -> None:
    """Log once why memory is not registered."""
    _log.warning(
        "host memory could not be registered with the device (CUDA error %d): saves that are copied there use blocking "
        "copies instead",
        status,
    )


def _unregister(address: int, device: torch.device, process: int) -> None:
    if os.getpid() != process or not uses_devices():
        return
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def registered(memory: Bytes) -> bool:
    """Whether this memory is registered, so that devices copy to it without the host."""
    region = region_of(memory)
    return region is not None and _registered.get(region, False)


class QueuedSource:
    """A tensor on a device whose reads are asynchronous (`formats.sources.TensorSource`). See `CopyQueue`."""

    __slots__ = ("_recorded", "_source", "_stream", "dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TorchSource, stream: torch.cuda.Stream) -> None:
        """
        Args:
            source: the tensor.
            stream: the stream on which its copies are queued.
        """
        self.dtype = source.dtype
        self.shape = source.shape
        self.nbytes = source.nbytes
        self.origin = source.origin
        self.identity = source.identity
        self._source = source
        self._stream = stream  # not the queue: a reference cycle would keep the caller's tensors alive
        self._recorded = False

    def view(self) -> None:
        """None: the tensor is not in host memory."""

    def read(self, offset: int, out: Bytes) -> None:
        """Queue a copy to registered memory. Call it inside `CopyQueue.queueing`; `CopyQueue.copied` tells its end."""
        if not self._recorded:
            # Prevents: the memory of a freed tensor being reused before its queued copy has run.
            self._source.resolved.record_stream(self._stream)
            self._recorded = True
        self._source.queue(offset, out)


class CopyQueue:
    """The asynchronous copies of one save. One thread creates it and queues copies; any thread may wait for them.

    Attributes:
        sources: the state's tensors. `QueuedSource` replaces those on CUDA devices, also in a `BoxSource`; all others
            are unchanged.
        waiting: the futures that `copied` has returned.
    """

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._digest_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._behind: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._given = sources
        self.waiting: set[Future[None]] = set()
        self.sources: dict[str, TensorSource] = {}
        self._names: set[str] = set()
        for name, source in sources.items():
            if _on_device(source) is None:
                self.sources[name] = source
            else:
                self.sources[name] = self._queued(source)
                self._names.add(name)

    def _queued(self, source: TensorSource) -> TensorSource:
        if isinstance(source, BoxSource):
            return source.of(self._queued(source.source))
        assert isinstance(source, TorchSource)
        assert source.stream is not None
        device = source.tensor.device
        stream = self._streams.setdefault(device, _copy_stream(device))
        behind = self._behind.setdefault(device, [])
        if source.stream not in behind:
            behind.append(source.stream)
            stream.wait_stream(source.stream)
        return QueuedSource(source, stream)

    def queues(self, name: str) -> bool:
        """Whether the reads of a tensor are queued."""
        return name in self._names

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Queue reads of the tensors inside this ``with`` block. Entering it costs as much as queueing a few copies."""
        with contextlib.ExitStack() as current:
            for stream in self._streams.values():
                current.enter_context(torch.cuda.stream(stream))
            yield

    def digests(self, *, small: bool = False, known: Container[str] = ()) -> Mapping[str, int]:
        """State digests by name, which the devices compute concurrently with the copies. Reading one waits for it.

        Args:
            small: also of small tensors.
            known: names of tensors whose digests are known.
        """

        def on(source: TorchSource) -> torch.cuda.Stream:
            device = source.tensor.device
            if device not in self._digest_streams:
                self._digest_streams[device] = stream = _digest_stream(device)
                for before in self._behind[device]:
                    stream.wait_stream(before)
            return self._digest_streams[device]

        given = {name: source for name, source in self._given.items() if name not in known}
        return device_digests(given, on, small=small)

    def copied(self, submit: Callable[[Callable[[], None]], object]) -> Future[None]:
        """Return a future that is done when every copy queued so far is in host memory. It cannot be cancelled.

        Args:
            submit: runs a function in a thread, which waits for the device.
        """
        done: Future[None] = Future()
        # Prevents: a cancelled future, whose memory would be freed while the device still writes to it.
        done.set_running_or_notify_cancel()
        self.waiting.add(done)
        waiting = self.marked()

        def work() -> None:
            try:
                waiting()
            except BaseException as error:  # noqa: BLE001  # `done.result()` raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        try:
            submit(work)
        except RuntimeError:  # the pool was closed meanwhile: wait in this thread
            work()
        return done

    def wait(self) -> None:
        """Wait until every copy queued so far is in host memory."""
        self.marked()()

    def marked(self) -> Callable[[], None]:
        """Return a function that waits for every copy queued so far. It references no tensor."""
        events = [(device, _event(stream)) for device, stream in self._streams.items()]

        def wait() -> None:
            for device, event in events:
                with torch.cuda.device(device):  # see `register`
                    event.synchronize()

        return wait

    def gate(self) -> None:
        """Make later work wait for the copies and digests, on the streams of the tensors and on the current streams."""
        for streams in (self._streams, self._digest_streams):
            for device, stream in streams.items():
                event = _event(stream)
                for waiting in {*self._behind[device], torch.cuda.current_stream(device)}:
                    waiting.wait_event(event)


class PinnedCopy:
    """A copy of one small tensor on a CUDA device, in pinned memory of torch's. It is queued when this is made.

    torch keeps pinned memory for the next copy of this size: only the first one may wait for the device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """
        Args:
            tensor: work that is already queued on the current stream may still write to it; nothing may do so later.
        """
        self._device = tensor.device
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # see `QueuedSource.read`
        self._event = _event(stream)

    def wait(self) -> torch.Tensor:
        """Wait for the copy, in any thread, and return it."""
        with torch.cuda.device(self._device):  # see `register`
            self._event.synchronize()
        return self._host


def copy_queue(sources: Mapping[str, TensorSource]) -> CopyQueue | None:
    """The copy queue of a state with tensors on CUDA devices. None: it has no such tensors."""
    return None if device_of(sources) is None else CopyQueue(sources)


def uses_devices() -> bool:
    """Whether this process uses CUDA devices."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_of(sources: Mapping[str, TensorSource]) -> torch.device | None:
    """A CUDA device that has tensors of the state. None: no tensor is on a CUDA device."""
    if not uses_devices():
        return None
    return next((found.tensor.device for one in sources.values() if (found := _on_device(one)) is not None), None)


def _on_device(source: TensorSource) -> TorchSource | None:
    """The tensor, or the tensor of a box, if it is on a CUDA device, so that its copies are queued."""
    while isinstance(source, BoxSource):
        source = source.source
    return source if isinstance(source, TorchSource) and source.stream is not None else None


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: the waiting thread sleeps
    event.record(stream)
    return event


@lru_cache(maxsize=64)
def _digest_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above


@lru_cache(maxsize=64)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotation
