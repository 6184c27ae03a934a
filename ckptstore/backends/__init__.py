"""Where a store lives: `open_backend` takes a path or a URL and returns the `Backend` for it.

Imports `host` alone, and neither numpy nor obstore nor fsspec before a URL asks for it: ``ckpt`` shall start quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from ckptstore.backends import schemes
from ckptstore.backends.base import Backend
from ckptstore.errors import UsageError

__all__ = ["Backend", "open_backend"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ALMOST: Final = re.compile(rf"({'|'.join(schemes.SCHEMES)}):/*(?!/)", re.IGNORECASE)
"""The beginning of a URL with another number of slashes than two."""


def _open_filesystem(path: str, filesystem: Any, storage_options: Mapping[str, Any] | None) -> Backend:
    if storage_options:
        raise UsageError("filesystem= has its options already: leave storage_options out")
    from ckptstore.backends.fsspec_files import FsspecBackend, anchored

    return FsspecBackend(filesystem, anchored(filesystem, path))


def open_backend(
    url: str | os.PathLike[str],
    create: bool,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> Backend:
    """The medium of the store at `url`. Whether a store is there is for the engine to find out.

    Args:
        url: a path (``~`` is the user's home), ``file:///absolute/path``, ``pmem:///absolute/path``,
            ``memory://name``, ``s3://bucket/prefix`` (``gs://``, ``az://``), or of a scheme that an installed package
            declares (`ckptstore.backends.schemes`) or fsspec knows.
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
    if filesystem is not None:
        return _open_filesystem(text, filesystem, storage_options)
    match = _URL.match(text) if isinstance(url, str) else None
    scheme = None if match is None else schemes.find(match[1].lower())
    if storage_options and not (scheme is not None and scheme.options):
        raise UsageError(f"{text}: storage_options are for object stores and fsspec's URLs; this has none")
    if scheme is not None:
        return scheme.open(text, create, storage_options or {})
    # Prevents: a run that is saved to a folder named ``s3:`` here, while everybody believes it in the bucket.
    if isinstance(url, str) and (almost := _ALMOST.match(text)) is not None and not os.path.lexists(text):
        name = almost[1].lower()
        meant = f"{name}://{'/' if schemes.SCHEMES[name].path else ''}{text[almost.end() :]}"
        raise UsageError(f"{text} is no URL; did you mean {meant}? (./{text} is a folder of that name)")
    return schemes.open_path(text, text, create)
