"""Segments that stay described while few of their files are open: a process has descriptors for a thousand at most."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ckptstore.backends.base import Backend, SegmentSource
from ckptstore.errors import CorruptSegmentError, KeyNotFoundError

__all__ = ["Handles"]

_OPEN: Final = 32


class Handles:
    """Files that were read last stay open, the others are opened again when they are needed. Thread-safe."""

    def __init__(self, backend: Backend, most: int = _OPEN) -> None:
        """Open none yet.

        Args:
            most: files that stay open when nobody reads them.
        """
        self._backend = backend
        self._most = most
        self._idle: OrderedDict[str, SegmentSource] = OrderedDict()
        self._lock = threading.Lock()

    def source(self, key: str, size: int) -> SegmentSource:
        """A source that opens its file when it is read."""
        return _Source(self, key, size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """See `SegmentSource.read_into`."""
        with self._lock:
            source = self._idle.pop(key, None)
        if source is None:
            try:
                source = self._backend.open_source(key)
            except KeyNotFoundError as error:
                raise CorruptSegmentError(f"{key}: the segment is committed but missing") from error
        try:
            source.read_into(offset, out)
        finally:
            self._put_back(key, source)

    def _put_back(self, key: str, source: SegmentSource) -> None:
        with self._lock:
            spare = [self._idle.pop(key)] if key in self._idle else []  # another thread had opened it, too
            self._idle[key] = source
            while len(self._idle) > self._most:
                spare.append(self._idle.popitem(last=False)[1])
        for one in spare:
            one.close()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for source in idle:
            source.close()


class _Source(SegmentSource):
    def __init__(self, handles: Handles, key: str, size: int) -> None:
        self._handles = handles
        self._key = key
        self.size = size

    def read_into(self, offset: int, out: memoryview) -> None:
        self._handles.read_into(self._key, offset, out)

    def map(self) -> memoryview | None:
        return None

    def close(self) -> None:
        """Nothing of its own is open."""
