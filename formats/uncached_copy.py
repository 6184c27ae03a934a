"""Copy memory past the processor caches, for data that is not read again soon, such as a snapshot.

An ordinary copy loads every line of its target before it overwrites it, which is a third of all traffic on the memory
bus. The C library bypasses the caches only for copies of hundreds of MiB, and no tensor is that large.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final, TypeAlias

import numpy as np

from ckptstore.errors import KernelError
from ckptstore.formats import kernel_choice
from ckptstore.formats.kernel_choice import hot, steady
from ckptstore.formats.sources import Bytes

__all__ = ["Addresses", "copy", "copy_pieces", "moves", "stream"]

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

LEAST: Final = 1 << 20
"""Minimum bytes of one copy that are worth copying past the caches."""
_TRIED: Final = 1 << 12
_checked = False


@hot(compare=False)
def stream(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, which has the same length and does not overlap it."""
    np.copyto(out, source)


@hot(compare=False)
def moves(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:  # noqa: ARG001  # of the compiled form
    """Copy many pieces of memory by address. The addresses are not checked.

    Args:
        to, at, lengths: target address, source address and bytes of each piece. Pieces do not overlap.
        past: pieces of at least this many bytes are copied past the caches.
    """
    for target, origin, length in zip(to.tolist(), at.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, origin, length)


@steady
def copy(source: Bytes, out: Bytes) -> None:
    """Copy `source` to `out`, of the same length and not overlapping; a large copy bypasses the caches."""
    if len(out) >= LEAST:
        _check_once()
        stream(source, out)
    else:
        np.copyto(out, source)


@steady
def copy_pieces(to: Addresses, at: Addresses, lengths: Addresses, past: int) -> None:
    """Copy many pieces of memory by address, as `moves` does."""
    _check_once()
    moves(to, at, lengths, past)


def _check_once() -> None:
    """Copy known bytes with both kernels, before the first copy of this process that uses them.

    Later copies are not compared: that would take as much memory again. If a copy differs, compiled kernels are
    switched off, with a warning.
    """
    global _checked
    if not _checked and kernel_choice.kind() == "compiled":
        _check()
        _checked = True


def _check() -> None:
    source = np.arange(_TRIED, dtype=np.uint32).view(np.uint8)
    with contextlib.suppress(KernelError):  # switched off, with a warning
        for kernel in (stream, _moved):
            out = np.zeros(len(source) + 1, np.uint8)
            kernel(source[3:-7], out[5 : len(source) - 5])
            # Prevents: a snapshot that differs from the state of training but has a matching hash.
            if (
                not np.array_equal(out[5 : len(source) - 5], source[3:-7])
                or out[:5].any()
                or out[len(source) - 5 :].any()
            ):
                kernel_choice.distrust("compiled kernels 'stream' and 'moves'", "copy other bytes")
                return


def _moved(source: Bytes, out: Bytes) -> None:
    """Make two copies by address: a small piece, and one past the caches."""
    few = 37
    at = np.array([source.ctypes.data, source.ctypes.data + few], np.int64)
    to = np.array([out.ctypes.data, out.ctypes.data + few], np.int64)
    moves(to, at, np.array([few, len(source) - few], np.int64), 2 * few)
