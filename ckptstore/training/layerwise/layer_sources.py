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
from ckptstore.frameworks.device_memory import HeldTensors
from ckptstore.frameworks.torch_tensors import TorchSource, counted_changes
from ckptstore.training.layerwise.layers import place

__all__ = ["LayerSource", "marks_of", "staged"]

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

    sources: dict[str, TorchSource]
    private: bool
    refused: int
    marks: tuple[Hashable, ...]
    _events: tuple[tuple[torch.device, torch.cuda.Event], ...] = ()

    def gate(self) -> None:
        """Make the current stream wait for the copy on the device. The host does not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def watch(self, layer: str) -> Callable[[], None] | None:
        """A check to call when it is copied: raises `StorageError` if torch has counted a change since."""
        if self.private:
            return None

        def check() -> None:
            marks = marks_of(self.sources)
            changed = [name for name, was, now in zip(self.sources, self.marks, marks, strict=True) if was != now]
            if changed:
                raise StorageError(
                    f"layer {layer!r} changed while it was copied, by something else than the optimizers that were "
                    f"given ({changed[0]!r}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}): call "
                    "LayerwiseSnapshots.wait() before weights are changed in another way"
                )

        return check


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
    sources: dict[str, TorchSource] = {}
    streams = _behind(members)
    with torch.no_grad():
        for name, source in members.items():
            stream = streams.get(source.tensor.device)
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                data = source.resolved
                if stream is not None:
                    data.record_stream(stream)  # Prevents: memory that is reused while the copy is only queued.
                sources[name] = TorchSource(data.clone(memory_format=torch.contiguous_format))
                _copies.add(sources[name].tensor)
    events = tuple((device, stream.record_event()) for device, stream in streams.items())
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
