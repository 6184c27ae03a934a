"""Make a temporary folder for trial saves on the medium of a store, existing or planned."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from ckptstore.errors import StorageError, StoreNotFoundError, UsageError
from ckptstore.exchange.atomic_files import refuse_inside_store
from ckptstore.store import Store
from ckptstore.store import open as open_store

__all__ = ["Scratch", "existing_store", "scratch"]

_PREFIX: Final = ".ckpt-tune-"


@dataclass(frozen=True, slots=True)
class Scratch:
    """A temporary place for trial stores.

    Attributes:
        folder: the temporary folder.
        scheme: scheme of the stores' URLs (``pmem``), or empty for paths.
    """

    folder: Path
    scheme: str

    def url(self, name: str) -> str:
        """Path or URL of a trial store."""
        path = self.folder / name
        return f"{self.scheme}://{quote(str(path))}" if self.scheme else str(path)

    def remove(self, name: str) -> None:
        """Delete a trial store that is not open. Raises `StorageError`."""
        _remove(self.folder / name)

    def free(self) -> int:
        """Free bytes on this medium."""
        return shutil.disk_usage(self.folder).free


def existing_store(place: str) -> Store | None:
    """The store at a path or URL; None if there is none yet.

    Raises:
        UsageError: an invalid path, or a URL of a medium on which no trial saves are possible.
        CorruptLogError, FormatError, StorageError: the store cannot be opened.
    """
    _local(place)
    try:
        store = open_store(place, create=False)
    except StoreNotFoundError:
        if _local(place)[1].is_file():
            raise
        return None
    return store


@contextmanager
def scratch(place: str) -> Iterator[Scratch]:
    """A temporary folder on the medium of `place`: beside a store (existing or planned), or inside any other folder.

    It is removed at the end of the ``with``, also after Ctrl-C or SIGTERM (as ``ckpt`` handles it). After SIGKILL a
    hidden folder ``.ckpt-tune-*`` remains.

    Raises:
        UsageError: no folder can be created there on the same medium.
        StorageError: the folder cannot be created or removed.
    """
    scheme, path = _local(place)
    parent = path if existing_store(place) is None and path.is_dir() else path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{place}: the folder {parent} does not exist")
    if path.exists() and parent.stat().st_dev != path.stat().st_dev:
        raise UsageError(f"{place} is a mount point: its parent folder is on another medium; name a folder inside it")
    refuse_inside_store(parent / _PREFIX)
    folder = parent / f"{_PREFIX}{secrets.token_hex(8)}"
    try:  # from here on, so that a signal right after the creation still removes the folder
        try:
            folder.mkdir(0o700)
        except OSError as error:
            what = f"a temporary folder cannot be made: {error.strerror}"
            raise StorageError(error.errno, what, str(parent)) from error
        yield Scratch(folder, scheme)
    finally:
        try:
            _remove(folder)
        except BaseException:  # a signal interrupted the removal: remove again
            _remove(folder)
            raise


def _local(place: str) -> tuple[str, Path]:
    """(scheme, path) of a path, or of a URL that names a path of this machine."""
    scheme, found, _ = place.partition("://")
    if not found:
        return "", Path(place).expanduser()
    parts = urlsplit(place)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{place}: trial saves are made in a folder of this machine: give a path, or a URL of one")
    return ("" if scheme.lower() == "file" else scheme), Path(unquote(parts.path))


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(error.errno, f"cannot be removed: {error.strerror}", str(folder)) from error
