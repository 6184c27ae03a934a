"""A medium that keeps nothing: what is written to it is measured."""

from __future__ import annotations

import uuid

from ckptstore.backends.base import SegmentSink
from ckptstore.backends.memory import MemoryBackend

__all__ = ["Nowhere"]


class _Sink(SegmentSink):
    def write(self, offset: int, data: memoryview) -> None:
        """Forget it."""

    def seal(self, size: int) -> None:
        """Nothing to keep."""

    def abort(self) -> None:
        """Nothing to remove."""


class Nowhere(MemoryBackend):
    """Segments written here leave no trace: a dry run does all the work, and knows the exact sizes."""

    def __init__(self) -> None:
        """A medium of its own."""
        name = uuid.uuid4().hex
        super().__init__(name)
        MemoryBackend.forget(name)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:  # noqa: ARG002  # as every backend
        """A sink that forgets."""
        return _Sink()
