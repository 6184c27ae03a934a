"""Detects listings that a proxy may have answered instead of the medium.

A proxy or a login page answers any request with its own page, and clients of object stores take any XML that they do
not know for an empty listing. A command that reports or deletes what a listing does not show must compare the listing
with what it knows otherwise, and list again.
"""

from __future__ import annotations

from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import ForeignObjectError, StorageError
from ckptstore.formats.history.records import FORMAT_KEY
from ckptstore.log.partial_objects import exists

__all__ = ["LOOKS", "contradiction", "every_object"]

LOOKS: Final = 3
"""How often something is listed before the listings are reported as contradictory."""


def every_object(backend: Backend, outcome: str) -> list[str]:
    """Keys of all objects, from a listing that contains FORMAT (unless a request for FORMAT finds none).

    Args:
        outcome: text for the error: what was done, and what to do again.

    Raises:
        StorageError: the medium failed; or no listing has FORMAT, although it exists.
    """
    for _ in range(LOOKS):
        keys = backend.list("")
        # Prevents: reporting a store as empty or damaged because a proxy answered the listing with its own page.
        if FORMAT_KEY in keys or not _there(backend, FORMAT_KEY):
            return keys
    raise contradiction(backend, f"a request for {FORMAT_KEY}", "that it is there", "a listing", outcome)


def _there(backend: Backend, key: str) -> bool:
    try:
        return exists(backend, key)
    except ForeignObjectError:  # not an object, so no listing has it
        return False


def contradiction(backend: Backend, one: str, shows: str, other: str, outcome: str) -> StorageError:
    """The error for two answers that contradict each other."""
    return StorageError(
        f"{backend.url}: {one} shows {shows}, and {other} none: something between here and the medium (a proxy, a "
        f"login page) may answer listings in its place. {outcome}"
    )
