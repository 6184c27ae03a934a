"""Refuse calls that would deadlock: a signal handler calls a method while it interrupts another of the same object.

Python runs signal handlers in the main thread, between any two bytecode instructions. The interrupted call releases
nothing that it holds (a lock, a slot in flight, memory) before the handler returns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Set
from types import CodeType, FrameType

from ckptstore.errors import UsageError

__all__ = ["codes_of", "refuse_within"]


def codes_of(*methods: Callable[..., object]) -> frozenset[CodeType]:
    """The code objects of methods, without their decorators."""
    return frozenset(inspect.unwrap(method).__code__ for method in methods)


def refuse_within(owner: object, calls: Set[CodeType]) -> None:
    """Refuse the calling method of `owner` if this thread is already inside one of `calls` on the same object.

    Searches the stack, which takes microseconds. Ctrl-C could leave a stale flag behind, but not a stale stack.

    Args:
        calls: code objects of the methods (`codes_of`) that the calling method must not interrupt.

    Raises:
        UsageError: this thread is inside one of them.
    """
    method: FrameType = sys._getframe(1)
    frame = method.f_back
    while frame is not None:
        if frame.f_code in calls and frame.f_locals.get("self") is owner:
            inner, outer = method.f_code.co_name, frame.f_code.co_name
            raise UsageError(
                f"{inner} was called while this thread is inside {outer} of the same writer, by a signal handler or a "
                f"callback: it would wait for itself forever; let the handler set a flag, and call {inner} in the "
                "training loop"
            )
        frame = frame.f_back
