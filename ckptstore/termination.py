"""SIGTERM: schedulers send it some seconds before SIGKILL. Steps that wait for their batch are written in that time.

The handler only starts a thread: what the main thread was doing may hold any lock. When everything is written the
signal is sent again to whoever handled it before, which by default ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

from ckptstore.formats.errors import CkptError

__all__ = ["forget", "watch"]


class _Flushes(Protocol):
    def flush(self) -> None: ...


_writers: weakref.WeakSet[_Flushes] = weakref.WeakSet()
_before: object = None
"""What handled the signal before this module did; None: it does not handle it."""


def watch(writer: _Flushes) -> None:
    """Flush `writer` on SIGTERM, until `forget`. Does nothing outside the main thread: only that one sets handlers."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        return
    _writers.add(writer)
    if _before is None:
        before = signal.getsignal(signal.SIGTERM)
        if before is not None:  # None: a handler that is not Python's, and cannot be put back
            _before = before
            signal.signal(signal.SIGTERM, _on_signal)


def forget(writer: _Flushes) -> None:
    """Stop watching; the last one puts back what was there before."""
    _writers.discard(writer)
    if not _writers and threading.current_thread() is threading.main_thread():
        _put_back()


def _put_back() -> None:
    global _before
    if _before is not None and signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, _before)  # type: ignore[arg-type]
        _before = None


def _on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # as `signal.signal` wants it
    ignored = _before is signal.SIG_IGN
    if not ignored:
        _put_back()  # a second signal does not wait
    threading.Thread(target=_flush_all, args=(not ignored,), name="ckptstore-sigterm").start()


def _flush_all(again: bool) -> None:
    try:
        for writer in list(_writers):
            with contextlib.suppress(CkptError):  # its saves say so
                writer.flush()
    finally:
        if again:
            os.kill(os.getpid(), signal.SIGTERM)
