"""Keep stores in this process's memory, each under a name (``memory://name``): for tests, examples and notebooks.

Every `MemoryBackend` with the same name uses the same store. It lives until the process ends or
`MemoryBackend.forget` is called.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ckptstore.backends.base import (
    OBJECT_LIMIT,
    Backend,
    SegmentSink,
    SegmentSource,
    checked_folder,
    checked_key,
    too_long,
)
from ckptstore.errors import CorruptSegmentError, KeyExistsError, KeyNotFoundError, StorageError, StoreNotFoundError


class _Objects:
    """One store: its objects, and the lock that makes check and creation one step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_key: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> None:
        with self.lock:
            if key in self.by_key:
                raise KeyExistsError(errno.EEXIST, "the object exists already", key)
            self.by_key[key] = data


_stores: dict[str, _Objects] = {}
_stores_lock = threading.Lock()


class MemoryBackend(Backend):
    """The store called `name`, created on first use. Thread-safe; not shared with other processes."""

    cheap_looks = True
    anchored = True

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._name = name
        with _stores_lock:
            self._objects = _stores.setdefault(name, _Objects())

    @staticmethod
    def exists(name: str) -> bool:
        """Whether a store of this name exists."""
        with _stores_lock:
            return name in _stores

    @staticmethod
    def names() -> list[str]:
        """Names of the existing stores."""
        with _stores_lock:
            return sorted(_stores)

    @staticmethod
    def forget(name: str) -> None:
        """Drop the store; backends that have it open keep it. No error if it does not exist."""
        with _stores_lock:
            _stores.pop(name, None)

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """See `Backend.get`."""
        data = self._object(key)
        if len(data) > limit:
            raise too_long(f"{self.url}: {key}", len(data), limit)
        return data

    def _object(self, key: str) -> bytes:
        try:
            return self._objects.by_key[checked_key(key)]
        except KeyError as error:
            raise KeyNotFoundError(f"{self.url} has no object {key}") from error

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        return len(self._object(key))

    def create(self, key: str, data: bytes) -> None:
        """See `Backend.create`."""
        self._objects.create(checked_key(key), bytes(data))

    def replace(self, key: str, data: bytes) -> None:
        """See `Backend.replace`."""
        with self._objects.lock:
            self._objects.by_key[checked_key(key)] = bytes(data)

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        with self._objects.lock:
            self._objects.by_key.pop(checked_key(key), None)

    def list(self, prefix: str) -> list[str]:
        """See `Backend.list`."""
        folder = checked_folder(prefix)
        with self._objects.lock:
            return sorted(key for key in self._objects.by_key if key.startswith(folder))

    def sizes(self, prefix: str) -> dict[str, int]:
        """See `Backend.sizes`."""
        folder = checked_folder(prefix)
        with self._objects.lock:
            return {key: len(data) for key, data in sorted(self._objects.by_key.items()) if key.startswith(folder)}

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`: memory has nothing to sync."""
        checked_folder(prefix)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:  # noqa: ARG002 - memory needs no reservation
        """See `Backend.open_sink`."""
        return _MemorySink(self._objects, checked_key(key))

    def open_source(self, key: str) -> SegmentSource:
        """See `Backend.open_source`."""
        return _MemorySource(key, self._object(key))

    def probe(self) -> None:
        """See `Backend.probe`: a dictionary with a lock creates exclusively."""

    def medium(self) -> str:
        """See `Backend.medium`."""
        return "memory of this process"

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """See `Backend.above`. Uses the parts of the name, so that memory refuses the same places as a folder would."""
        names = self._name.split("/")
        return [(names[n], partial(_existing, "/".join(names[:n]))) for n in range(len(names) - 1, 0, -1)]

    @property
    def address(self) -> None:
        """See `Backend.address`."""
        return

    def reopened(self) -> MemoryBackend:
        """See `Backend.reopened`."""
        return MemoryBackend(self._name)


def _existing(name: str) -> MemoryBackend:
    if not MemoryBackend.exists(name):
        raise StoreNotFoundError.at(f"memory://{name}", " does not exist in this process")
    return MemoryBackend(name)


class _MemorySink(SegmentSink):
    def __init__(self, objects: _Objects, key: str) -> None:
        objects.create(key, b"")
        self._objects = objects
        self._key = key
        self._blocks: list[tuple[int, bytes]] | None = []

    def _open_blocks(self) -> list[tuple[int, bytes]]:
        if self._blocks is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self._key)
        return self._blocks

    def write(self, offset: int, data: memoryview) -> None:
        self._open_blocks().append((offset, bytes(data)))

    def seal(self, size: int) -> None:
        blocks, self._blocks = self._open_blocks(), None
        whole = bytearray(max([size, *(offset + len(block) for offset, block in blocks)]))
        for offset, block in blocks:
            whole[offset : offset + len(block)] = block
        with self._objects.lock:
            self._objects.by_key[self._key] = bytes(memoryview(whole)[:size])

    def abort(self) -> None:
        if self._blocks is not None:
            self._blocks = None
            with self._objects.lock:
                self._objects.by_key.pop(self._key, None)


class _MemorySource(SegmentSource):
    def __init__(self, key: str, data: bytes) -> None:
        self.size = len(data)
        self._key = key
        self._data: bytes | None = data

    def _open_data(self) -> bytes:
        if self._data is None:
            raise StorageError(errno.EBADF, "the segment is closed", self._key)
        return self._data

    def read_into(self, offset: int, out: memoryview) -> None:
        view, data = out.cast("B"), self._open_data()
        if offset < 0 or offset + len(view) > len(data):
            raise CorruptSegmentError(
                f"{self._key} ends at byte {len(data)}; bytes {offset} to {offset + len(view)} were asked for"
            )
        view[:] = memoryview(data)[offset : offset + len(view)]

    def map(self) -> memoryview:
        return memoryview(bytearray(self._open_data()))

    def close(self) -> None:
        self._data = None
