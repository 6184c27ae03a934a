"""Copying past the caches: for bytes that nobody reads again soon, as those of a snapshot.

An ordinary copy loads every line of its target before it overwrites it, a third of all that crosses the memory bus.
The C library stores past the caches for copies of hundreds of MiB alone, which no tensor is.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import KernelError
from ckptstore.formats import kernel_choice
from ckptstore.formats.kernel_choice import hot, steady
from ckptstore.formats.sources import Bytes

__all__ = ["LARGE", "Addresses", "copy", "moves", "prepare", "ready", "stream"]

Addresses: TypeAlias = npt.NDArray[np.int64]

LEAST: Final = 1 << 20
"""Bytes of one copy from which it pays."""
LARGE: Final = 64 << 20
"""Bytes of a state that the caches of most processors do not hold: below it nobody calls `prepare`."""
_TRIED: Final = 1 << 12
_ready = False


@hot("ckptstore.formats.uncached_copy_compiled", compare=False)
def stream(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length; they do not overlap."""
    np.copyto(out, source)


@hot("ckptstore.formats.uncached_copy_compiled", compare=False)
def moves(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:  # noqa: ARG001  # of the compiled form
    """Copy many pieces of memory by their addresses, which nobody checks.

    Args:
        to, at, lengths: where each goes to, where it is, and its bytes. No piece overlaps another.
        past: pieces of so many bytes or more go past the caches.
    """
    for target, origin, length in zip(to.tolist(), at.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, origin, length)


@steady
def copy(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length, which do not overlap: past the caches, if `prepare` was called."""
    if _ready and len(out) >= LEAST:
        stream(source, out)
    else:
        np.copyto(out, source)


def prepare() -> None:
    """Load and try the compiled form, if there is one: half a second, for which no copy shall wait."""
    global _ready
    if not _ready and kernel_choice.kind() == "compiled":
        _try()
    _ready = True


def _try() -> None:
    """Copy known bytes by both kernels. They are not compared later: that would take as much memory again."""
    source = np.arange(_TRIED, dtype=np.uint32).view(np.uint8)
    with contextlib.suppress(KernelError):  # switched off, with a warning
        for kernel in (stream, _moved):
            out = np.zeros(len(source) + 1, np.uint8)
            kernel(source[3:-7], out[5 : len(source) - 5])
            # Prevents: a snapshot that is not what training had, under a hash that says it is right.
            if (
                not np.array_equal(out[5 : len(source) - 5], source[3:-7])
                or out[:5].any()
                or out[len(source) - 5 :].any()
            ):
                kernel_choice.distrust(
                    "compiled kernels of ckptstore.formats.uncached_copy_compiled", "copy other bytes"
                )
                return


def _moved(source: Bytes, out: Bytes) -> None:
    """Two copies by addresses: a small piece, and one past the caches."""
    few = 37
    at = np.array([source.ctypes.data, source.ctypes.data + few], np.int64)
    to = np.array([out.ctypes.data, out.ctypes.data + few], np.int64)
    moves(to, at, np.array([few, len(source) - few], np.int64), 2 * few)


def ready() -> bool:
    """Whether copies are compiled, and that is done: else many small ones are quicker by other means."""
    return _ready and kernel_choice.kind() == "compiled"
