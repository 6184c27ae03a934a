"""Flush open writers on SIGTERM, so that steps waiting for their batch are written before SIGKILL comes.

Schedulers send SIGTERM some seconds before SIGKILL. The handler only starts a thread, because the interrupted main
thread may hold any lock. When everything is written, the thread sends the signal again, and the handler passes it to
the one that was installed before; by default that ends the process. A second SIGTERM does not wait for the thread.

A script may install its own handler while writers are open. The next writer then installs this module's handler once
more, above the script's: whatever the script's does, and whether it calls the earlier one, every writer is flushed. A
handler that replaced this one while no writer was opened afterwards decides itself; if it calls this one, it runs
twice: its second call is the signal that is sent again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, ClassVar, Final

from ckptstore.host import background_threads, interpreter_exit

__all__ = ["forget", "watch"]


_writers: Final[set[interpreter_exit.Finishable]] = set()
"""The set is only changed by single calls: the thread copies it while the main thread opens writers."""


def watch(writer: interpreter_exit.Finishable) -> None:
    """Flush `writer` on SIGTERM until `forget` is called.

    Does nothing outside the main thread, because only the main thread can install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _writers.add(writer)
    top = signal.getsignal(signal.SIGTERM)
    # Prevents: steps lost without a word, where a handler of the script has replaced the one of an earlier writer.
    if top is not None and not (isinstance(top, _Handler) and top.ready):  # None: not Python's, cannot be restored
        signal.signal(signal.SIGTERM, _Handler(top))


def forget(writer: interpreter_exit.Finishable) -> None:
    """Stop flushing `writer`. After the last writer the previous handler is restored, unless another replaced ours."""
    _writers.discard(writer)
    if not _writers and threading.current_thread() is threading.main_thread():
        top = signal.getsignal(signal.SIGTERM)
        if isinstance(top, _Handler) and top.ready:
            top.put_back()


class _Handler:
    """One installation of the handler. It flushes once, except above a handler that ignores the signal.

    Attributes:
        ready: the next signal flushes. Otherwise a flush has begun, and the next signal goes to the handler before.
    """

    passing: ClassVar[bool] = False
    """Whether a handler passes the signal on at the moment: the installations below must not flush again."""

    def __init__(self, before: Any) -> None:
        """
        Args:
            before: the handler that this one replaces.
        """
        self.ready = True
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._before is signal.SIG_IGN:
            if not interpreter_exit.under_way():
                background_threads.start(_flush_all, "sigterm", daemon=False)
        elif not self.ready or _Handler.passing:
            self._pass_on(number, frame)
        elif interpreter_exit.under_way():  # everything is being written already, and then the process exits
            self.ready = False
            self.put_back()  # a second SIGTERM takes effect at once
        elif _writers:
            self.ready = False
            background_threads.start(_flush_and_send_again, "sigterm", daemon=False)
        else:
            self._pass_on(number, frame)

    def put_back(self) -> None:
        """Restore the handler before, if this one is installed."""
        before = self._before
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, before)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.ready = True  # a handler above may call this one for later signals
        self.put_back()
        if not callable(self._before):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        outer, _Handler.passing = _Handler.passing, True
        try:
            self._before(number, frame)
        finally:
            _Handler.passing = outer


def _flush_and_send_again() -> None:
    try:
        _flush_all()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _flush_all() -> None:
    for writer in list(_writers):
        # The writer's saves report the error. An error of one writer must not keep the others from flushing.
        with contextlib.suppress(Exception):
            writer._settle()


# Prevents: a forked child that waits for threads of its parent, and does not end on SIGTERM.
os.register_at_fork(after_in_child=_writers.clear)
