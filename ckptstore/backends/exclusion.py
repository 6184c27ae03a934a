"""One at a time: who works on a place that other threads and processes of this machine may work on, too.

A killed process lets go. On a file system without locks, and in a bucket, no other process is kept out: what is done
there has to be right all the same.
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
from ckptstore.backends.local import LocalBackend

__all__ = ["alone", "root_of"]

_local_locks: dict[str, threading.Lock] = {}
_local_locks_lock = threading.Lock()
_handles: set[int] = set()
"""Of folders that are locked, or about to be."""


def root_of(backend: Backend) -> str | None:
    """The folder that a store is in, whatever names it has; None: it is in none."""
    return os.path.realpath(backend.root) if isinstance(backend, LocalBackend) else None


@contextlib.contextmanager
def alone(backend: Backend, patience: Callable[[], bool] = lambda: True, *, make: bool = False) -> Iterator[bool]:
    """Be the only one of this machine that works here, for the length of the ``with``.

    Two drains of a store at once, or two copies to one place, would write the same segments, and one might replace what
    the other has just made known.

    Args:
        patience: asked while somebody else is at work -> whether to go on waiting.
        make: whether to make a folder that is not there, which is what is locked. May raise as `Backend.probe`.

    Yields:
        whether nobody else is; False: patience is over.
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
                    # Prevents: a process that was forked meanwhile (a worker of a DataLoader), which shares the handle,
                    # keeps everybody out for as long as it lives.
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)
    finally:
        lock.release()


def _forked() -> None:
    """A child shares no lock of its parent: should that be killed, it would hold it alone."""
    global _local_locks_lock  # its owner may be a thread that the child has not
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
        except OSError:  # no locks on this file system
            break
        else:
            break
    return True
