"""Ends worker processes of `DataLoader` iterators that a run has left in the middle of an epoch."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator

__all__ = ["ended_workers"]


@contextlib.contextmanager
def ended_workers() -> Iterator[None]:
    """End the workers that were started meanwhile and are still running.

    A framework's objects refer to each other, so the collector frees the iterator, and it closes the queues first: the
    iterator's request to end then reaches no worker, and each is waited for five seconds. Workers that this process
    terminates end without an error.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        started = set(multiprocessing.active_children()) - before
        for one in started:
            one.terminate()
        for one in started:
            one.join()
