"""SIGTERM: schedulers send it some seconds before SIGKILL. Steps that wait for their batch are written in that time.

The handler only starts a thread: what the main thread was doing may hold any lock. When everything is written the
signal is sent again to whoever handled it before, which by default ends the process. A handler that was set later and
calls this one hears of it twice.
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


_writers: weakref.WeakSet[interpreter_exit.Ending] = weakref.WeakSet()
_before: object = None
"""What handled the signal before this module did; None: it does not handle it."""
_called_back = False
"""Whether a later handler called this one, so that the signal, sent again, leads here again."""


def watch(writer: interpreter_exit.Ending) -> None:
    """Flush `writer` on SIGTERM, until `forget`. Does nothing outside the main thread: only that one sets handlers."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if not _writers and before is not _on_signal:
        _before = None  # another handler took the place of this one, and nobody put this one back
    _writers.add(writer)
    if _before is None and before is not None:  # None: a handler that is not Python's, and cannot be put back
        _before = before
        signal.signal(signal.SIGTERM, _on_signal)


def forget(writer: interpreter_exit.Ending) -> None:
    """Stop watching; the last one puts back what was there before."""
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
        _put_back()  # a second signal does not wait
        _called_back = _before is not None
    if interpreter_exit.under_way():
        return  # everything is being written already, and the process ends with that
    background_threads.start(lambda: _flush_all(not ignored), "sigterm", daemon=False)


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Do what was done before this module handled the signal: sending it again would only lead here again."""
    if callable(_before):
        _before(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _flush_all(again: bool) -> None:
    try:
        for writer in list(_writers):
            # Its saves say so; and what goes wrong with one writer is no reason to lose what others wait with.
            with contextlib.suppress(Exception):
                writer._settle()
    finally:
        if again:
            os.kill(os.getpid(), signal.SIGTERM)
