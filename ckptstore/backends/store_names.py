"""Check the name of a store in a URL, and compare two URLs: one store has one name, and two names are two stores."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Final
from urllib.parse import quote, unquote

from ckptstore.errors import UsageError

__all__ = ["canonical", "checked_name", "without_credentials"]

_FOLDERS: Final = ("file", "pmem")


def checked_name(url: str, name: str) -> str:
    """The name of a store in `url`, without a slash at its end.

    Raises:
        UsageError: the name has an empty part, or a part ``.`` or ``..``. Some object stores take ``a//b`` and
            ``a/../b`` as they are, some servers and clients as ``a/b`` and ``b``.
    """
    found = name.removesuffix("/")
    parts = found.split("/")
    # Prevents: two names that are one store to one client, and two stores to another.
    if name and not all(part not in ("", ".", "..") for part in parts):
        meant = url.removesuffix(name) + posixpath.normpath(f"/{found}").lstrip("/")
        remedy = "give another name" if not meant or meant.endswith("://") else f"write {meant}"
        raise UsageError(f"{url}: the name of a store has no empty part, and none that is . or ..: {remedy}")
    return found


def without_credentials(url: str) -> str:
    """The URL, or chain of URLs, without users and passwords, for messages."""
    return re.sub(r"(?<=://)[^/]*@", "", url)


def canonical(url: str) -> str:
    """What all paths and URLs of one place have in common: the real path of a folder, or the URL without variants.

    Reads links of local paths; opens nothing.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return os.path.realpath(os.path.expanduser(url))  # noqa: PTH111 - as `schemes.open_path`
    scheme = scheme.lower()
    if scheme in _FOLDERS:
        path = os.path.realpath(unquote(rest.removeprefix("localhost")))
        return path if scheme == "file" else f"{scheme}://{quote(path)}"
    return f"{scheme}://{rest.removesuffix('/')}"
