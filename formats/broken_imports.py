"""An optional package that ends its own import with what is no error: ``sys.exit``, an exception of any kind.

To a program that can do without the package this is one that is not there. But a signal may come at the same moment,
and Ctrl-C or a handler of the script's must end what it was meant to end.
"""

from __future__ import annotations

import dis
import signal
import threading
from types import CodeType, TracebackType

__all__ = ["by_signal"]

_RAISE = dis.opmap["RAISE_VARARGS"]


def by_signal(error: BaseException) -> bool:
    """Whether what came out of an import was raised by a signal's handler, and not by the package."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    frames = list(_frames(error.__traceback__))
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    if any(frame.tb_frame.f_code in handlers for frame in frames):
        return True
    # The interpreter's own handler has no frame. What the package raises by itself stands at a ``raise``.
    default = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return default and not (frames and _at_raise(frames[-1]))


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _code_of(handler: object) -> CodeType | None:
    """The code of a handler in Python: a function, a method, or an object that is called."""
    called = vars(type(handler)).get("__call__")
    for one in (handler, getattr(handler, "__func__", None), called):
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _at_raise(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code.co_code
    return 0 <= frame.tb_lasti < len(code) and code[frame.tb_lasti] == _RAISE
