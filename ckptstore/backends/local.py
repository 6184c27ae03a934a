"""A store in a folder of a POSIX file system.

Create-if-absent (design: COMMIT, step 2), which every log slot rests on:

1. Write the bytes to a temporary file in the same folder and fsync it.
2. `os.link` it to its name: atomic, and refused if the name exists. Without hard links: `renameat2(RENAME_NOREPLACE)`;
   without that: `UnsupportedBackendError`.
3. fsync the folder. Only now is the slot acknowledged.
4. Unlink the temporary.

A segment is written under its own name, which nobody else uses (it holds a UUID), and counts once a record names it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ckptstore.backends.base import Backend, SegmentSink, SegmentSource, checked_folder, checked_key
from ckptstore.backends.directio import FileSink, FileSource
from ckptstore.backends.folders import Folders
from ckptstore.backends.posix import SYSTEM, Posix, write_some
from ckptstore.backends.system_errors import ABSENCES, reading, writing
from ckptstore.crashpoints import crash_point
from ckptstore.formats.errors import KeyExistsError, KeyNotFoundError, UnsupportedBackendError

_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_EXCLUSIVE_RENAME: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_TEMPORARY: Final = ".tmp-"
_in_flight: set[str] = set()
"""Temporaries this process is using now; shared by all backends so that none takes another's for a stray."""


