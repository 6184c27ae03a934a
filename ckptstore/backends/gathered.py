"""Segments that are collected in memory, block by block in any order, and put as a whole when they are complete."""

from __future__ import annotations

import contextlib
import errno
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from ckptstore.backends.base import SegmentSink
from ckptstore.errors import CkptError, KeyExistsError, StorageError
from ckptstore.host.buffers import Bytes, aligned

__all__ = ["Blocks", "GatheredSink", "in_order"]

_CLASS: Final = 1 << 20
"""Blocks have a multiple of so many bytes. Shorter ones are not kept."""

_being_written: set[str] = set()
"""Segments that this process is writing: a name is taken once, here at least. On the medium nobody gives one twice."""
_taking = threading.Lock()


class Blocks:
    """Memory of segments that were sent, kept for the next ones: its first touch costs more than what it is for.

    Thread-safe.
    """

    def __init__(self, most: int) -> None:
        """
        Args:
            most: bytes that are kept.
        """
        self._most = most
        self._kept: deque[Bytes] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()

    def take(self, length: int) -> Bytes:
        """A page-aligned block of `length` bytes or more, with arbitrary contents; small ones are as they come."""
        if length < _CLASS:
            return np.empty(length, np.uint8) if length % 4096 else aligned(length)
        size = -(-length // _CLASS) * _CLASS
        with self._lock:
            fitting = [one for one in self._kept if size <= len(one) <= size + size // 2]
            if not fitting:
                return aligned(size)
            block = min(fitting, key=len)
            self._kept = deque(one for one in self._kept if one is not block)
            self._nbytes -= len(block)
            return block

    def give(self, blocks: Sequence[Bytes]) -> None:
        """Blocks that `take` gave and nobody reads any more. The oldest are forgotten when there are too many."""
        with self._lock:
            for block in blocks:
                if len(block) >= _CLASS:
                    self._kept.append(block)
                    self._nbytes += len(block)
            while self._nbytes > self._most:
                self._nbytes -= len(self._kept.popleft())


class GatheredSink(SegmentSink):
    """A segment of which the medium has nothing before it is sealed. Its memory is that of its blocks.

    Args:
        name: its URL and key, for errors.
        memory: of its backend.

    Attributes:
        perhaps: whether something of it may be on the medium, although it is not sealed.

    Raises `KeyExistsError` if this process is writing it already; if the medium has it, `seal` says so.
    """

    refers = True

    def __init__(self, name: str, memory: Blocks) -> None:
        self.name = name
        self._memory = memory
        self._taken: list[Bytes] = []
        self.perhaps = False
        self._blocks: dict[int, memoryview] | None = {}
        with _taking:
            if name in _being_written:
                raise KeyExistsError(errno.EEXIST, "the segment exists already", name)
            _being_written.add(name)

    @abstractmethod
    def put(self, parts: Sequence[memoryview], size: int) -> None:
        """Make the whole segment durable. Sets `perhaps` while that is so. Raises as `SegmentSink.seal`."""

    @abstractmethod
    def remove(self) -> None:
        """Delete what may be there. Raises `CkptError`."""

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`."""
        blocks = self._open_blocks()
        given = np.frombuffer(data, np.uint8)
        if not any(np.may_share_memory(given, one) for one in list(self._taken)):
            memory = self._take(len(data))
            np.copyto(memory, given)  # without the GIL, which training wants: `bytes` keeps it
            data = memory.data
        blocks[offset] = data

    def refer(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.refer`."""
        self._open_blocks()[offset] = data

    def block(self, length: int) -> Bytes:
        """See `SegmentSink.block`."""
        self._open_blocks()
        return self._take(length)

    def _take(self, length: int) -> Bytes:
        block = self._memory.take(length)
        self._taken.append(block)
        return block[:length]

    def _open_blocks(self) -> dict[int, memoryview]:
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
        parts.clear()
        # Not after an error: a request that was given up may read it still.
        self._memory.give(self._taken)
        self._taken = []

    def abort(self) -> None:
        """See `SegmentSink.abort`."""
        self._blocks = None
        self._taken = []
        self._free()
        if self.perhaps and not self.shared:
            with contextlib.suppress(CkptError):  # no record names it: gc removes it
                self.remove()
        self.perhaps = False

    def _free(self) -> None:
        with _taking:
            _being_written.discard(self.name)


def in_order(blocks: Mapping[int, memoryview], size: int) -> Iterator[memoryview]:
    """The bytes of a segment of `size`: its blocks from the first on, what was not written as zeros.

    Args:
        blocks: by offset; they do not overlap. What lies beyond `size` is cut off.
    """
    at = 0
    for offset in sorted(blocks):
        if offset >= size:
            break
        if offset > at:
            yield memoryview(bytes(offset - at))
        block = blocks[offset]
        yield block if offset + len(block) <= size else block[: size - offset]
        at = min(size, offset + len(block))
    if at < size:
        yield memoryview(bytes(size - at))
