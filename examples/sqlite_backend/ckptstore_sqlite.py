"""An example of a backend by a third party: a store in one SQLite file, ``sqlite:///absolute/path.db``.

After ``pip install examples/sqlite_backend`` every command and ``ckptstore.open`` take such URLs. SQLite gives what the
commit protocol needs: an insert under a primary key has one winner, and a transaction is durable when it returns. It
holds a segment in memory until it is whole, so this suits small states.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptstore.backends.base import (
    OBJECT_LIMIT,
    Backend,
    SegmentSink,
    SegmentSource,
    checked_folder,
    checked_key,
    too_long,
)
from ckptstore.errors import (
    CorruptSegmentError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)

_SECONDS = 30.0
"""How long a call waits for another process's transaction."""


def open_url(url: str, create: bool, options: Mapping[str, Any]) -> Backend:
    """What the entry point names: ``(url, create, options) -> Backend``."""
    if options:
        raise UsageError(f"{url}: sqlite:// takes no storage_options")
    path = Path(unquote(urlsplit(url).path))
    if not path.is_absolute():
        raise UsageError(f"{url}: a sqlite URL is sqlite:// followed by an absolute path")
    if not create and not path.is_file():
        raise StoreNotFoundError(f"{url} does not exist")
    return SqliteBackend(path)


class _Connection(sqlite3.Connection):
    """Closed when its thread ends: Python 3.13 warns of one that is not."""

    def __del__(self) -> None:
        self.close()


class SqliteBackend(Backend):
    """The store in the file `path`. Thread-safe: each thread has a connection of its own."""

    segment_bytes = 512 << 20  # SQLite refuses values of a gigabyte

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._connections = threading.local()

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """One statement, which is one transaction. Raises `StorageError`, `KeyExistsError`."""
        try:
            if (connection := getattr(self._connections, "own", None)) is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                connection = sqlite3.connect(
                    self._path, timeout=_SECONDS, isolation_level=None, check_same_thread=False, factory=_Connection
                )
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB NOT NULL)")
                self._connections.own = connection
            return connection.execute(statement, values)
        except sqlite3.IntegrityError as error:
            raise KeyExistsError(errno.EEXIST, "the object exists already", str(values[0])) from error
        except (sqlite3.Error, OSError) as error:
            raise StorageError(errno.EIO, f"SQLite: {error}", self.url) from error

    def _value(self, what: str, key: str) -> Any:
        row = self._run(f"SELECT {what} FROM objects WHERE key = ?", checked_key(key)).fetchone()
        if row is None:
            raise KeyNotFoundError(f"{self.url} has no object {key}")
        return row[0]

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        if (size := self.size(key)) > limit:
            raise too_long(f"{self.url}: {key}", size, limit)
        return bytes(self._value("data", key))

    def size(self, key: str) -> int:
        return int(self._value("length(data)", key))

    def create(self, key: str, data: bytes) -> None:
        self._run("INSERT INTO objects VALUES (?, ?)", checked_key(key), bytes(data))

    def replace(self, key: str, data: bytes) -> None:
        self._run("INSERT OR REPLACE INTO objects VALUES (?, ?)", checked_key(key), bytes(data))

    def delete(self, key: str) -> None:
        self._run("DELETE FROM objects WHERE key = ?", checked_key(key))

    def list(self, prefix: str) -> list[str]:
        keys = self._run("SELECT key FROM objects ORDER BY key")
        folder = checked_folder(prefix)
        return [key for (key,) in keys if key.startswith(folder)]

    def settle(self, prefix: str) -> None:
        checked_folder(prefix)  # what a transaction shows is durable

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        self.create(key, b"")  # takes the name; `seal` fills it
        return _Sink(self, key)

    def open_source(self, key: str) -> SegmentSource:
        return _Source(key, bytes(self._value("data", key)))

    def probe(self) -> None:
        """A primary key has one winner: nothing to find out."""

    def close(self) -> None:
        if (connection := getattr(self._connections, "own", None)) is not None:
            connection.close()
            del self._connections.own


class _Sink(SegmentSink):
    """Collects a segment and stores it when it is sealed."""

    def __init__(self, backend: SqliteBackend, key: str) -> None:
        self._backend = backend
        self._key = key
        self._lock = threading.Lock()
        self._data: bytearray | None = bytearray()

    def write(self, offset: int, data: memoryview) -> None:
        with self._lock:
            if self._data is None:
                raise StorageError(errno.EBADF, "the segment is sealed or given up", self._key)
            if len(self._data) < offset:
                self._data.extend(bytes(offset - len(self._data)))
            self._data[offset : offset + len(data)] = data

    def seal(self, size: int) -> None:
        with self._lock:
            if self._data is None:
                raise StorageError(errno.EBADF, "the segment is sealed or given up", self._key)
            data, self._data = self._data, None
        self._backend.replace(self._key, bytes(data[:size]).ljust(size, b"\0"))

    def abort(self) -> None:
        with self._lock:
            given_up, self._data = self._data is not None, None
        if given_up:
            with suppress(StorageError):
                self._backend.delete(self._key)


class _Source(SegmentSource):
    def __init__(self, key: str, data: bytes) -> None:
        self.size = len(data)
        self._key = key
        self._data: bytes | None = data

    def read_into(self, offset: int, out: memoryview) -> None:
        if self._data is None:
            raise StorageError(errno.EBADF, "the segment is closed", self._key)
        view = out.cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise CorruptSegmentError(f"{self._key} ends at byte {self.size}, before byte {offset + len(view)}")
        view[:] = self._data[offset : offset + len(view)]

    def close(self) -> None:
        self._data = None