class LocalBackend(Backend):
    """The store in the folder `path`, which the first write makes if it is missing.

    Args:
        path: the folder, relative or absolute.
        posix: the system calls; crash tests pass their own.
        url: what the user gave, for messages; `path` if None.
        direct: whether segments go past the page cache where the file system allows it.
    """

    cheap_looks = True

    def __init__(
        self, path: str | os.PathLike[str], posix: Posix = SYSTEM, *, url: str | None = None, direct: bool = True
    ) -> None:
        self.root = str(Path(path).absolute())
        self.url = os.fspath(path) if url is None else url
        self._posix = posix
        self._direct = direct
        self._folders = Folders(self.root, posix)
        with reading(self.root):
            self.read_only = self._exists() and not posix.writable(self.root)

    def _exists(self) -> bool:
        try:
            return stat.S_ISDIR(self._posix.stat(self.root).st_mode)
        except ABSENCES:
            return False

    def _path(self, key: str) -> str:
        return f"{self.root}/{checked_key(key)}"

    def get(self, key: str) -> bytes:
        """See `Backend.get`."""
        with FileSource(self._path(key), self._posix, direct=False) as source:
            data = bytearray(source.size)
            source.read_into(0, memoryview(data))
        return bytes(data)

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        path = self._path(key)
        with reading(path):
            status = self._posix.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise KeyNotFoundError(f"{path} is not a file")
        return status.st_size

    def create(self, key: str, data: bytes) -> None:
        """See `Backend.create`."""
        path = self._path(key)
        with writing(path):
            self._create(path, data)

    def _create(self, path: str, data: bytes) -> None:
        folder = path.rpartition("/")[0]
        self._folders.make(folder)
        temporary = _temporary(folder)
        _in_flight.add(temporary)
        try:
            self._write(temporary, data)
            crash_point("create.before-link")
            self._name(temporary, path)
            crash_point("create.linked")
            # Prevents: an acknowledged slot that a power cut forgets, whose number the next writer then uses again.
            self._folders.sync(folder)
            crash_point("create.synced")
        finally:
            self._discard(temporary)

    def _write(self, temporary: str, data: bytes) -> None:
        descriptor = self._posix.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            done, view = 0, memoryview(data)
            while done < len(view):
                done += write_some(self._posix, descriptor, view[done:], done)
            crash_point("create.temp-written")
            # Prevents: the name on disk before its bytes, an empty or torn slot that no one may ever replace, or such a
            # pin, which looks like damage and stops gc. If it fails the file is abandoned: a second try begins anew.
            self._posix.fsync(descriptor)
        finally:
            self._posix.close(descriptor)

    def _name(self, temporary: str, path: str) -> None:
        try:
            try:
                self._posix.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                self._posix.rename_exclusive(temporary, path)
        except FileExistsError as error:
            raise KeyExistsError(errno.EEXIST, "the object exists already", path) from error
        except OSError as error:
            if error.errno not in _NO_EXCLUSIVE_RENAME:
                raise
            why = "the file system has neither hard links nor RENAME_NOREPLACE: writers cannot exclude each other"
            raise UnsupportedBackendError(error.errno, why, path) from error

    def _discard(self, temporary: str) -> None:
        with suppress(OSError):  # a stray is harmless, and absent after a rename
            self._posix.unlink(temporary)
        _in_flight.discard(temporary)

    def replace(self, key: str, data: bytes) -> None:
        """See `Backend.replace`."""
        path = self._path(key)
        folder = path.rpartition("/")[0]
        with writing(path):
            self._folders.make(folder)
            temporary = _temporary(folder)
            _in_flight.add(temporary)
            try:
                self._write(temporary, data)
                self._posix.replace(temporary, path)
            finally:
                self._discard(temporary)

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        path = self._path(key)
        with writing(path), suppress(FileNotFoundError, NotADirectoryError):
            self._posix.unlink(path)

    def list(self, prefix: str) -> list[str]:
        """See `Backend.list`. Names that begin with a dot are not the store's."""
        names = (f"{folder}{name}" for folder, files in self._walk(checked_folder(prefix)) for name in files)
        return sorted(key for key in names if not key.rpartition("/")[2].startswith("."))

    def _walk(self, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every folder below `prefix` ("" or ending in "/"), itself included, with the names of its files."""
        path = f"{self.root}/{prefix}".rstrip("/")
        with reading(path):
            try:
                entries = self._posix.scandir(path)
            except ABSENCES:
                return  # nothing was created there yet, or it was removed meanwhile
        yield prefix, tuple(name for name, is_folder in entries if not is_folder)
        for name, is_folder in entries:
            if is_folder and not name.startswith("."):
                yield from self._walk(f"{prefix}{name}/")

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`."""
        for folder, _ in self._walk(checked_folder(prefix)):
            path = f"{self.root}/{folder}".rstrip("/")
            with writing(path):
                self._folders.make(path)
                # Prevents: acting on a name that a power cut takes back (gc deleting what a lost slot had dropped).
                self._folders.sync(path)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """See `Backend.open_sink`."""
        path = self._path(key)
        with writing(path):
            self._folders.make(path.rpartition("/")[0])
        return FileSink(path, self._posix, self._folders, size_hint, direct=self._direct)

    def open_source(self, key: str) -> SegmentSource:
        """See `Backend.open_source`."""
        return FileSource(self._path(key), self._posix, direct=self._direct)

    def probe(self) -> None:
        """See `Backend.probe`. Uses a temporary name, which `list` leaves out."""
        path = _temporary(self.root)
        _in_flight.add(path)
        try:
            with writing(path):
                self._create(path, b"first")
                with suppress(KeyExistsError):
                    self._create(path, b"second")
                    why = "creating a file twice succeeded: writers cannot exclude each other here"
                    raise UnsupportedBackendError(errno.EOPNOTSUPP, why, self.root)
        finally:
            self._discard(path)

    def stray_temporaries(self) -> tuple[str, ...]:
        """Keys of temporary files that a killed process left; `discard_stray` removes one.

        They are harmless. A file that a live process of this machine is using is not listed. One of another machine may
        be: if it is removed, that machine's create fails without effect, and is repeated by the commit protocol.
        """
        keys = (f"{folder}{name}" for folder, files in self._walk("") for name in files if name.startswith(_TEMPORARY))
        return tuple(sorted(key for key in keys if _is_stray(f"{self.root}/{key}")))

    def discard_stray(self, key: str) -> None:
        """Remove one of `stray_temporaries`. Raises `StorageError`."""
        path = f"{self.root}/{key}"
        with writing(path), suppress(FileNotFoundError):
            self._posix.unlink(path)


def _is_stray(temporary: str) -> bool:
    owner = temporary.rpartition("/")[2].removeprefix(_TEMPORARY).partition("-")[0]
    if owner == str(os.getpid()):
        return temporary not in _in_flight
    return not Path(f"/proc/{owner}").exists()


def _temporary(folder: str) -> str:
    return f"{folder}/{_TEMPORARY}{os.getpid()}-{os.urandom(12).hex()}"
