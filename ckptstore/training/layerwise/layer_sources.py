"""The source of a layer's copy to the host: the layer itself, or a copy of it on its device.

CUDA: each device has a separate stream for copies. They wait for what the current stream has queued so far, so they
start when the update is done, and delay nothing after it. On the CPU the same operations run without streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from ckptstore.errors import StorageError
from ckptstore.formats.sources import Bytes
from ckptstore.frameworks.torch_device_memory import HeldTensors
from ckptstore.frameworks.torch_tensors import TorchSource, counted_changes
from ckptstore.training.layerwise.layers import place

__all__ = ["CopyOnDevice", "LayerSource", "marks_of", "staged"]

_copies: Final = HeldTensors()


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One layer at the moment when its copy was requested.

    Attributes:
        sources: its tensors, by name; any thread may read them.
        private: the tensors are copies: the layer may change once `gate` was called.
        refused: how many copies on the device failed because it had no memory.
        marks: its memory, and how many changes torch had counted; see `marks_of`.
    """

    sources: Mapping[str, TorchSource | CopyOnDevice]
    private: bool
    refused: int
    marks: tuple[Hashable, ...]
    _events: tuple[tuple[torch.cuda.Stream, torch.cuda.Event], ...] = ()

    def gate(self) -> None:
        """Make the current stream, and that on which the copy was requested, wait for the copy on the device.

        The host does not wait.
        """
        for stream, event in self._events:
            for waiting in {stream, torch.cuda.current_stream(stream.device)}:
                waiting.wait_event(event)

    def free(self) -> None:
        """Free the copies on devices. Nothing may read them any more."""
        for one in self.sources.values():
            if isinstance(one, CopyOnDevice):
                one.free()

    def end(self, layer: str) -> Callable[[], None]:
        """What to call when it is in host memory: frees copies, or else checks the layer itself.

        The check raises `StorageError` if torch has counted a change since.
        """
        layers = {name: one for name, one in self.sources.items() if isinstance(one, TorchSource)}

        def check() -> None:
            # Prevents: a device that holds a copy of the whole state until the optimizers' next step.
            self.free()
            if self.private:
                return
            marks = marks_of(layers)
            changed = [name for name, was, now in zip(self.sources, self.marks, marks, strict=True) if was != now]
            if changed:
                raise StorageError(
                    f"layer {layer!r} changed while it was copied, by something else than the optimizers that were "
                    f"given ({changed[0]!r}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}): call "
                    "LayerwiseSnapshots.wait() before weights are changed in another way"
                )

        return check


class CopyOnDevice:
    """A copy of a tensor on its device (`formats.sources.TensorSource`), freed once it is in host memory."""

    __slots__ = ("_source", "dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TorchSource) -> None:
        self.dtype = source.dtype
        self.shape = source.shape
        self.nbytes = source.nbytes
        self.origin = source.origin
        self.identity = source.identity
        self._source: TorchSource | None = source
        _copies.add(source.tensor)

    def view(self) -> Bytes | None:
        """See `TorchSource.view`."""
        return self._copy.view()

    def read(self, offset: int, out: Bytes) -> None:
        """See `TorchSource.read`."""
        self._copy.read(offset, out)

    def free(self) -> None:
        """Free the copy. It cannot be read any more."""
        self._source = None

    @property
    def _copy(self) -> TorchSource:
        if self._source is None:
            raise StorageError("a layer's copy on its device was read after it was freed")
        return self._source


def staged(members: Mapping[str, TorchSource], mode: str) -> LayerSource:
    """The source of a layer as it is now, in the order of the current streams.

    Args:
        members: its tensors.
        mode: ``device`` copies them on the device. In other modes, or if the device has no memory for that, they are
            read from the layer itself.
    """
    refused = 0
    if mode == "device":
        try:
            return _on_device(members)
        except torch.OutOfMemoryError:
            refused = 1
    sources = dict(members)
    streams = _behind(members)
    for name, source in members.items():
        if (stream := streams.get(source.tensor.device)) is not None:
            with torch.cuda.stream(stream):
                sources[name] = TorchSource(source.tensor)  # it is read on the stream that is current here
    return LayerSource(sources, False, refused, marks_of(sources))


def _on_device(members: Mapping[str, TorchSource]) -> LayerSource:
    """Copy each tensor on its device. Raises `torch.OutOfMemoryError`."""
    sources: dict[str, CopyOnDevice] = {}
    streams = _behind(members)
    with torch.no_grad():
        for name, source in members.items():
            stream = streams.get(source.tensor.device)
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                data = source.resolved
                if stream is not None:
                    data.record_stream(stream)  # Prevents: memory that is reused while the copy is only queued.
                sources[name] = CopyOnDevice(TorchSource(data.clone(memory_format=torch.contiguous_format)))
    events = tuple((torch.cuda.current_stream(device), one.record_event()) for device, one in streams.items())
    return LayerSource(sources, True, 0, marks_of(members), events)


def _behind(members: Mapping[str, TorchSource]) -> dict[torch.device, torch.cuda.Stream]:
    """The copy stream of each CUDA device; it waits for what the current stream has queued."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for source in members.values():
        device = source.tensor.device
        if source.tensor.is_cuda and device not in streams:
            streams[device] = _stream(device)
            streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not annotated it


def marks_of(members: Mapping[str, TorchSource]) -> tuple[Hashable, ...]:
    """A mark of each tensor, which changes if its memory changes or torch counts a change (`counted_changes`)."""
    return tuple((place(source.tensor), counted_changes(source.tensor)) for source in members.values())
