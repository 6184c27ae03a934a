"""Call libpmem (PMDK) through ctypes: the stores, flushes and fences for persistent memory that Python does not have.

The library chooses the instructions for the processor. Calls through ctypes release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

from ckptstore.backends.local_disk.posix import address_of

__all__ = ["Libpmem", "load"]

_NAME: Final = "libpmem.so.1"
_NODRAIN: Final = 1 << 0
_NONTEMPORAL: Final = 1 << 1


class Libpmem:
    """The libpmem functions that the backend calls on memory that it has mapped."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._is_pmem = _function(library, "pmem_is_pmem", ctypes.c_int, pointer, size)
        self._memcpy = _function(library, "pmem_memcpy", pointer, pointer, pointer, size, ctypes.c_uint)
        self._flush = _function(library, "pmem_flush", None, pointer, size)
        self._drain = _function(library, "pmem_drain", None)

    def is_pmem(self, memory: memoryview) -> bool:
        """Whether the library itself considers this memory persistent.

        For memory that it has not mapped itself it does so only with ``PMEM_IS_PMEM_FORCE=1``, as on a test bed.
        """
        return bool(self._is_pmem(address_of(memory), len(memory)))

    def copy(self, target: memoryview, data: memoryview) -> None:
        """Copy with non-temporal stores, past the caches. Durable only after `drain` in the same thread."""
        self._memcpy(address_of(target), address_of(data), len(data), _NODRAIN | _NONTEMPORAL)

    def flush(self, memory: memoryview) -> None:
        """Begin to write back what ordinary stores of any thread left in the caches. Complete only after `drain`."""
        self._flush(address_of(memory), len(memory))

    def drain(self) -> None:
        """Wait until what this thread copied or flushed is in the persistence domain (a fence)."""
        self._drain()


def _function(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype = result  # type: ignore[assignment]
    function.argtypes = arguments  # type: ignore[assignment]
    return function


@functools.cache
def load() -> Libpmem | None:
    """The library; None if it is not installed or lacks a function that we need."""
    try:
        return Libpmem(ctypes.CDLL(_NAME))
    except (OSError, AttributeError):
        return None
