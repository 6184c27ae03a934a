"""A medium that keeps no segments, to measure what would be written to it."""

from __future__ import annotations

import uuid

from ckptstore.backends.base import SegmentSink
from ckptstore.backends.memory import MemoryBackend

__all__ = ["Nowhere"]


class _Sink(SegmentSink):
    def write(self, offset: int, data: memoryview) -> None:
        """Discard the data."""

    def seal(self, size: int) -> None:
        """Do nothing: no data was kept."""

    def abort(self) -> None:
        """Do nothing: there is nothing to remove."""


class Nowhere(MemoryBackend):
    """A backend that discards segments: a dry run does all the work and gets the exact sizes."""

    def __init__(self) -> None:
        """Create a private, empty medium."""
        name = uuid.uuid4().hex
        super().__init__(name)
        MemoryBackend.forget(name)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:  # noqa: ARG002 - the signature of `Backend`
        """A sink that discards everything."""
        return _Sink()
