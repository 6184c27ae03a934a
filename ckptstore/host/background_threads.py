"""Single threads beside the work: one job, one job after a time, a job again and again. Pools are in `threads`.

All of them are daemons but where it is said: one that hangs on its medium keeps no process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Periodic", "after", "start"]


def start(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread:
    """Begin one job in a thread of its own.

    Args:
        name: how the thread is named, after ``ckptstore-``.
        daemon: whether the process may end without it.

    Raises:
        RuntimeError: no thread is to be had, or the interpreter is ending.
    """
    thread = threading.Thread(target=work, name=f"ckptstore-{name}", daemon=daemon)
    thread.start()
    return thread


def after(seconds: float, work: Callable[[], object]) -> Callable[[], None]:
    """Begin a job in so many seconds -> what cancels it, unless it has begun.

    Raises:
        RuntimeError: no thread is to be had, or the interpreter is ending.
    """
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.name = "ckptstore-timer"  # threads of this package are known by their names (`caller_warnings`)
    timer.start()
    return timer.cancel


class Periodic:
    """Does a job again and again, until it is stopped. Nothing is done before the first interval has passed."""

    def __init__(
        self, seconds: float, work: Callable[[], object], name: str, at_end: Callable[[], object] = lambda: None
    ) -> None:
        """Begin nothing yet.

        Args:
            seconds: between the end of one time and the beginning of the next.
            work: what it raises ends it.
            name: how its thread is named, after ``ckptstore-``.
            at_end: the last thing that the thread does, whatever ended it.
        """
        self._seconds = seconds
        self._work = work
        self._name = name
        self._at_end = at_end
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether there has been a thread, so that `at_end` is its business."""
        return self._thread is not None

    def start(self) -> None:
        """Begin. Raises `RuntimeError` where no thread is to be had."""
        self._thread = start(self._run, self._name)

    def stop(self) -> None:
        """Do nothing more; waits for nothing, and may be called before `start`, which then only comes to the end."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, `at_end` included; at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._seconds):
                self._work()
        finally:
            self._at_end()
