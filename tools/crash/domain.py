"""Simulates a persistence domain: stores are on the medium once a fence says so, in lines of 64 bytes.

::

    posix = RecordingPosix()
    backend = PmemBackend("/store", posix, library=lambda: Domain(posix))

It replaces libpmem under a backend on a `RamPosix`. Memory that is copied without a fence waits in the buffers of the
processor that copied it; ordinary stores wait in its cache until they are flushed. A fence waits only for the copies
and flushes of *its own* thread. Waiting data may already have reached the medium: `tools.crash.enumerate` visits the
states in which any subset of these lines has.
"""

from __future__ import annotations

import threading

from ckptstore.backends.local_disk.libpmem import Libpmem
from tools.crash.ramfs import RamPosix

__all__ = ["Domain"]


class Domain(Libpmem):
    """libpmem on the mappings of `posix`.

    Args:
        posix: the file system in memory.
        forgets: names of functions that do nothing, ``drain`` or ``flush``: negative controls.
    """

    def __init__(self, posix: RamPosix, forgets: frozenset[str] = frozenset()) -> None:
        self._posix = posix
        self._forgets = forgets
        self._lock = threading.Lock()
        self._waiting: dict[int, set[int]] = {}  # thread -> stores that its next fence waits for
        self._copied: set[int] = set()

    def is_pmem(self, memory: memoryview) -> bool:  # noqa: ARG002 - of any memory
        return True

    def copy(self, target: memoryview, data: memoryview) -> None:
        number = self._posix.store(target, data)
        with self._lock:
            self._copied.add(number)
            self._waiting.setdefault(threading.get_ident(), set()).add(number)

    def flush(self, memory: memoryview) -> None:
        if "flush" in self._forgets:
            return
        found = {store.number for store in self._posix.pending_stores(memory)}
        with self._lock:  # data in another processor's buffers is in no cache
            self._waiting.setdefault(threading.get_ident(), set()).update(found - self._copied)

    def drain(self) -> None:
        if "drain" in self._forgets:
            return
        with self._lock:
            done = self._waiting.pop(threading.get_ident(), set())
        if done:
            self._posix.drained(frozenset(done))
