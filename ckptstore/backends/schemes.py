"""Find the opener of a URL's scheme: in the table of this package, then in the entry points ``ckptstore.backends``.

A third party's package declares in its ``pyproject.toml``::

    [project.entry-points."ckptstore.backends"]
    ram = "my_package:open_url"

where ``open_url(url, create, options)`` has the signature of `Opener`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from ckptstore.backends.base import Backend
from ckptstore.backends.store_names import checked_name
from ckptstore.errors import CkptError, MissingDependencyError, StorageError, StoreNotFoundError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["BUCKETS", "SCHEMES", "Opener", "Scheme", "find", "open_path"]

GROUP: Final = "ckptstore.backends"

Opener = Callable[[str, bool, Mapping[str, Any]], Backend]
"""``(url, create, options) -> Backend``: `create` accepts a place that does not exist yet; `options` are the caller's
``storage_options``. Raises `StoreNotFoundError`, `UsageError`, `MissingDependencyError`, `StorageError`."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The opener of the URLs of one scheme.

    Attributes:
        open: the opener.
        options: whether the scheme accepts ``storage_options``; if not, passing some is an error.
        path: whether an absolute path follows the two slashes.
    """

    open: Opener
    options: bool = True
    path: bool = False


def _at_home(path: str) -> Path:
    """The path with a leading ``~`` or ``~name`` expanded: a path from a script has not passed through a shell."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - `Path` treats "./~" as "~"
    if expanded == path and path.startswith("~"):
        raise UsageError(f"{path}: there is no user of this name; write ./{path} for a folder of that name")
    return Path(expanded)


def open_path(path: str, url: str, create: bool, *, pmem: bool = False) -> Backend:
    """Open the folder `path`, which the user passed as `url`. Raises as `ckptstore.backends.open_backend`."""
    from ckptstore.backends.local_disk.local import LocalBackend, absolute

    there: int | None = None
    try:
        folder = _at_home(path)
        try:
            folder = Path(absolute(folder))
        except FileNotFoundError as error:  # from the current working directory
            raise StorageError(error.errno, "the working directory was deleted: give an absolute path", url) from error
        there = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    except CkptError:
        raise
    except ValueError as error:  # NUL, lone surrogates
        raise UsageError(f"{url!r} is not a path: {error}") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot be opened: {error.strerror}", url) from error
    if there is not None and not stat.S_ISDIR(there):
        raise StoreNotFoundError.at(url, " is a file, not the folder of a store", "file")
    if there is None and not create:
        raise StoreNotFoundError.at(url, " does not exist")
    if pmem:
        from ckptstore.backends.local_disk.pmem import PmemBackend

        return PmemBackend(folder, url=url)
    return LocalBackend(folder, url=url)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        kind = parts.scheme
        raise UsageError(f"{url}: a {kind} URL is {kind}:// followed by an absolute path, percent-encoded where needed")
    return unquote(parts.path)


def _open_file_url(url: str, create: bool, options: Mapping[str, Any]) -> Backend:  # noqa: ARG001 - same signature
    return open_path(_path_of(url), url, create)


def _open_pmem_url(url: str, create: bool, options: Mapping[str, Any]) -> Backend:  # noqa: ARG001
    return open_path(_path_of(url), url, create, pmem=True)


def _open_memory_url(url: str, create: bool, options: Mapping[str, Any]) -> Backend:  # noqa: ARG001
    from ckptstore.backends.memory import MemoryBackend

    name = checked_name(url, url.partition("://")[2].removeprefix("/"))
    if not name:
        raise UsageError(f"{url}: name the store, as in memory://name")
    if not create and not MemoryBackend.exists(name):
        raise StoreNotFoundError.at(url, " does not exist in this process")
    return MemoryBackend(name)


def _open_objects(url: str, create: bool, options: Mapping[str, Any]) -> Backend:  # noqa: ARG001
    try:
        from ckptstore.backends.object_store.objects import ObjectBackend
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        scheme = url.partition("://")[0]
        raise MissingDependencyError(f"{scheme}:// URLs need obstore: pip install 'ckptstore[s3]'") from error
    return ObjectBackend(url, options)


def _open_fsspec_url(url: str, create: bool, options: Mapping[str, Any]) -> Backend:  # noqa: ARG001
    scheme = url.partition("://")[0].lower()
    known = ", ".join(SCHEMES)
    try:
        from ckptstore.backends.fsspec_files import FsspecBackend, known_scheme, opened, shown
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "fsspec":
            raise
        raise MissingDependencyError(
            f"{scheme}:// is for fsspec to open (without it: paths and {known} URLs): pip install 'ckptstore[s3]'"
        ) from error
    if not known_scheme(scheme):
        raise UsageError(
            f"{shown(url)}: no backend for {scheme}://; it takes paths, {known} URLs, fsspec's, and those of installed "
            f"packages that declare the scheme (entry points {GROUP})"
        )
    filesystem, path = opened(url, scheme, options)
    return FsspecBackend(filesystem, path, url=url, options=options)


_BUCKET: Final = Scheme(_open_objects)

SCHEMES: Final[Mapping[str, Scheme]] = {
    "file": Scheme(_open_file_url, options=False, path=True),
    "pmem": Scheme(_open_pmem_url, options=False, path=True),
    "memory": Scheme(_open_memory_url, options=False),
    "s3": _BUCKET,
    "gs": _BUCKET,
    "az": _BUCKET,
}
"""Schemes that this package opens itself. Entry points cannot replace them."""

BUCKETS: Final = tuple(name for name, scheme in SCHEMES.items() if scheme is _BUCKET)

_FSSPEC: Final = Scheme(_open_fsspec_url)


def find(scheme: str) -> Scheme:
    """The opener of ``scheme://``: from this package, else from an installed package that declares it, else fsspec.

    Raises `UsageError`: two packages declare it, or the declared object cannot be imported.
    """
    if (known := SCHEMES.get(scheme)) is not None:
        return known
    from importlib.metadata import entry_points  # importing it takes half the time of `ckpt --version`

    declared = list({entry.value: entry for entry in entry_points(group=GROUP, name=scheme)}.values())
    if not declared:
        return _FSSPEC
    if len(declared) > 1:
        raise UsageError(f"{scheme}:// is declared by {' and '.join(map(_origin, declared))}: uninstall all but one")
    try:
        opener = declared[0].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{scheme}:// is for {_origin(declared[0])}, which cannot be imported: {error}") from error

    def opened(url: str, create: bool, options: Mapping[str, Any]) -> Backend:
        backend = opener(url, create, options)
        if not isinstance(backend, Backend):
            raise UsageError(f"{_origin(declared[0])} returned {type(backend).__name__} for {scheme}://, not a Backend")
        return backend

    return Scheme(opened)


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} ({entry.value})" if entry.dist is not None else entry.value
