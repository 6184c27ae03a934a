"""Exclusive access to a place that other threads and processes of this machine may also work on.

A killed process releases its lock. On a file system without locks, and in a bucket, other processes are not excluded:
the protocol must be correct without this lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend

__all__ = ["exclusive_access", "root_of"]

_local_locks: dict[str, threading.Lock] = {}
_local_locks_lock = threading.Lock()
_handles: set[int] = set()
"""Handles of folders that are locked or are about to be locked."""


def root_of(backend: Backend) -> str | None:
    """The real path of the folder that holds the store, whatever links lead to it; None if it is not in a folder."""
    return os.path.realpath(backend.root) if isinstance(backend, LocalBackend) else None


@contextlib.contextmanager
def exclusive_access(
    backend: Backend, patience: Callable[[], bool] = lambda: True, *, make: bool = False
) -> Iterator[bool]:
    """Hold exclusive access to this place, on this machine, during the ``with``.

    Two drains of one store, or two copies to one place, would write the same segments, and one could replace a segment
    that the other has just published.

    Args:
        patience: called while another thread or process holds the place -> whether to continue waiting.
        make: create the folder if it is missing, because the folder is what is locked. May raise as `Backend.probe`.

    Yields:
        True with exclusive access; False if `patience` returned False.
    """
    with _local_locks_lock:
        lock = _local_locks.setdefault(root_of(backend) or backend.url, threading.Lock())
    while not lock.acquire(timeout=0.1):
        if not patience():
            yield False
            return
    try:
        handle = _handle(backend, make=make)
        try:
            yield _locked(handle, patience)
        finally:
            if handle in _handles:
                _handles.discard(handle)
                with contextlib.suppress(OSError):
                    # Prevents: a process that was forked meanwhile (a worker of a DataLoader) shares the handle and
                    # blocks all others for as long as it lives.
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)
    finally:
        lock.release()


def _forked() -> None:
    """Drop the parent's locks in a child: if the parent were killed, the child would hold them alone."""
    global _local_locks_lock  # its owner may be a thread that does not exist in the child
    _local_locks_lock = threading.Lock()
    _local_locks.clear()
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_forked)


def _handle(backend: Backend, *, make: bool) -> int | None:
    root = root_of(backend)
    if root is None:
        return None
    if make and not backend.read_only and not Path(root).exists():
        backend.probe()
    with contextlib.suppress(OSError):
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _handles.add(handle)
        return handle
    return None


def _locked(handle: int | None, patience: Callable[[], bool]) -> bool:
    while handle is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
            if not patience():
                return False
        except OSError:  # this file system has no locks
            break
        else:
            break
    return True
