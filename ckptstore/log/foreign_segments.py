"""Recognizes segments of another run in a store's folders.

A writer in a bucket whose store was deleted sends one more segment before it notices. If another store was created
there meanwhile, that segment must not be mistaken for a sign that the end of this store's log is lost.
"""

from __future__ import annotations

from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError
from ckptstore.formats.history.members import hexadecimal
from ckptstore.formats.history.record_text import MANIFEST_LIMIT, unseal
from ckptstore.log.partial_objects import text_bytes

__all__ = ["all_foreign", "foreign"]

_MOST: Final = 16
"""Maximum number of objects to look into: a late writer leaves fewer."""
_PREFIX: Final = 8


def foreign(backend: Backend, run: str, key: str) -> bool:
    """Whether an object below ``seg/`` says that it belongs to another run. An unreadable object does not."""
    try:
        return _run_of(backend, key) not in (run, "")
    except (CkptError, LookupError, TypeError):
        return False


def all_foreign(backend: Backend, run: str, keys: list[str]) -> bool:
    """Whether there are only a few objects, and all of them are `foreign`."""
    return len(keys) <= _MOST and all(foreign(backend, run, key) for key in keys)


def _run_of(backend: Backend, key: str) -> str:
    if key.endswith(".json"):
        found = unseal(text_bytes(backend, key, MANIFEST_LIMIT), what=key)["run"]
        return found if hexadecimal(found) else ""
    from ckptstore.formats.segment_files.segment import (  # imports numpy, which a listing does not need
        header_length,
        parse,
    )

    with backend.open_source(key) as source:

        def read(offset: int, length: int) -> bytes:
            out = bytearray(length)
            source.read_into(offset, memoryview(out))
            return bytes(out)

        length = header_length(read(0, min(_PREFIX, source.size)), source.size, key)
        return parse(read(0, length), source.size, key, read).run
