"""A medium that shows prefixes of an object before all of it, like a file that is being written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ckptstore.backends.base import OBJECT_LIMIT, Backend

__all__ = ["Reveal", "revealing"]


class Reveal:
    """Which objects are incomplete, and how much of each is seen at successive looks.

    Attributes:
        cuts: key -> lengths that are seen next, in order. Then the object is whole; or, with `forever`, stays as it is.
        looks: key -> how often a beginning of it was seen.
    """

    def __init__(self) -> None:
        self.cuts: dict[str, list[int]] = {}
        self.looks: dict[str, int] = {}
        self.forever = False
        self.lock = threading.Lock()

    def begin(self, key: str, cuts: Sequence[int], *, forever: bool = False) -> None:
        """From now on `key` is being written."""
        self.cuts[key], self.forever = list(cuts), forever

    def seen(self, key: str, data: bytes) -> bytes:
        """The bytes that a look at `key` sees; it really holds `data`."""
        with self.lock:
            left = self.cuts.get(key)
            if not left:
                return data
            cut = left[0] if self.forever and len(left) == 1 else left.pop(0)
            self.looks[key] = self.looks.get(key, 0) + 1
            return data[:cut]


def revealing(backend: Backend, reveal: Reveal) -> Any:
    """The same handle, whose `get` shows the prefixes of `reveal`."""
    kind: Any = type(backend)
    if hasattr(backend, "reveal"):
        kind = kind.__bases__[0]

    def get(self: Any, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        return reveal.seen(key, kind.get(self, key, limit))

    def reopened(self: Any) -> Any:
        return revealing(kind.reopened(self), reveal)

    members = {"get": get, "reopened": reopened, "reveal": reveal}
    backend.__class__ = type(f"Revealing{kind.__name__}", (kind,), members)
    return backend
