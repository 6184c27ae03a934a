"""Collect a segment's blocks in memory, in any order, and write the segment as a whole when it is complete."""

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
"""Block sizes are multiples of this many bytes. Shorter blocks are not kept."""

_being_written: set[str] = set()
"""Segments that this process is writing. A name is used once in this process; on the medium it is unique (a UUID)."""
_taking = threading.Lock()


class Blocks:
    """Pool of memory from sent segments, for new ones: touching new memory costs more than filling it.

    Thread-safe.
    """

    def __init__(self, most: int) -> None:
        """
        Args:
            most: maximum bytes that the pool keeps.
        """
        self._most = most
        self._kept: deque[Bytes] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()

    def take(self, length: int) -> Bytes:
        """A block of `length` bytes or more, not cleared; page-aligned unless below 1 MiB and no multiple of 4096."""
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
        """Return blocks that came from `take` and that nobody reads. Drops the oldest blocks beyond the maximum."""
        with self._lock:
            for block in blocks:
                if len(block) >= _CLASS:
                    self._kept.append(block)
                    self._nbytes += len(block)
            while self._nbytes > self._most:
                self._nbytes -= len(self._kept.popleft())


class GatheredSink(SegmentSink):
    """A segment that the medium receives only when it is sealed. Until then its blocks are in memory.

    For backends of third parties, too: a subclass defines `put` and `remove`.

    Args:
        name: URL and key, for errors.
        memory: the backend's pool.

    Attributes:
        perhaps: whether the medium may hold a part of the segment although it is not sealed.

    Raises `KeyExistsError` if this process already writes this segment. If the medium has it, `seal` raises.
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
        """Make the whole segment durable. Sets `perhaps` while a part may be there. Raises as `SegmentSink.seal`.

        After `KeyExistsError` the object is another's: `seal` clears `perhaps`, so `abort` does not delete it.
        """

    @abstractmethod
    def remove(self) -> None:
        """Delete the object if it exists. Raises `CkptError`."""

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`."""
        blocks = self._open_blocks()
        given = np.frombuffer(data, np.uint8)
        if not any(np.may_share_memory(given, one) for one in list(self._taken)):
            memory = self._take(len(data))
            np.copyto(memory, given)  # releases the GIL, which training needs; `bytes` would hold it
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
        except KeyExistsError:
            self.perhaps = False  # Prevents: `abort` deletes the segment that another writer stored under this name.
            raise
        finally:
            self._free()
        self.perhaps = False
        parts.clear()
        # Not after an error: an abandoned request may still read the blocks.
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
    """The bytes of a segment of `size`: its blocks in order of offset, with zeros for what was not written.

    Args:
        blocks: by offset, without overlaps. Bytes beyond `size` are cut off.
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
