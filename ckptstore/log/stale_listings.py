"""Listings that something between here and the medium may have answered in its place.

A proxy or a login page answers any request with a page of its own, and clients of object stores take any XML that they
do not know for a listing of nothing. A command that reports or deletes what a listing does not show must compare the
listing with what is known otherwise, and list again.
"""

from __future__ import annotations

from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import ForeignObjectError, StorageError
from ckptstore.formats.records import FORMAT_KEY
from ckptstore.log.partial_objects import exists

__all__ = ["LOOKS", "contradiction", "every_object"]

LOOKS: Final = 3
"""How often something is listed before the listings are said to contradict what is there."""


def every_object(backend: Backend, outcome: str) -> list[str]:
    """Keys of all objects, by a listing that has FORMAT, if that can be asked for by its name.

    Args:
        outcome: what the error says of what was done, and is to be done again.

    Raises:
        StorageError: the medium failed; or no listing has FORMAT, although it is there.
    """
    for _ in range(LOOKS):
        keys = backend.list("")
        # Prevents: a store that is called empty or damaged, because a proxy answered the listing with its own page.
        if FORMAT_KEY in keys or not _there(backend, FORMAT_KEY):
            return keys
    raise contradiction(backend, f"a request for {FORMAT_KEY}", "that it is there", "a listing", outcome)


def _there(backend: Backend, key: str) -> bool:
    try:
        return exists(backend, key)
    except ForeignObjectError:  # no listing of objects has it
        return False


def contradiction(backend: Backend, one: str, shows: str, other: str, outcome: str) -> StorageError:
    """The error of two answers that cannot both be right."""
    return StorageError(
        f"{backend.url}: {one} shows {shows}, and {other} none: something between here and the medium (a proxy, a "
        f"login page) may answer listings in its place. {outcome}"
    )
