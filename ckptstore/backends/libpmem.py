"""libpmem (PMDK) through ctypes: the stores, flushes and fences that persistent memory needs, and Python does not have.

The library chooses the instructions for the processor it finds. Calls through ctypes release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

from ckptstore.backends.posix import address_of

__all__ = ["Libpmem", "load"]

_NAME: Final = "libpmem.so.1"
_NODRAIN: Final = 1 << 0
_NONTEMPORAL: Final = 1 << 1


class Libpmem:
    """The functions that the backend uses, on memory that it has mapped."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._is_pmem = _function(library, "pmem_is_pmem", ctypes.c_int, pointer, size)
        self._memcpy = _function(library, "pmem_memcpy", pointer, pointer, pointer, size, ctypes.c_uint)
        self._flush = _function(library, "pmem_flush", None, pointer, size)
        self._drain = _function(library, "pmem_drain", None)

    def is_pmem(self, memory: memoryview) -> bool:
        """Whether the library itself takes this for persistent memory.

        Of memory that it has not mapped itself it only does where ``PMEM_IS_PMEM_FORCE=1`` tells it to: a test bed.
        """
        return bool(self._is_pmem(address_of(memory), len(memory)))

    def copy(self, target: memoryview, data: memoryview) -> None:
        """Copy with non-temporal stores, past the caches. On the medium only after `drain`, by the same thread."""
        self._memcpy(address_of(target), address_of(data), len(data), _NODRAIN | _NONTEMPORAL)

    def flush(self, memory: memoryview) -> None:
        """Begin to write back what ordinary stores of any thread have left in the caches. Done after `drain`."""
        self._flush(address_of(memory), len(memory))

    def drain(self) -> None:
        """Wait until what this thread has copied or flushed is in the persistence domain: a fence."""
        self._drain()


def _function(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype = result  # type: ignore[assignment]
    function.argtypes = arguments  # type: ignore[assignment]
    return function


@functools.cache
def load() -> Libpmem | None:
    """The library, or None where it is not installed (or is not the one that we know)."""
    try:
        return Libpmem(ctypes.CDLL(_NAME))
    except (OSError, AttributeError):
        return None
