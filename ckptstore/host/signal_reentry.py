"""Calls that would wait for themselves: made by a signal handler that interrupted a call of the same object.

Python runs handlers in the main thread, between any two steps of what it was doing there. What that holds (a lock, a
place in flight, memory) is not given back before the handler returns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Set
from types import CodeType, FrameType

from ckptstore.errors import UsageError

__all__ = ["codes_of", "refuse_within"]


def codes_of(*methods: Callable[..., object]) -> frozenset[CodeType]:
    """The code of methods, beneath what decorates them."""
    return frozenset(inspect.unwrap(method).__code__ for method in methods)


def refuse_within(owner: object, calls: Set[CodeType]) -> None:
    """Refuse the method of `owner` that calls this, if this thread is inside another one already.

    The stack is looked through, a matter of microseconds: a note of who is inside could be left behind by Ctrl-C.

    Args:
        calls: the code of methods (`codes_of`) that must not be interrupted by this.

    Raises:
        UsageError: it is called within one of them.
    """
    method: FrameType = sys._getframe(1)
    frame = method.f_back
    while frame is not None:
        if frame.f_code in calls and frame.f_locals.get("self") is owner:
            inner, outer = method.f_code.co_name, frame.f_code.co_name
            raise UsageError(
                f"{inner} was called while this thread is inside {outer} of the same writer, by a signal handler or a "
                f"callback: it would wait for itself for ever; let the handler set a flag, and call {inner} in the "
                "training loop"
            )
        frame = frame.f_back
