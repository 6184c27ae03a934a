"""Open a store's medium: `open_backend` takes a path or a URL and returns the `Backend` for it.

Imports only `host`. It loads numpy, obstore and fsspec only when a URL needs them, so that ``ckpt`` starts quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from ckptstore.backends import schemes
from ckptstore.backends.base import Backend
from ckptstore.backends.store_names import without_credentials
from ckptstore.errors import UsageError

__all__ = ["Backend", "open_backend"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OTHER_URL: Final = re.compile(r"[A-Za-z].*::[\w+.-]*://|[A-Za-z][\w+.-]*[_:][\w+.:-]*://")
"""A URL of fsspec's that is not opened: a chain of URLs, or a scheme with an underscore."""
_ALMOST: Final = re.compile(rf"({'|'.join(schemes.SCHEMES)}):/*(?!/)", re.IGNORECASE)
"""The start of a URL that has one slash, or none, instead of two."""


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
    """Open the medium of the store at `url`. This does not check whether a store is there: the engine does.

    Args:
        url: a path (``~`` is the user's home), ``file:///absolute/path``, ``pmem:///absolute/path``,
            ``memory://name``, ``s3://bucket/prefix`` (``gs://``, ``az://``), or a URL of a scheme that an installed
            package declares (`ckptstore.backends.schemes`) or that fsspec knows.
        create: accept a place that does not exist yet; the first write creates it.
        storage_options: options of the object store or of the fsspec file system.
        filesystem: an fsspec file system; `url` is then a path in it.

    Raises:
        StoreNotFoundError: nothing is there and `create` is False, or a file is there.
        UsageError: the path or URL is malformed, or its scheme or an option is unknown.
        MissingDependencyError: an optional package is not installed.
        StorageError: the medium failed.
    """
    text = os.fsdecode(url)
    if not text:
        raise UsageError("the path of a store is empty")
    if filesystem is not None:
        return _open_filesystem(text, filesystem, storage_options)
    # Prevents: a run saved to a local folder named ``simplecache::s3:``, which its owner takes for a URL.
    if isinstance(url, str) and _OTHER_URL.match(text) and not os.path.lexists(text):
        said = without_credentials(text)
        raise UsageError(
            f"{said}: chained URLs, and schemes with an underscore, are not opened: pass filesystem= and a path in it "
            f"(./{said} is a folder of that name)"
        )
    match = _URL.match(text) if isinstance(url, str) else None
    scheme = None if match is None else schemes.find(match[1].lower())
    if storage_options and not (scheme is not None and scheme.options):
        raise UsageError(f"{text}: storage_options are for object stores and fsspec's URLs; this has none")
    if scheme is not None:
        return scheme.open(text, create, storage_options or {})
    # Prevents: a run saved to a local folder named ``s3:`` while its owner believes that it is in the bucket.
    if isinstance(url, str) and (almost := _ALMOST.match(text)) is not None and not os.path.lexists(text):
        name = almost[1].lower()
        meant = f"{name}://{'/' if schemes.SCHEMES[name].path else ''}{text[almost.end() :]}"
        raise UsageError(f"{text} is not a URL; did you mean {meant}? (./{text} is a folder of that name)")
    return schemes.open_path(text, text, create)
