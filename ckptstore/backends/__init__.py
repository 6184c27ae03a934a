"""Where a store lives: `open_backend` takes a path or a URL and returns the `Backend` for it.

Imports `host` alone, and neither numpy nor fsspec: ``ckpt`` shall start quickly, and a folder needs neither.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, StorageError, StoreNotFoundError, UsageError

__all__ = ["Backend", "open_backend"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def _at_home(path: str) -> Path:
    """The path, with a ``~`` or ``~name`` at its beginning expanded: scripts pass what no shell has seen."""
    expanded = os.path.expanduser(path)  # noqa: PTH111  # `Path` takes "./~" for "~"
    if expanded == path and path.startswith("~"):
        raise UsageError(f"{path}: nobody of this name has a home here; ./{path} is a folder of that name")
    return Path(expanded)


def _open_path(path: str, url: str, create: bool, *, pmem: bool = False) -> Backend:
    there: int | None = None
    try:
        folder = _at_home(path)
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
    from ckptstore.backends.local import LocalBackend

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


_OPENERS: Final[Mapping[str, Callable[[str, bool], Backend]]] = {
    "file": _open_file_url,
    "pmem": _open_pmem_url,
    "memory": _open_memory_url,
}


def open_backend(url: str | os.PathLike[str], create: bool) -> Backend:
    """The medium of the store at `url`. Whether a store is there is for the engine to find out.

    Args:
        url: a path (``~`` is the user's home), ``file:///absolute/path``, ``pmem:///absolute/path`` or
            ``memory://name``.
        create: accept a place where nothing is yet; the first write makes it.

    Raises:
        StoreNotFoundError: nothing is there, or a file is, and `create` does not help.
        UsageError: the path or URL is malformed, or its scheme is unknown.
        StorageError: the medium failed.
    """
    text = os.fsdecode(url)
    if not text:
        raise UsageError("the path of a store is empty")
    match = _URL.match(text) if isinstance(url, str) else None
    if match is None:
        return _open_path(text, text, create)
    opener = _OPENERS.get(match[1].lower())
    if opener is None:
        raise UsageError(f"{text}: no backend for {match[1]}://; supported are paths and {', '.join(_OPENERS)} URLs")
    return opener(text, create)
