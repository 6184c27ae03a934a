"""Make stores into mapped files survive a power cut: with the processor's instructions or with msync.

If the file is on persistent memory (``MAP_SYNC`` succeeds) and libpmem is installed, blocks are copied with
non-temporal stores, and each thread ends its copy with a fence. A fence waits only for the stores of its own processor.
One fence by the thread that seals would not cover the stores of the others (PCcheck, on its algorithm: "The fence() is
internal to each CPU, meaning that the main thread ... cannot call a fence to cover all data that was written").
Measured, it costs nothing beside 16 MiB of stores. Everywhere else msync is used, which is correct on any file system.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeAlias

from ckptstore.backends.local_disk.libpmem import Libpmem
from ckptstore.backends.local_disk.posix import Posix, address_of

__all__ = ["Library", "Stores", "mapped"]

Library: TypeAlias = Callable[[], Libpmem | None]
"""Returns libpmem, or None."""

_NOT_SYNCED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
"""Errors that refuse MAP_SYNC: the file system has none, or the kernel does not know the flag."""


class Stores(ABC):
    """Copy bytes to mapped memory and make them durable.

    Attributes:
        text: the method in words, for people.
    """

    text: str

    @abstractmethod
    def copy(self, target: memoryview, data: memoryview) -> None:
        """Copy, without holding the interpreter's lock."""

    @abstractmethod
    def drain(self) -> None:
        """Complete what the calling thread copied, if completion is per thread."""

    @abstractmethod
    def persist(self, memory: memoryview) -> None:
        """Make durable what ordinary stores of any thread left in `memory`."""

    @abstractmethod
    def sync(self, memory: memoryview) -> None:
        """Make durable what was copied to the mapping `memory` and what `drain` does not cover."""


class NonTemporal(Stores):
    def __init__(self, library: Libpmem, note: str = "") -> None:
        self._library = library
        self.text = f"libpmem, non-temporal stores{note}"

    def copy(self, target: memoryview, data: memoryview) -> None:
        self._library.copy(target, data)

    def drain(self) -> None:
        # Prevents: a committed segment whose last lines were still in a buffer of the processor.
        self._library.drain()

    def persist(self, memory: memoryview) -> None:
        # Prevents: a committed segment whose lines were still in the processor's cache; the fence waits for them.
        self._library.flush(memory)
        self._library.drain()

    def sync(self, memory: memoryview) -> None:
        """Do nothing: every thread has drained its copies."""


class MsyncStores(Stores):
    def __init__(self, posix: Posix, why: str) -> None:
        self._posix = posix
        self.text = f"msync: {why}"

    def copy(self, target: memoryview, data: memoryview) -> None:
        ctypes.memmove(address_of(target), address_of(data), len(data))

    def drain(self) -> None:
        """Do nothing: the system tracks the stores of all threads."""

    def persist(self, memory: memoryview) -> None:
        # Prevents: a committed segment whose pages were still in the page cache.
        self._posix.msync(memory)

    def sync(self, memory: memoryview) -> None:
        # Prevents: the same. POSIX assigns stores through a mapping to msync; fdatasync need not cover them.
        self._posix.msync(memory)


def mapped(posix: Posix, library: Library, descriptor: int, offset: int, size: int) -> tuple[memoryview, Stores]:
    """Map allocated bytes of a file -> the memory, and the way to store to it. Raises `OSError`."""
    try:
        memory, sync = posix.map_shared(descriptor, offset, size, sync=True), True
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
        memory, sync = posix.map_shared(descriptor, offset, size, sync=False), False
    found = library()
    if sync and found is not None:
        return memory, NonTemporal(found)
    if found is not None and found.is_pmem(memory):
        return memory, NonTemporal(found, "; no MAP_SYNC here, but PMEM_IS_PMEM_FORCE is set: a test bed")
    return memory, MsyncStores(posix, "libpmem.so.1 is not installed" if sync else "no MAP_SYNC here")
