"""A store in an fsspec file system: one that the user made, or that of a URL whose scheme has no other backend.

The store needs an exclusive create, which most of these file systems lack. Three ways are tried, and the probe refuses
the file system if none has exactly one winner:

1. Write the object under a temporary name that begins with a dot, and give it its final name with a hard link, if the
   file system has `link`. Nobody sees a part of such an object.
2. ``open("xb")``. Readers may see a prefix of the object (`log.partial_objects` waits for the rest).
3. `pipe_file(mode="create")`, unless it is fsspec's own implementation: that only looks before it writes, and the probe
   may fail to notice this.

A move is not among them: `mv` replaces what is there, and in most file systems copies and deletes. Reading works
everywhere.

Objects are as durable as the file system makes them: fsspec has no sync.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from ckptstore.backends.base import (
    OBJECT_LIMIT,
    Backend,
    SegmentSink,
    SegmentSource,
    checked_folder,
    checked_key,
    too_long,
)
from ckptstore.backends.gathered import Blocks, GatheredSink
from ckptstore.backends.store_names import canonical, checked_name, without_credentials
from ckptstore.backends.system_errors import ON_THE_WAY
from ckptstore.errors import (
    CkptError,
    CorruptSegmentError,
    ForeignObjectError,
    KeyExistsError,
    KeyNotFoundError,
    MissingDependencyError,
    ReadOnlyError,
    StorageError,
    UnsupportedBackendError,
    UsageError,
)
from ckptstore.host.threads import workers

__all__ = ["FsspecBackend", "known_scheme", "opened"]

_RACERS: Final = 4
_RACES: Final = 16
_PROBED: Final = 32
"""Bytes of an object that the probe creates."""
_TEMPORARY: Final = ".tmp-"
"""Prefix of an object that is being created. A killed process leaves it; it is harmless, and listings omit it."""
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL, errno.ENOTTY}
)
"""Errors of a medium without hard links: nothing was created."""
_TRIES: Final = 3
"""Maximum number of reads of an object whose data comes shorter than its size."""
_T = TypeVar("_T")


def known_scheme(scheme: str) -> bool:
    """Whether fsspec has an implementation of the scheme."""
    return scheme in fsspec.available_protocols()


def opened(url: str, scheme: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises `UsageError`, `MissingDependencyError`."""
    failure = ""
    try:
        kind = fsspec.get_filesystem_class(scheme)
        if not issubclass(kind, LocalFileSystem):  # there the system says what a path is
            checked_name(shown(url), shown(url).partition("://")[2].removeprefix("/"))
        path = str(kind._strip_protocol(url))
        inferred = kind._get_kwargs_from_urls(url)
        return kind(**{"use_listings_cache": False, "skip_instance_cache": True, **inferred, **options}), path
    except UsageError:
        raise
    except ImportError as error:
        missing = str(error)
        raise MissingDependencyError(f"{scheme}:// needs another package: {missing}") from None
    except Exception as error:  # noqa: BLE001 - a file system raises anything; its text may hold credentials
        failure = type(error).__name__
    raise UsageError(f"{shown(url)}: fsspec cannot open this URL with these options ({failure})")


def shown(url: str) -> str:
    """The URL without user, password and query, which carry credentials in some schemes."""
    return without_credentials(url).partition("?")[0]


def anchored(filesystem: Any, path: str) -> str:
    """The path in a file system that the user made. A relative path of local files is made absolute now.

    fsspec would resolve it against the current folder at every call.

    Raises:
        UsageError: see `checked_name`.
    """
    if isinstance(filesystem, LocalFileSystem):
        return str(filesystem._strip_protocol(path))
    bare = without_credentials(path)
    name = bare[bare.find("://") + 3 :] if "://" in bare else bare  # fsspec takes URLs for paths
    checked = checked_name(bare, name.removeprefix("/"))
    return path.removesuffix(name) + "/" * name.startswith("/") + checked


