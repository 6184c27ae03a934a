"""Blocks a writer's commit thread: steps given meanwhile are in flight, and none of them is durable.

It uses only public means: `Writer.poll` makes that thread do its upkeep after all earlier saves, and the upkeep lists
``req/``. Here the medium does not answer until the test permits it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ckptstore

__all__ = ["elsewhere", "hold"]

_T = TypeVar("_T")


def hold(store: ckptstore.Store, writer: ckptstore.Writer, seconds: float = 60.0) -> threading.Event:
    """Make the commit thread of `writer` wait -> the gate, which lets it continue; it also continues after `seconds`.

    When this returns the thread is already waiting. `store` is the one that opened the writer, whose upkeep has not
    failed.
    """
    reached, gate = threading.Event(), threading.Event()
    medium: Any = store.backend
    listed = medium.list

    def late(prefix: str) -> Any:
        if prefix == "req/" and not reached.is_set():
            reached.set()
            gate.wait(seconds)
        return listed(prefix)

    def poll() -> None:
        with contextlib.suppress(ckptstore.CkptError):
            writer.poll()

    medium.list = late
    try:
        threading.Thread(target=poll, daemon=True).start()
        assert reached.wait(60), "the writer does no upkeep"
    finally:
        del medium.list
    return gate


def elsewhere(work: Callable[[], _T]) -> _T:
    """The result of `work` in another thread, which has ended when this returns: saves that overtake each other."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
