"""Handle an optional package whose import raises something that is not an error: ``sys.exit``, or any exception.

A program that does not need the package treats it as not installed. But a signal may arrive during the import, and then
Ctrl-C or a signal handler of the script must have its usual effect.
"""

from __future__ import annotations

import dis
import signal
import threading
from types import CodeType, TracebackType

__all__ = ["by_signal"]

_RAISE = dis.opmap["RAISE_VARARGS"]


def by_signal(error: BaseException) -> bool:
    """Whether an exception out of an import was raised by a signal handler, and not by the package."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    frames = list(_frames(error.__traceback__))
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    if any(frame.tb_frame.f_code in handlers for frame in frames):
        return True
    # The interpreter's own handler has no frame. An exception of the package itself ends at a ``raise`` instruction.
    default = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return default and not (frames and _at_raise(frames[-1]))


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a Python signal handler: a function, a method, or a callable object; None for others."""
    called = vars(type(handler)).get("__call__")
    for one in (handler, getattr(handler, "__func__", None), called):
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _at_raise(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code.co_code
    return 0 <= frame.tb_lasti < len(code) and code[frame.tb_lasti] == _RAISE
