"""Segments of another run at a store's place.

A writer in a bucket whose store was deleted sends one more segment before it finds that out. Where another store was
made there meanwhile, it shall not be taken for what is left of a lost end of that one's log.
"""

from __future__ import annotations

from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError
from ckptstore.formats.members import hexadecimal
from ckptstore.formats.record_text import MANIFEST_LIMIT, unseal
from ckptstore.log.partial_objects import text_bytes

__all__ = ["all_foreign", "foreign"]

_MOST: Final = 16
"""Objects that are looked into: more of them are no segment that came late."""
_PREFIX: Final = 8


def foreign(backend: Backend, run: str, key: str) -> bool:
    """Whether an object below ``seg/`` says of itself that it is of another run. What cannot be read does not."""
    try:
        return _run_of(backend, key) not in (run, "")
    except (CkptError, LookupError, TypeError):
        return False


def all_foreign(backend: Backend, run: str, keys: list[str]) -> bool:
    """Whether each of a few objects is `foreign`."""
    return len(keys) <= _MOST and all(foreign(backend, run, key) for key in keys)


def _run_of(backend: Backend, key: str) -> str:
    if key.endswith(".json"):
        found = unseal(text_bytes(backend, key, MANIFEST_LIMIT), what=key)["run"]
        return found if hexadecimal(found) else ""
    from ckptstore.formats.segment import header_length, parse  # numpy, which listing a store does without

    with backend.open_source(key) as source:

        def read(offset: int, length: int) -> bytes:
            out = bytearray(length)
            source.read_into(offset, memoryview(out))
            return bytes(out)

        length = header_length(read(0, min(_PREFIX, source.size)), source.size, key)
        return parse(read(0, length), source.size, key, read).run
