"""Copies from devices to host memory that are queued: who asks for one waits only when the bytes are needed.

A device copies to *registered* memory (`cudaHostRegister`, CUDA's Runtime API) by itself, at the speed of the bus,
while the host does other things. To other memory it copies through a buffer of the driver's, and the host waits.
Registering takes as long as touching the memory does, so memory is registered in the background, once, and kept.

A save queues its copies on a stream of its own for each device. That stream begins behind the work that was queued
before. `CopyQueue.gate` makes whatever is queued later wait for it. So the device sees the order that a blocking copy
would give, and the host waits for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Final, TypeGuard

import torch

from ckptstore.formats.sources import Bytes, TensorSource
from ckptstore.frameworks.torch_digest import device_digests
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.host.buffers import Region, region_of

__all__ = ["CopyQueue", "QueuedSource", "copy_queue", "device_of", "register", "registered"]

_log: Final = logging.getLogger("ckptstore")
_lock: Final = threading.Lock()
_registered: Final[weakref.WeakKeyDictionary[Region, bool]] = weakref.WeakKeyDictionary()
"""What was tried: whether the driver took it."""


def register(memory: Bytes, device: torch.device) -> bool:
    """Have devices copy to this memory by themselves -> whether they do. A second call does nothing.

    Takes about as long as touching the memory, without the interpreter's lock. A fork of this process does not have the
    memory any more: the kernel would copy all of it, because it must stay where it is for the device.

    Args:
        memory: made by `host.buffers.aligned`; the whole mapping that it lies in is registered.
        device: one that copies there. Every other device does so, too.
    """
    region = region_of(memory)
    if region is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    # Prevents: a context on the first GPU, of half a gigabyte, because a thread begins with that one as its device.
    with _lock, torch.cuda.device(device):
        if region in _registered:
            return _registered[region]
        status = torch.cuda.cudart().cudaHostRegister(region.address, region.nbytes, 0)  # type: ignore[no-untyped-call]
        _registered[region] = taken = int(status) == 0
        if not taken:
            # Prevents: a kernel of this thread that fails by what was refused here: CUDA keeps a thread's last error.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            _log.warning(
                "%d bytes of host memory could not be registered with the device (CUDA error %d): "
                "saves copy to it in the ordinary way, and wait for the device",
                region.nbytes,
                int(status),
            )
            return False
        # Prevents: a mapping at the same address later, whose bytes the device would write to the pages of this one.
        region.before_unmapping(partial(_unregister, region.address, device, os.getpid()))
        region.stay_out_of_forks()
    return True


def _unregister(address: int, device: torch.device, process: int) -> None:
    if os.getpid() != process:
        return
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def registered(memory: Bytes) -> bool:
    """Whether devices copy to this memory by themselves."""
    region = region_of(memory)
    return region is not None and _registered.get(region, False)


class QueuedSource:
    """A tensor on a device whose reads are only queued (`formats.sources.TensorSource`). See `CopyQueue`."""

    __slots__ = ("_recorded", "_source", "_stream", "dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TorchSource, stream: torch.cuda.Stream) -> None:
        """
        Args:
            stream: on which its copies are queued.
        """
        self.dtype = source.dtype
        self.shape = source.shape
        self.nbytes = source.nbytes
        self.origin = source.origin
        self.identity = source.identity
        self._source = source
        self._stream = stream  # not the queue: a cycle would keep the caller's tensors until it is collected
        self._recorded = False

    def view(self) -> None:
        """It is not in host memory."""

    def read(self, offset: int, out: Bytes) -> None:
        """Queue a copy to registered memory, within `CopyQueue.queueing`. `CopyQueue.copied` says when it is there."""
        if not self._recorded:
            # Prevents: memory of a tensor that is let go of, given to somebody else while the copy is only queued.
            self._source.resolved.record_stream(self._stream)
            self._recorded = True
        self._source.queue(offset, out)


class CopyQueue:
    """The queued copies of one save. One thread makes it and asks for copies; any may wait for them.

    Attributes:
        sources: the state's tensors. Reads of those on CUDA devices are queued; all others are as they were.
        waiting: what `copied` has given.
    """

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._digest_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._behind: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._given = sources
        self.waiting: set[Future[None]] = set()
        self.sources: dict[str, TensorSource] = {}
        for name, source in sources.items():
            self.sources[name] = self._queued(source) if _queues(source) else source

    def _queued(self, source: TorchSource) -> QueuedSource:
        assert source.stream is not None
        device = source.tensor.device
        stream = self._streams.setdefault(device, _copy_stream(device))
        behind = self._behind.setdefault(device, [])
        if source.stream not in behind:
            behind.append(source.stream)
            stream.wait_stream(source.stream)
        return QueuedSource(source, stream)

    def queues(self, name: str) -> bool:
        """Whether a tensor is read by queued copies."""
        return isinstance(self.sources[name], QueuedSource)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Reads of the tensors are queued within this ``with``. To enter it costs as much as to queue some copies."""
        with contextlib.ExitStack() as current:
            for stream in self._streams.values():
                current.enter_context(torch.cuda.stream(stream))
            yield

    def digests(self) -> Mapping[str, int]:
        """State digests that the devices compute beside the copies, by name. To look at one waits for it."""

        def on(source: TorchSource) -> torch.cuda.Stream:
            device = source.tensor.device
            if device not in self._digest_streams:
                self._digest_streams[device] = stream = _digest_stream(device)
                for before in self._behind[device]:
                    stream.wait_stream(before)
            return self._digest_streams[device]

        return device_digests(self._given, on)

    def copied(self, submit: Callable[[Callable[[], None]], object]) -> Future[None]:
        """Done when every copy that was queued so far is in host memory. It cannot be cancelled.

        Args:
            submit: has a thread wait for the device.
        """
        done: Future[None] = Future()
        # Prevents: memory that is given back, because nobody waits, while the device still writes to it.
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
        except RuntimeError:  # closed meanwhile: somebody has to wait
            work()
        return done

    def wait(self) -> None:
        """Return when every copy that was queued so far is in host memory."""
        self.marked()()

    def marked(self) -> Callable[[], None]:
        """What waits for every copy that was queued so far. It holds no tensor."""
        events = [(device, _event(stream)) for device, stream in self._streams.items()]

        def wait() -> None:
            for device, event in events:
                with torch.cuda.device(device):  # see `register`
                    event.synchronize()

        return wait

    def gate(self) -> None:
        """What is queued from now on, on the streams behind which tensors were read, waits for copies and digests."""
        for streams in (self._streams, self._digest_streams):
            for device, stream in streams.items():
                event = _event(stream)
                for waiting in {*self._behind[device], torch.cuda.current_stream(device)}:
                    waiting.wait_event(event)


def copy_queue(sources: Mapping[str, TensorSource]) -> CopyQueue | None:
    """How to copy a state with tensors on CUDA devices; None: it has none."""
    return None if device_of(sources) is None else CopyQueue(sources)


def device_of(sources: Mapping[str, TensorSource]) -> torch.device | None:
    """A CUDA device that a state has tensors on; None: all of them are elsewhere."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return next((one.tensor.device for one in sources.values() if _queues(one)), None)


def _queues(source: TensorSource) -> TypeGuard[TorchSource]:
    """Whether a device copies the tensor."""
    return isinstance(source, TorchSource) and source.stream is not None


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits leaves its core alone
    event.record(stream)
    return event


@lru_cache(maxsize=64)
def _digest_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above


@lru_cache(maxsize=64)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not annotated it
