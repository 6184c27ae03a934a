"""Waits for what another thread does, instead of for a time: a busy machine may stop any thread for seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

__all__ = ["LONG", "once_it_waits", "until", "until_it_waits", "waits"]

LONG = 120.0
"""Seconds after which a test gives up: something hangs."""


def until(true: Callable[[], object], what: str = "it never came to that") -> None:
    """Return when something is true. Raises `AssertionError` with `what` if it hangs."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def until_it_waits(thread: threading.Thread, within: str) -> None:
    """Return when a thread waits as in `waits`."""
    until(lambda: waits(thread, within), f"{thread.name} never waits within {within}")


def once_it_waits(thread: threading.Thread, within: str, work: Callable[[], object], later: float = 0.0) -> None:
    """Do some work in another thread, `later` seconds after `thread` waits as in `waits`."""

    def run() -> None:
        until_it_waits(thread, within)
        time.sleep(later)
        work()

    threading.Thread(target=run, daemon=True).start()


def waits(thread: threading.Thread, within: str) -> bool:
    """Whether a thread waits for another one, inside a function with this qualified name.

    It waits for a condition, event, semaphore, barrier, queue or future. A bare lock is not noticed.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code is not threading.Condition.wait.__code__:
        return False
    while frame is not None and frame.f_code.co_qualname != within:
        frame = frame.f_back
    return frame is not None
