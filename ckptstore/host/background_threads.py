"""Single background threads: run a job once, after a delay, or periodically. Pools are in `threads`.

They are daemon threads unless the caller says otherwise: a thread that hangs on its medium does not block the exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Periodic", "after", "start"]


def start(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread:
    """Run one job in a new thread.

    Args:
        name: name of the thread, without the prefix ``ckptstore-``.
        daemon: whether the process may exit before the job is done.

    Raises:
        RuntimeError: no thread can be started, or the interpreter is exiting.
    """
    thread = threading.Thread(target=work, name=f"ckptstore-{name}", daemon=daemon)
    thread.start()
    return thread


def after(seconds: float, work: Callable[[], object]) -> Callable[[], None]:
    """Run a job after `seconds`. Returns a function that cancels the job if it has not begun.

    Raises:
        RuntimeError: no thread can be started, or the interpreter is exiting.
    """
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.name = "ckptstore-timer"  # `caller_warnings` recognizes the package's threads by name
    timer.start()
    return timer.cancel


class Periodic:
    """Runs a job periodically until it is stopped. The first run comes after the first interval."""

    def __init__(
        self, seconds: float, work: Callable[[], object], name: str, at_end: Callable[[], object] = lambda: None
    ) -> None:
        """Set up the job. `start` starts the thread.

        Args:
            seconds: from the end of one run to the beginning of the next.
            work: the job. An exception ends the thread.
            name: name of the thread, without the prefix ``ckptstore-``.
            at_end: the thread calls this last, even after an exception.
        """
        self._seconds = seconds
        self._work = work
        self._name = name
        self._at_end = at_end
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the thread was started. If so, the thread calls `at_end`."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if that is impossible."""
        self._thread = start(self._run, self._name)

    def stop(self) -> None:
        """Stop after the current run, without waiting. If called before `start`, only `at_end` runs."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, `at_end` included; at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._seconds):
                self._work()
        finally:
            self._at_end()
