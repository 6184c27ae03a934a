"""Copying past the caches: for bytes that nobody reads again soon, as those of a snapshot.

An ordinary copy loads every line of its target before it overwrites it, a third of all that crosses the memory bus.
The C library stores past the caches for copies of hundreds of MiB alone, which no tensor is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptstore.formats import compiled
from ckptstore.formats.compiled import hot
from ckptstore.formats.sources import Bytes

__all__ = ["LARGE", "copy", "prepare", "stream"]

LEAST: Final = 1 << 20
"""Bytes of one copy from which it pays."""
LARGE: Final = 64 << 20
"""Bytes of a state that the caches of most processors do not hold: below it nobody calls `prepare`."""
_ready = False


@hot("ckptstore.formats.streaming_compiled")
def stream(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length; they do not overlap."""
    np.copyto(out, source)


def copy(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length, which do not overlap: past the caches, if `prepare` was called."""
    if _ready and len(out) >= LEAST:
        stream(source, out)
    else:
        np.copyto(out, source)


def prepare() -> None:
    """Load the compiled form, if there is one: half a second, for which no copy shall wait."""
    global _ready
    if not _ready and compiled.kind() == "compiled":
        stream(np.zeros(256, np.uint8), np.empty(256, np.uint8))
    _ready = True
