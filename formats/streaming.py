"""Copying past the caches: for bytes that nobody reads again soon, as those of a snapshot.

An ordinary copy loads every line of its target before it overwrites it, a third of all that crosses the memory bus.
The C library stores past the caches for copies of hundreds of MiB alone, which no tensor is.
"""

from __future__ import annotations

import ctypes
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats import compiled
from ckptstore.formats.compiled import hot
from ckptstore.formats.sources import Bytes

__all__ = ["LARGE", "Addresses", "copy", "moves", "prepare", "ready", "stream"]

Addresses: TypeAlias = npt.NDArray[np.int64]

LEAST: Final = 1 << 20
"""Bytes of one copy from which it pays."""
LARGE: Final = 64 << 20
"""Bytes of a state that the caches of most processors do not hold: below it nobody calls `prepare`."""
_ready = False


@hot("ckptstore.formats.streaming_compiled")
def stream(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length; they do not overlap."""
    np.copyto(out, source)


@hot("ckptstore.formats.streaming_compiled")
def moves(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:  # noqa: ARG001  # of the compiled form
    """Copy many pieces of memory by their addresses, which nobody checks.

    Args:
        to, at, lengths: where each goes to, where it is, and its bytes. No piece overlaps another.
        past: pieces of so many bytes or more go past the caches.
    """
    for target, origin, length in zip(to.tolist(), at.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, origin, length)


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
        nothing = np.empty(0, np.int64)
        moves(nothing, nothing, nothing, 0)
    _ready = True


def ready() -> bool:
    """Whether copies are compiled, and that is done: else many small ones are quicker by other means."""
    return _ready and compiled.kind() == "compiled"
