"""The one interface between the engine and a medium: objects named by keys.

Keys are relative, ``/``-separated ASCII (``log/00000000000000000007``). Small objects (log slots, folds, pins) are
created and read whole; segments are written through a `SegmentSink` and read through a `SegmentSource`, both by
position and from several threads at once. An implementation is 60-150 lines and knows nothing of the format.

What the commit protocol needs of a medium (design: COMMIT, GC, PINS), and the conformance suite checks:

1. `Backend.create` has exactly one winner per key, and what it acknowledged survives a power cut.
2. A sealed segment survives a power cut before `SegmentSink.seal` returns.
3. Listings of ``pins/`` and ``req/`` are strongly consistent. No decision rests on a listing of ``log/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

BLOCK = 4096
"""Alignment, in bytes, of segment writes: offset, length and memory address."""


class SegmentSink(ABC):
    """A new segment being written. `write` may be called from several threads; nobody sees it before `seal`'s commit."""

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`; both multiples of `BLOCK`, memory aligned to `BLOCK`. Blocks never overlap.

        The last block may be padded past the segment's end; `seal` cuts the file to its length. The caller may
        reuse the memory as soon as this returns. Raises `StorageError`.
        """

    @abstractmethod
    def seal(self, size: int) -> None:
        """Cut to exactly `size` bytes and make contents and name durable. Raises `StorageError`; then `abort`."""

    @abstractmethod
    def abort(self) -> None:
        """Give the segment up and remove what was written, as far as possible. Never raises; harmless after `seal`."""


class SegmentSource(ABC):
    """An open segment. Reads by position, thread-safe."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset`. Raises `CorruptSegmentError` if the object ends before, `StorageError` on I/O errors."""

    def map(self) -> memoryview | None:
        """The whole segment as a private, read-only mapping that outlives this object, or None if the medium has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Backend(ABC):
    """A medium that holds one store.

    Attributes:
        url: what the user gave, for messages.
        read_only: no write will succeed (read-only mount or credentials); readers then go unpinned.
    """

    url: str
    read_only: bool = False

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object. Raises `KeyNotFoundError`, `StorageError`."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Length in bytes. Raises `KeyNotFoundError`, `StorageError`."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Create-if-absent, whole and durable on return.

        Raises `KeyExistsError` if the key is present (then nothing changed). Any other `StorageError` leaves it
        *unknown* whether the object exists: the caller reads back.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite atomically: a reader sees the old or the new bytes. Not durable (pins only)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove; a missing key is no error. Raises `StorageError`."""

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Sorted keys below the folder `prefix` (``"log/"``), recursively; temporary files of the medium are left out."""

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Make every name now visible below `prefix` survive a power cut (POSIX: fsync the folder). Durable media: nothing."""

    @abstractmethod
    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """Begin a new segment of about `size_hint` bytes (never exact). Raises `KeyExistsError`, `StorageError`."""

    @abstractmethod
    def open_source(self, key: str) -> SegmentSource:
        """Open a segment for reading. Raises `KeyNotFoundError`, `StorageError`."""

    @abstractmethod
    def probe(self) -> None:
        """Check on the medium itself that a double create fails. Raises `UnsupportedBackendError`."""
