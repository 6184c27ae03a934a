"""The simulated machine: devices, their streams, events, memory and generators, and its counts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tools.device import memory
from tools.device.counts import Counts, Wait, place_here
from tools.device.memory import Block, HostRanges, Span
from tools.device.queues import Position, Queue, Scheduler
from tools.device.races import Access, Accesses, Order

__all__ = ["Event", "Machine", "Stream"]

_KEPT: Final = 10_000


@dataclass
class _Random:
    """A device's generator: a seed, and how often it was drawn from. Numbers are fixed when work is queued."""

    seed: int = 0
    offset: int = 0

    def next(self) -> int:
        self.offset += 1
        return (self.seed * 1_000_003 + self.offset * 7_919) % (1 << 63)


class Machine:
    """The machine that `simulated` yields.

    Attributes:
        counts: the counts.
        hazards: the errors found: memory that was read or written after it was freed and overwritten, host memory that
            was unregistered while a copy to or from it was queued, and accesses that no stream and no event orders
            (`races`): two jobs that touch the same memory, memory that is freed while another stream may read it.
        devices: how many there are.
        registered: where host memory begins that `cudaHostRegister` was asked to register, and that still is.
        scheduler: decides what runs when.
    """

    def __init__(self, seed: int, devices: int = 1) -> None:
        self.devices = devices
        self.order = Order()
        self.scheduler = Scheduler(seed, self.order)
        self.counts = Counts()
        self.hazards: list[str] = []
        self.ranges = HostRanges()
        self.registered: set[int] = set()
        self.random = [_Random() for _ in range(devices)]
        self._defaults = [Stream.made(self, number) for number in range(devices)]
        self._here = threading.local()
        self._copying: dict[int, tuple[int, int]] = {}  # the host memory of queued copies over the bus
        self._copies = 0
        self._on_host = Accesses()

    # -- streams

    def index(self, device: Any = None) -> int:
        """The number of a device; None, or without an index: the current one."""
        if isinstance(device, int):
            number: int | None = device
        else:
            number = None if device is None else torch.device(device).index
        if number is None:
            return int(getattr(self._here, "device", 0))
        if not 0 <= number < self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {number}; {self.devices} are simulated")
        return number

    def set_index(self, number: int) -> None:
        """Make a device the current one of this thread."""
        self._here.device = self.index(number)

    def default(self, device: Any = None) -> Stream:
        """The default stream of a device."""
        return self._defaults[self.index(device)]

    def current(self, device: Any = None) -> Stream:
        """The current stream of a device, in this thread."""
        number = self.index(device)
        found: Stream | None = getattr(self._here, "streams", {}).get(number)
        return found or self._defaults[number]

    def set_current(self, stream: Stream) -> None:
        """Make a stream the current one of its device, and its device the current one, for this thread."""
        if stream._machine is not self:
            raise RuntimeError("a stream of a machine that is no longer simulated")
        self._here.__dict__.setdefault("streams", {})[stream.device.index] = stream
        self._here.device = stream.device.index

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        if stream is None:
            yield
            return
        device, before = self.index(), self.current(stream.device)
        self.set_current(stream)
        try:
            yield
        finally:
            self.set_current(before)
            self._here.device = device

    # -- work

    def launch(
        self, device: int, run: Callable[[], object], reads: Iterable[Span], writes: Iterable[Span] = ()
    ) -> None:
        """Queue a kernel, or a copy on the device, on the current stream."""
        self.settle()
        self.counts.launches[next(iter(place_here()), None)] += 1
        reads, writes = list(reads), list(writes)
        with self.scheduler.lock:
            position = self.scheduler.push(self.current(device).queue, self._checked(run, (*reads, *writes)))
            self._ordered(position, reads, writes)

    def transfer(
        self, device: int, run: Callable[[], object], span: Span, host: torch.Tensor | None, *, to_host: bool
    ) -> None:
        """Queue a copy over the bus on the current stream.

        Args:
            host: the host memory that is used until the copy has run; None: memory that nobody else knows.
        """
        self.settle()
        where = next(iter(place_here()), None)
        self.counts.copies[where] += 1
        if to_host:
            self.counts.to_host += span.nbytes
        else:
            self.counts.to_device += span.nbytes
        with self.scheduler.lock:
            self._copies += 1
            number = self._copies
            if host is not None:
                self._copying[number] = memory.host_span(host)

            def work() -> None:
                self._copying.pop(number, None)
                run()

            position = self.scheduler.push(self.current(device).queue, self._checked(work, (span,)))
            self._ordered(position, [span] if to_host else [], [] if to_host else [span])
            if host is not None:
                start, nbytes = memory.host_span(host)
                access = Access(position, to_host, start, start + nbytes, place_here())
                self._unordered(access, self._on_host.add(access, self.order.at(position)))

    def _ordered(self, position: Position, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        clock, where = self.order.at(position), place_here()
        for spans, writing in ((reads, False), (writes, True)):
            for span in spans:
                access = Access(position, writing, *span.reach, where)
                self._unordered(access, span.block.accesses.add(access, clock))

    def _unordered(self, access: Access, others: Iterable[Access]) -> None:
        for one in others:
            what = f"{'written' if access.writes else 'read'} at {access.where or 'a place of the caller'}"
            before = f"{'written' if one.writes else 'read'} at {one.where or 'a place of the caller'}"
            self._hazard(f"memory is {what}, and nothing orders that with its being {before}")

    def _checked(self, run: Callable[[], object], spans: Iterable[Span]) -> Callable[[], None]:
        blocks = {id(span.block): span.block for span in spans}.values()
        where = place_here()

        def work() -> None:
            for block in blocks:
                if block.poisoned:
                    self._hazard(f"memory of {block.nbytes} bytes is used after it was freed; queued at {where}")
            with torch.no_grad(), torch.inference_mode(False):
                run()

        return work

    def _hazard(self, text: str) -> None:
        if len(self.hazards) < _KEPT:
            self.hazards.append(text)

    def wait(self, why: str, position: Position | None = None) -> None:
        """Let the host wait for a position; None: for everything."""
        self.settle()
        run_to, everything = self.scheduler.run_to, self.scheduler.run_all
        outstanding = everything() if position is None else run_to(position)
        self.counts.waits.append(Wait(why, place_here(), outstanding))

    # -- memory

    def allocate(
        self, device: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A new tensor on a device; nothing is queued."""
        self.settle()
        if stride is None:
            stride = _contiguous(size)
        numel = 0 if 0 in size else 1 + sum((many - 1) * step for many, step in zip(size, stride, strict=True))
        nbytes = numel * dtype.itemsize
        where = next(iter(place_here()), None)
        with self.scheduler.lock:
            _, tensor = memory.allocated(device, nbytes, self.current(device).queue, where)
            self.counts.took(nbytes, where)
        return memory.aliased(tensor, dtype, size, stride)

    def settle(self) -> None:
        """Free the blocks whose last tensor has gone."""
        with self.scheduler.lock:
            for block in memory.freed():
                if block.stream.owner is self.scheduler:  # otherwise it belongs to an earlier simulated machine
                    self._reclaim(block)

    def _reclaim(self, block: Block) -> None:
        def overwrite() -> None:
            block.memory[:] = memory.POISON
            block.poisoned = True
            if block.used:
                self.counts.gave(block.nbytes, block.where)

        waits = memory.settled(block)
        clock = self.order.at(*waits)
        for one in block.accesses.found:
            if not one.known_to(clock):
                self._hazard(
                    f"memory of {block.nbytes} bytes was freed while another stream may use it, as queued at "
                    f"{one.where or 'a place of the caller'}: record_stream was not called"
                )
        if not block.used:
            self.counts.gave(block.nbytes, block.where)  # the allocator passes it on at once
        self.scheduler.reclaim(overwrite, waits)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`Tensor.record_stream`."""
        block = memory.block_of(tensor)
        if stream.queue is not block.stream:
            block.used.add(stream.queue)

    def register(self, start: int, nbytes: int) -> bool:
        """`cudaHostRegister` -> False: a part of it is registered already."""
        added = self.ranges.add(start, nbytes)
        if added:
            self.registered.add(start)
        return added

    def unregister(self, start: int) -> bool:
        """`cudaHostUnregister` -> False: no registration begins there."""
        end = self.ranges.ends.get(start, start)
        with self.scheduler.lock:
            queued = [at for at, nbytes in self._copying.values() if start < at + nbytes and at < end]
        if queued:
            self._hazard(f"host memory is unregistered while {len(queued)} copies are queued; at {place_here()}")
        self.registered.discard(start)
        return self.ranges.remove(start)

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Whether a copy to or from this CPU tensor's memory is queued and has not run."""
        start, nbytes = memory.host_span(tensor)
        with self.scheduler.lock:
            return any(start < at + size and at < start + nbytes for at, size in self._copying.values())

    @property
    def copying(self) -> int:
        """How many copies to or from memory of the host are queued and have not run."""
        with self.scheduler.lock:
            return len(self._copying)

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether the host memory of this CPU tensor is registered, so that copies are queued."""
        return self.ranges.holds(*memory.host_span(tensor))


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for many in reversed(size):
        strides.append(step)
        step *= max(many, 1)
    return tuple(reversed(strides))


class Stream:
    """`torch.cuda.Stream` of the machine that is simulated now."""

    machine: Machine
    """The machine whose streams the constructor makes; `simulated` sets it on a subclass."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self._begin(self.machine, self.machine.index(device), priority)

    @classmethod
    def made(cls, machine: Machine, number: int) -> Stream:
        """A stream of a machine."""
        stream = cls.__new__(cls)
        stream._begin(machine, number, 0)
        return stream

    def _begin(self, machine: Machine, number: int, priority: int) -> None:
        self._machine = machine
        self.device = torch.device("cuda", number)
        self.device_index = number
        self.priority = priority
        self.queue: Queue = machine.scheduler.queue()

    @property
    def cuda_stream(self) -> int:
        """A unique number."""
        return id(self.queue)

    @property
    def stream_id(self) -> int:
        """A unique number."""
        return id(self.queue)

    def synchronize(self) -> None:
        """Let the host wait for all work queued so far."""
        self._machine.wait("Stream.synchronize", self.queue.end)

    def query(self) -> bool:
        """Whether all work queued so far is done."""
        return self._machine.scheduler.is_done(self.queue.end)

    def is_capturing(self) -> bool:
        """Graphs are not simulated."""
        return False

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Let later work of this stream wait for the present work of the other one."""
        self._machine.scheduler.push(self.queue, None, (other.queue.end,))

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all work queued so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._within = self._machine.on(self)
        self._within.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)


class Event:
    """`torch.cuda.Event`."""

    machine: Machine
    """See `Stream`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at: tuple[Machine, Position] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Place the event after the present work of the stream (None: the current one)."""
        stream = self.machine.current() if stream is None else stream
        machine = stream._machine
        self._at = machine, machine.scheduler.push(stream.queue, None)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of the stream (None: the current one) wait for the event."""
        if self._at is not None:
            stream = self._at[0].current() if stream is None else stream
            self._at[0].scheduler.push(stream.queue, None, (self._at[1],))

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._at is not None:
            self._at[0].wait("Event.synchronize", self._at[1])

    def query(self) -> bool:
        """Whether the event is done; also True if it was never recorded."""
        return self._at is None or self._at[0].scheduler.is_done(self._at[1])
