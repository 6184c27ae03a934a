"""Segments that are collected in memory, block by block in any order, and put as a whole when they are complete."""

from __future__ import annotations

import contextlib
import errno
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from ckptstore.backends.base import SegmentSink
from ckptstore.errors import CkptError, KeyExistsError, StorageError

__all__ = ["GatheredSink", "in_order"]

_being_written: set[str] = set()
"""Segments that this process is writing: a name is taken once, here at least. On the medium nobody gives one twice."""
_taking = threading.Lock()


class GatheredSink(SegmentSink):
    """A segment of which the medium has nothing before it is sealed. Its memory is that of its blocks.

    Args:
        name: its URL and key, for errors.

    Attributes:
        perhaps: whether something of it may be on the medium, although it is not sealed.

    Raises `KeyExistsError` if this process is writing it already; if the medium has it, `seal` says so.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.perhaps = False
        self._blocks: dict[int, bytes] | None = {}
        with _taking:
            if name in _being_written:
                raise KeyExistsError(errno.EEXIST, "the segment exists already", name)
            _being_written.add(name)

    @abstractmethod
    def put(self, parts: Sequence[bytes], size: int) -> None:
        """Make the whole segment durable. Sets `perhaps` while that is so. Raises as `SegmentSink.seal`."""

    @abstractmethod
    def remove(self) -> None:
        """Delete what may be there. Raises `CkptError`."""

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`."""
        blocks = self._open_blocks()
        blocks[offset] = bytes(data)

    def _open_blocks(self) -> dict[int, bytes]:
        if self._blocks is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self.name)
        return self._blocks

    def seal(self, size: int) -> None:
        """See `SegmentSink.seal`."""
        blocks, self._blocks = self._open_blocks(), None
        parts = list(in_order(blocks, size))
        del blocks
        try:
            self.put(parts, size)
        finally:
            self._free()
        self.perhaps = False

    def abort(self) -> None:
        """See `SegmentSink.abort`."""
        self._blocks = None
        self._free()
        if self.perhaps:
            self.perhaps = False
            with contextlib.suppress(CkptError):  # no record names it: gc removes it
                self.remove()

    def _free(self) -> None:
        with _taking:
            _being_written.discard(self.name)


def in_order(blocks: Mapping[int, bytes], size: int) -> Iterator[bytes]:
    """The bytes of a segment of `size`: its blocks from the first on, what was not written as zeros.

    Args:
        blocks: by offset; they do not overlap. What lies beyond `size` is cut off.
    """
    at = 0
    for offset in sorted(blocks):
        if offset >= size:
            break
        if offset > at:
            yield bytes(offset - at)
        block = blocks[offset]
        yield block if offset + len(block) <= size else block[: size - offset]
        at = min(size, offset + len(block))
    if at < size:
        yield bytes(size - at)
