"""Warnings that blame the line which called into this package, however deep the reason lies.

A warning may be an error (``warnings.simplefilter("error")``). It must not stop what it tells of: a call that records
something is declared with `warns_last`, and raises when all of it is done. A thread of this package has no caller who
could be told by an exception: there the text is logged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Final, ParamSpec, TypeVar

__all__ = [
    "BranchWarning",
    "DamagedLogWarning",
    "DeterminismWarning",
    "DivergedReplicasWarning",
    "FallbackWarning",
    "FreshStartWarning",
    "HiddenTensorsWarning",
    "LossyWarning",
    "LostStepsWarning",
    "RemoteWarning",
    "UnexplainedStepWarning",
    "UnpinnedWarning",
    "WarningsLast",
    "warn",
    "warns_last",
]

_LOG: Final = logging.getLogger("ckptstore")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_OURS: Final = __name__.partition(".")[0]
_BETWEEN: Final = frozenset({contextlib.__name__, functools.__name__})
"""Modules that are passed on the way from one of ours to another."""
_THREADS: Final = frozenset({"threading", "concurrent.futures.thread"})


class BranchWarning(UserWarning):
    """Checkpoints of a store never get to its remote: the run was continued elsewhere. They stay readable."""


class DamagedLogWarning(UserWarning):
    """Slots of a store's log are damaged or missing: what they recorded is not known. Names them, and `ckpt verify`."""


class DeterminismWarning(UserWarning):
    """Something that decides a run's bits differs from what the parent's term recorded."""


class DivergedReplicasWarning(UserWarning):
    """A tensor that is to be the same on several ranks is not; it was saved nevertheless, as asked for."""


class FallbackWarning(UserWarning):
    """What is stored of a checkpoint is damaged, and it was restored by another of its encodings, bit for bit."""


class FreshStartWarning(UserWarning):
    """A writer that asked for ``latest`` begins from nothing, although the store holds checkpoints of earlier terms."""


class HiddenTensorsWarning(UserWarning):
    """What was read without ``rank=`` lacks tensors: another rank has something else in their place. Names them."""


class LostStepsWarning(UserWarning):
    """The term before ended without closing, and steps that waited then (for their batch, or for the term's first
    checkpoint) are not in the store."""


class LossyWarning(UserWarning):
    """What was restored is not what training had: it was stored so on request (`DiffOptions.accumulate`)."""


class RemoteWarning(UserWarning):
    """What is saved does not get to the store's remote: it is gone, refuses, or does not answer. Saves go on."""


class UnexplainedStepWarning(UserWarning):
    """What was said of a step does not explain all of it: it takes more bytes than it might, and no bit is lost."""


class UnpinnedWarning(UserWarning):
    """A reader that cannot write (no access, no space) claims nothing: gc may delete what it reads, and it says so."""


class _Held(threading.local):
    """What one thread has to say when its call is done.

    Attributes:
        depth: how many calls are under way that warn last, one within the other.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.said: list[tuple[str, type[Warning]]] = []


_held = _Held()


class WarningsLast:
    """A ``with`` whose warnings are given when the outermost one ends, in the thread that entered it.

    Where warnings are errors the first is raised, with the others as notes. If the body raises, its error is raised,
    with all of them as notes.
    """

    def __enter__(self) -> None:
        _held.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.depth -= 1
        # Prevents: a step that a filter of warnings loses, because the warning was raised before the step was recorded.
        if _held.depth:
            return
        said, _held.said = _held.said, []
        raised: list[Warning] = []
        for message, category in said:
            try:
                warn(message, category)
            except Warning as warning:  # each of them is to be given
                raised.append(warning)
        first = error if error is not None or not raised else raised.pop(0)
        for other in raised:
            assert first is not None
            first.add_note(f"{type(other).__name__}: {other}")
        if error is None and first is not None:
            raise first


def warns_last(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Declare a function that records something: it warns when that is done (see `WarningsLast`)."""

    @wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with WarningsLast():
            return call(*args, **kwargs)

    return run


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's code; in a thread of this package, at the last line of the package.

    Within `WarningsLast` the warning is given at the end. In a thread of this package it is never raised: where
    warnings are errors, it is logged (``ckptstore``, level WARNING).
    """
    if _held.depth:
        _held.said.append((message, category))
        return
    level = 2  # 1 would be the last line of this function
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passed(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    if frame is None or frame.f_globals.get("__name__") in _THREADS:
        level -= 1
    try:
        warnings.warn(message, category, stacklevel=level)
    except Warning:
        if not threading.current_thread().name.startswith(f"{_OURS}-"):
            raise
        # Prevents: a save that fails because its thread had something to say.
        _LOG.warning("%s: %s", category.__name__, message)


def _passed(module: str) -> bool:
    return module in _BETWEEN or module == _OURS or (module.startswith(f"{_OURS}.") and ".cli" not in module)
