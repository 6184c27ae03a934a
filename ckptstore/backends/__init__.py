"""Where a store lives: `open_backend` takes a path or a URL and returns the `Backend` for it.

Imports `host` alone, and neither numpy nor obstore nor fsspec before a URL asks for it: ``ckpt`` shall start quickly.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, MissingDependencyError, StorageError, StoreNotFoundError, UsageError

__all__ = ["Backend", "open_backend"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ALMOST: Final = re.compile(r"(s3|gs|az|file|pmem|memory):/*(?!/)", re.IGNORECASE)
"""The beginning of a URL with another number of slashes than two."""


def _at_home(path: str) -> Path:
    """The path, with a ``~`` or ``~name`` at its beginning expanded: scripts pass what no shell has seen."""
    expanded = os.path.expanduser(path)  # noqa: PTH111  # `Path` takes "./~" for "~"
    if expanded == path and path.startswith("~"):
        raise UsageError(f"{path}: nobody of this name has a home here; ./{path} is a folder of that name")
    return Path(expanded)


def _open_path(path: str, url: str, create: bool, *, pmem: bool = False) -> Backend:
    from ckptstore.backends.local import LocalBackend, absolute

    there: int | None = None
    try:
        folder = _at_home(path)
        try:
            folder = Path(absolute(folder))
        except FileNotFoundError as error:  # of the folder that the process is in
            raise StorageError(error.errno, "the working directory was deleted: give an absolute path", url) from error
        there = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    except CkptError:
        raise
    except ValueError as error:  # NUL, lone surrogates
        raise UsageError(f"{url!r} is no path: {error}") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot be opened: {error.strerror}", url) from error
    if there is not None and not stat.S_ISDIR(there):
        raise StoreNotFoundError(f"{url} is a file, not the folder of a store")
    if there is None and not create:
        raise StoreNotFoundError(f"{url} does not exist")
    if pmem:
        from ckptstore.backends.pmem import PmemBackend

        return PmemBackend(folder, url=url)
    return LocalBackend(folder, url=url)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        kind = parts.scheme
        raise UsageError(f"{url}: a {kind} URL is {kind}:// followed by an absolute path, percent-encoded where needed")
    return unquote(parts.path)


def _open_file_url(url: str, create: bool) -> Backend:
    return _open_path(_path_of(url), url, create)


def _open_pmem_url(url: str, create: bool) -> Backend:
    return _open_path(_path_of(url), url, create, pmem=True)


def _open_memory_url(url: str, create: bool) -> Backend:
    from ckptstore.backends.memory import MemoryBackend

    name = url.partition("://")[2]
    if not name:
        raise UsageError(f"{url}: name the store, as in memory://name")
    if not create and not MemoryBackend.exists(name):
        raise StoreNotFoundError(f"{url} does not exist in this process")
    return MemoryBackend(name)


def _open_objects(url: str, options: Mapping[str, Any]) -> Backend:
    try:
        from ckptstore.backends.objects import ObjectBackend
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        scheme = url.partition("://")[0]
        raise MissingDependencyError(f"{scheme}:// URLs need obstore: pip install 'ckptstore[s3]'") from error
    return ObjectBackend(url, options)


def _open_filesystem(path: str, filesystem: Any, storage_options: Mapping[str, Any] | None) -> Backend:
    if storage_options:
        raise UsageError("filesystem= has its options already: leave storage_options out")
    from ckptstore.backends.fsspec_files import FsspecBackend, anchored

    return FsspecBackend(filesystem, anchored(filesystem, path))


def _open_fsspec_url(url: str, scheme: str, options: Mapping[str, Any]) -> Backend:
    known = ", ".join((*_OPENERS, *_OBJECTS))
    try:
        from ckptstore.backends.fsspec_files import FsspecBackend, known_scheme, opened, shown
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "fsspec":
            raise
        raise MissingDependencyError(
            f"{scheme}:// is for fsspec to open (without it: paths and {known} URLs): pip install 'ckptstore[s3]'"
        ) from error
    if not known_scheme(scheme):
        raise UsageError(f"{shown(url)}: no backend for {scheme}://; it takes paths, {known} URLs and fsspec's")
    filesystem, path = opened(url, scheme, options)
    return FsspecBackend(filesystem, path, url=url, options=options)


_OBJECTS: Final = ("s3", "gs", "az")

_OPENERS: Final[Mapping[str, Callable[[str, bool], Backend]]] = {
    "file": _open_file_url,
    "pmem": _open_pmem_url,
    "memory": _open_memory_url,
}


def open_backend(
    url: str | os.PathLike[str],
    create: bool,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> Backend:
    """The medium of the store at `url`. Whether a store is there is for the engine to find out.

    Args:
        url: a path (``~`` is the user's home), ``file:///absolute/path``, ``pmem:///absolute/path``,
            ``memory://name``, ``s3://bucket/prefix`` (``gs://``, ``az://``), or of any scheme that fsspec knows.
        create: accept a place where nothing is yet; the first write makes it.
        storage_options: how an object store, or fsspec's file system, is reached.
        filesystem: an fsspec file system, in which `url` is a path.

    Raises:
        StoreNotFoundError: nothing is there, or a file is, and `create` does not help.
        UsageError: the path or URL is malformed, its scheme or an option is unknown.
        MissingDependencyError: an optional package is needed.
        StorageError: the medium failed.
    """
    text = os.fsdecode(url)
    if not text:
        raise UsageError("the path of a store is empty")
    match = _URL.match(text) if isinstance(url, str) else None
    scheme = "" if match is None else match[1].lower()
    if filesystem is not None:
        return _open_filesystem(text, filesystem, storage_options)
    if scheme in _OBJECTS:
        return _open_objects(text, storage_options or {})
    if storage_options and (match is None or scheme in _OPENERS):
        raise UsageError(f"{text}: storage_options are for object stores and fsspec's URLs; this has none")
    if match is None:
        # Prevents: a run that is saved to a folder named ``s3:`` here, while everybody believes it in the bucket.
        if isinstance(url, str) and (almost := _ALMOST.match(text)) is not None and not os.path.lexists(text):
            meant = (
                f"{almost[1].lower()}://{'/' if almost[1].lower() in ('file', 'pmem') else ''}{text[almost.end() :]}"
            )
            raise UsageError(f"{text} is no URL; did you mean {meant}? (./{text} is a folder of that name)")
        return _open_path(text, text, create)
    opener = _OPENERS.get(scheme)
    if opener is None:
        return _open_fsspec_url(text, scheme, storage_options or {})
    return opener(text, create)
