"""Flush open writers on SIGTERM, so that steps waiting for their batch are written before SIGKILL comes.

Schedulers send SIGTERM some seconds before SIGKILL. The handler only starts a thread, because the interrupted main
thread may hold any lock. When everything is written, the signal is sent again, to the handler that was installed
before; by default that ends the process. A handler that was installed later and calls this one runs twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from types import FrameType

from ckptstore.host import background_threads, interpreter_exit

__all__ = ["forget", "watch"]


_writers: weakref.WeakSet[interpreter_exit.Finishable] = weakref.WeakSet()
_before: object = None
"""The handler that this module replaced. None: this module's handler is not installed."""
_called_back = False
"""Whether a handler installed later called this one. If so, the signal that is sent again arrives here again."""


def watch(writer: interpreter_exit.Finishable) -> None:
    """Flush `writer` on SIGTERM until `forget` is called.

    Does nothing outside the main thread, because only the main thread can install handlers.
    """
    global _before
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if not _writers and before is not _on_signal:
        _before = None  # another handler replaced this one, and this one was never put back
    _writers.add(writer)
    if _before is None and before is not None:  # None: the handler is not a Python one and cannot be restored
        _before = before
        signal.signal(signal.SIGTERM, _on_signal)


def forget(writer: interpreter_exit.Finishable) -> None:
    """Stop flushing `writer`. After the last writer the previous handler is restored."""
    _writers.discard(writer)
    if not _writers and threading.current_thread() is threading.main_thread():
        _put_back()


def _put_back() -> None:
    global _before
    if _before is not None and signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, _before)  # type: ignore[arg-type]
        _before = None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _called_back
    ignored = _before is signal.SIG_IGN
    if not ignored:
        if _called_back or _before is None:
            _called_back = False
            _hand_on(number, frame)
            return
        _put_back()  # a second SIGTERM takes effect at once
        _called_back = _before is not None
    if interpreter_exit.under_way():
        return  # everything is being written already, and then the process exits
    background_threads.start(lambda: _flush_all(not ignored), "sigterm", daemon=False)


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Run the previous handler directly: sending the signal again would only run this module's handler again."""
    if callable(_before):
        _before(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _flush_all(again: bool) -> None:
    try:
        for writer in list(_writers):
            # The writer's saves report the error. An error of one writer must not keep the others from flushing.
            with contextlib.suppress(Exception):
                writer._settle()
    finally:
        if again:
            os.kill(os.getpid(), signal.SIGTERM)