class FsspecBackend(Backend):
    """The store in folder `path` of an fsspec file system.

    Args:
        filesystem: any fsspec file system. Its cache of listings is invalidated before each look.
        path: path of the folder.
        url: the URL that it was opened by, for messages and other processes; None for a file system that the user made,
            which is shown as its protocol and `path`.
        options: the options that the file system of `url` was made with.
    """

    def __init__(
        self, filesystem: Any, path: str, *, url: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        protocol = getattr(filesystem, "protocol", "fsspec")
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        self.url = f"{scheme}://{path.lstrip('/')}" if url is None else shown(url)
        # Prevents: another process that opens a different store by this URL: in its own memory, or in another account.
        self._address = canonical(self.url) if url == self.url else None
        self._options = dict(options or {})
        self._fs = filesystem
        self._root = path.rstrip("/")
        self._links = _linker(filesystem)
        self._replaces = isinstance(_innermost(filesystem), LocalFileSystem)
        # Until a probe has checked it. In another file system `link` may be anything.
        sure = getattr(type(_innermost(filesystem)), "link", None) is LocalFileSystem.link
        self._how: Callable[[str, bytes], None] = self._link if sure else self._open_exclusively
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def address(self) -> str | None:
        """See `Backend.address`. None if the user made the file system, or if the URL contains credentials."""
        return self._address

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """See `Backend.storage_options`."""
        return self._options

    @property
    def shows_parts(self) -> bool:
        """See `Backend.shows_parts`: False with hard links, which publish only complete objects."""
        return self._how != self._link

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _name(self, key: str) -> str:
        return f"{self.url}: {key}" if key else self.url

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """See `Backend.get`. If the data comes shorter than the file's size, it is read again, up to a limit."""
        for _ in range(_TRIES):
            size = self.size(key)
            if size > limit:
                raise too_long(self._name(key), size, limit)
            data = self._asked(key, lambda path: bytes(self._fs.cat_file(path)))
            if len(data) > limit:
                raise too_long(self._name(key), len(data), limit)
            if len(data) >= size:
                return data
        raise StorageError(ON_THE_WAY, f"cannot read: {len(data)} of {size} bytes came", self._name(key))

    def size(self, key: str) -> int:
        """See `Backend.size`."""

        def call(path: str) -> int:
            self._fs.invalidate_cache()
            found = self._fs.info(path)
            if found["type"] != "file":
                raise ForeignObjectError(f"{self._name(key)} is a {found['type']}, not an object of a store")
            return int(found["size"])

        return self._asked(key, call)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end`; fewer only if the object is shorter. Raises as `get`."""
        return self._asked(key, lambda path: bytes(self._fs.cat_file(path, start=start, end=end)))

    def create(self, key: str, data: bytes) -> None:
        """See `Backend.create`."""
        self._written(key, lambda path: self._how(path, bytes(data)), make=True)

    def _ways(self) -> Sequence[Callable[[str, bytes], None]]:
        """The ways to create an object, best first."""
        ways = (self._link, self._open_exclusively, self._pipe)
        return ways if self._links is not None else ways[1:]

    def _link(self, path: str, data: bytes) -> None:
        assert self._links is not None
        beside = f"{path.rpartition('/')[0]}/{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            try:
                with self._fs.open(beside, "xb") as file:
                    file.write(data)
            except Exception as error:
                raise _UnsentError(error) from error
            try:
                # Prevents: a reader that mistakes the first half of a slot for a damaged slot.
                self._links(beside, path)
            except FileNotFoundError as error:  # someone removed it as a stray, or deleted the store
                raise _UnsentError(OSError(ON_THE_WAY, "the temporary file is gone")) from error
            except (OSError, NotImplementedError) as error:
                if not isinstance(error, NotImplementedError) and error.errno not in _NO_LINKS:
                    raise
                self._links, self._how = None, self._open_exclusively
                self._how(path, data)
        finally:
            with contextlib.suppress(Exception):  # a stray is harmless
                self._fs.rm_file(beside)

    def _pipe(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data, mode="create")

    def _open_exclusively(self, path: str, data: bytes) -> None:
        with self._fs.open(path, "xb") as file:
            file.write(data)

    def replace(self, key: str, data: bytes) -> None:
        """See `Backend.replace`. Local files replace the old ones by a move; elsewhere a reader may see a part."""
        self._written(key, lambda path: self._replaced(path, bytes(data)), make=True)

    def _replaced(self, path: str, data: bytes) -> None:
        if not self._replaces:
            self._fs.pipe_file(path, data)
            return
        beside = f"{path.rpartition('/')[0]}/{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            self._fs.pipe_file(beside, data)
            if self._fs.isdir(path):  # Prevents: a move into the folder.
                raise IsADirectoryError(errno.EISDIR, "a folder", path)
            self._fs.mv(beside, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(beside)
            raise

    def put(self, key: str, parts: Sequence[memoryview]) -> None:
        """Write a segment from its parts. Raises `KeyExistsError`, `StorageError`."""

        def call(path: str) -> None:
            self._fs.invalidate_cache()
            if self._fs.exists(path):
                raise KeyExistsError(errno.EEXIST, "the segment exists already", self._name(key))
            with self._fs.open(path, "wb") as file:
                for part in parts:
                    file.write(bytes(part))  # some file systems accept no memoryview

        self._written(key, call, make=True)

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        with contextlib.suppress(KeyNotFoundError):
            self._written(key, self._fs.rm_file)

    def list(self, prefix: str) -> list[str]:
        """See `Backend.list`."""
        folder = checked_folder(prefix)
        root = self._fs._strip_protocol(f"{self._root}/{folder}".rstrip("/"))

        def call(_: str) -> list[str]:
            self._fs.invalidate_cache()
            return [str(path) for path in self._fs.find(root)]

        try:
            found = self._asked(prefix, call, root)
        except KeyNotFoundError:
            return []
        keys = (f"{folder}{path.removeprefix(root).lstrip('/')}" for path in found)
        return sorted(key for key in keys if key != folder and not key.rpartition("/")[2].startswith("."))

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`: fsspec has no sync."""
        checked_folder(prefix)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:  # noqa: ARG002 - memory needs no reservation
        """See `Backend.open_sink`."""
        return _FsspecSink(self, checked_key(key))

    def open_source(self, key: str) -> SegmentSource:
        """See `Backend.open_source`."""
        return _FsspecSource(self, checked_key(key))

    def probe(self) -> None:
        """See `Backend.probe`: a second create must fail, and of several at once exactly one must win, each time."""
        failures: list[str] = []
        for how in self._ways():
            self._how = how
            why = "fsspec's own, which looks and then writes" if how == self._pipe and self._looks() else None
            why = self._not_exclusive() if why is None else why
            if not why:
                return
            failures.append(why)
        failures = failures[-2:]  # without a working link: the other two reasons are enough
        raise UnsupportedBackendError(
            errno.EOPNOTSUPP,
            f"this file system does not create exclusively (open('xb'): {failures[0]}; mode='create': {failures[1]}), "
            "so two writers could not exclude each other; the store can be read but not written; use a path, s3://, "
            "gs:// or az://",
            self.url,
        )

    def _looks(self) -> bool:
        """Whether `pipe_file` is fsspec's default implementation, in the innermost of the wrapped file systems."""
        found = self._fs
        while isinstance(inner := getattr(found, "fs", None), fsspec.AbstractFileSystem):
            found = inner
        return getattr(type(found), "pipe_file", None) is fsspec.AbstractFileSystem.pipe_file

    def _not_exclusive(self) -> str:
        """Why the current way of creating is not exclusive; empty if no test showed a fault."""
        start = threading.Barrier(_RACERS)

        def race(key: str, data: bytes) -> bool:
            start.wait()
            return self._won(key, data)

        for _ in range(_RACES):
            key = f"probe/{uuid.uuid4().hex}"
            try:
                with workers(_RACERS, "probe") as found:
                    racers = [found.pool.submit(race, key, bytes([n]) * _PROBED) for n in range(_RACERS)]
                    won = sum(racer.result() for racer in racers)
                if won != 1:
                    return f"{won} of {_RACERS} won at once"
                if len(set(self.get(key))) != 1 or self.size(key) != _PROBED:
                    return "the created object is missing"  # the link was a symbolic one, to a deleted file
                if self._won(key, b"late"):
                    return "a second create succeeded"
            except CkptError as error:
                return str(error)
            finally:
                self._forget(key)
        return ""

    def _won(self, key: str, data: bytes) -> bool:
        try:
            self.create(key, data)
        except KeyExistsError:
            return False
        return True

    def _forget(self, key: str) -> None:
        try:
            self.delete(key)
            self._fs.rmdir(f"{self._root}/probe")
        except Exception:  # noqa: BLE001 - a leftover is harmless, and another probe may be running
            pass

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """See `Backend.above`."""
        names = self._root.lstrip("/").split("/")
        ends = [(names[n], "/" + "/".join(names[n:])) for n in range(len(names) - 1, 0, -1)]
        return [(name, partial(self._beside, end)) for name, end in ends]

    def _beside(self, end: str) -> FsspecBackend:
        return FsspecBackend(self._fs, self._root.removesuffix(end), url=self.url.rstrip("/").removesuffix(end))

    def medium(self) -> str:
        """See `Backend.medium`."""
        return f"fsspec ({type(self._fs).__name__})"

    def _written(self, key: str, call: Callable[[str], None], *, make: bool = False) -> None:
        """Change something in the file system. Translates every error to the project's."""
        path = self._path(key)

        def change(_: str) -> None:
            if make:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            call(path)
            self._fs.invalidate_cache()

        self._asked(key, change, path, writing=True)

    def _asked(self, key: str, call: Callable[[str], _T], path: str | None = None, *, writing: bool = False) -> _T:
        """Call the file system. Translates every error to the project's, without its text: it may hold credentials."""
        path = self._path(key) if path is None else path
        # Its event loop runs in a thread of the parent. (File systems without a loop work in a fork.)
        if getattr(self._fs, "async_impl", False) and os.getpid() != self._process:
            raise UsageError(
                f"{self.url}: this store was opened before a fork, and its file system has threads of the parent only: "
                "open it again in the child, with a file system made there, or after spawn or forkserver"
            )
        failure: CkptError
        unsent = False
        try:
            try:
                return call(path)
            except _UnsentError as error:
                unsent = True
                raise error.why from None
        except CkptError:
            raise
        except FileExistsError:
            failure = KeyExistsError(errno.EEXIST, "the object exists already", self._name(key))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            failure = KeyNotFoundError(f"{self._name(key)} does not exist")
        except PermissionError as error:
            kind = ReadOnlyError if writing else StorageError
            failure = kind(error.errno or errno.EACCES, "not permitted", self._name(key))
        except Exception as error:  # noqa: BLE001 - file systems raise anything
            code = error.errno if isinstance(error, OSError) and error.errno else ON_THE_WAY
            told = f"cannot {'write' if writing else 'read'} ({type(error).__name__})"
            failure = StorageError(code, told, self._name(key))
        if isinstance(failure, StorageError):
            failure.unsent = unsent
        raise failure


class _UnsentError(Exception):
    """The object was not created, and this attempt will not create it later. Not raised outside this module."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


def _innermost(filesystem: Any) -> Any:
    """The file system inside the wrappers that only put a folder before each path."""
    while isinstance(filesystem, DirFileSystem):
        filesystem = filesystem.fs
    return filesystem


def _linker(filesystem: Any) -> Callable[[str, str], None] | None:
    """The call that gives a file a second name unless that exists; None: the file system has no such call."""
    if isinstance(filesystem, DirFileSystem):
        inner = _linker(filesystem.fs)
        return None if inner is None else lambda one, other: inner(filesystem._join(one), filesystem._join(other))
    found = getattr(filesystem, "link", None)
    return found if callable(found) else None


class _FsspecSink(GatheredSink):
    def __init__(self, backend: FsspecBackend, key: str) -> None:
        super().__init__(f"{backend.url}: {key}", Blocks(0))
        self._backend = backend
        self._key = key

    def put(self, parts: Sequence[memoryview], size: int) -> None:
        self.perhaps = True
        self._backend.put(self._key, parts)
        if (found := self._backend.size(self._key)) != size:
            raise StorageError(errno.EIO, f"{found} of {size} bytes arrived", self.name)

    def remove(self) -> None:
        self._backend.delete(self._key)


class _FsspecSource(SegmentSource):
    def __init__(self, backend: FsspecBackend, key: str) -> None:
        self._backend = backend
        self._key = key
        self._closed = False
        self.size = backend.size(key)

    def read_into(self, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        self._check_open()
        if offset < 0 or offset + len(view) > self.size:
            raise CorruptSegmentError(
                f"{self._key} ends at byte {self.size}; bytes {offset} to {offset + len(view)} were asked for"
            )
        if not len(view):
            return
        end = offset + len(view)
        for _ in range(_TRIES):
            data = self._backend.read_range(self._key, offset, end)
            if len(data) == len(view):
                view[:] = data
                return
        if self._backend.size(self._key) < end:
            raise CorruptSegmentError(f"{self._key} ends at byte {offset + len(data)}, although it had {self.size}")
        told = f"cannot read: {len(data)} of {len(view)} bytes came"
        raise StorageError(ON_THE_WAY, told, f"{self._backend.url}: {self._key}")

    def map(self) -> memoryview | None:
        self._check_open()
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(errno.EBADF, "the segment is closed", self._key)

    def close(self) -> None:
        self._closed = True
