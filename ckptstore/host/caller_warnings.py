"""Warnings that point at the caller's line, however deep in this package they are raised.

A filter may turn warnings into errors (``warnings.simplefilter("error")``). Such an error must not interrupt the work
that it warns about. So a function that records something is decorated with `warns_last`, and raises when its work is
done. In a thread of this package no caller could catch the error; there the text is logged.
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

_PACKAGE: Final = __name__.partition(".")[0]
_BETWEEN: Final = frozenset({contextlib.__name__, functools.__name__})
"""Modules whose frames may be between two frames of this package."""
_THREADS: Final = frozenset({"threading", "concurrent.futures.thread"})


class BranchWarning(UserWarning):
    """Some checkpoints will never be drained, because the run was continued elsewhere. They stay readable."""


class DamagedLogWarning(UserWarning):
    """Slots of a store's log are damaged or missing, so their records are unknown. Names them and `ckpt verify`."""


class DeterminismWarning(UserWarning):
    """A setting that determines a run's bits differs from what the parent's term recorded."""


class DivergedReplicasWarning(UserWarning):
    """A tensor that should be equal on several ranks differs. It was saved nevertheless, as requested."""


class FallbackWarning(UserWarning):
    """An encoding of a checkpoint is damaged. The checkpoint was restored from another encoding, bit for bit."""


class FreshStartWarning(UserWarning):
    """A writer opened with ``latest`` starts without a parent, although the store has checkpoints of earlier terms."""


class HiddenTensorsWarning(UserWarning):
    """A state read without ``rank=`` lacks tensors, because the ranks have different values there. Names them."""


class LostStepsWarning(UserWarning):
    """The previous term ended without `close`. Steps that were waiting then (for their batch, or for the term's first
    checkpoint) are not in the store."""


class LossyWarning(UserWarning):
    """The restored state differs from the trained one: it was stored lossily on request (`DiffOptions.accumulate`)."""


class RemoteWarning(UserWarning):
    """Saves do not reach the store's remote: it is gone, refuses, or does not answer. Local saves continue."""


class UnexplainedStepWarning(UserWarning):
    """The declared updates do not explain all of a step. It takes more bytes than necessary, but no bit is lost."""


class UnpinnedWarning(UserWarning):
    """A reader cannot write its pin (no access, no space), so gc may delete what it reads. Such a read then fails."""


class _Delayed(threading.local):
    """The warnings that one thread gives when its call is done.

    Attributes:
        depth: number of nested `WarningsLast` blocks.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.warnings: list[tuple[str, type[Warning]]] = []


_delayed = _Delayed()


class WarningsLast:
    """A ``with`` block that delays warnings until the outermost block ends, in the thread that entered it.

    If warnings are errors, the first is raised, with the others as notes. If the body raises, its error is raised, with
    all warnings as notes.
    """

    def __enter__(self) -> None:
        _delayed.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _delayed.depth -= 1
        # Prevents: a step that is lost because a warning filter raised an error before the step was recorded.
        if _delayed.depth:
            return
        delayed, _delayed.warnings = _delayed.warnings, []
        raised: list[Warning] = []
        for message, category in delayed:
            try:
                warn(message, category)
            except Warning as warning:  # continue, so that every warning is given
                raised.append(warning)
        first = error if error is not None or not raised else raised.pop(0)
        for other in raised:
            assert first is not None
            first.add_note(f"{type(other).__name__}: {other}")
        if error is None and first is not None:
            raise first


def warns_last(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that records something: its warnings come when it is done (see `WarningsLast`)."""

    @wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with WarningsLast():
            return call(*args, **kwargs)

    return run


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the caller's line outside this package. In a thread of this package: at the package's outermost line.

    Inside `WarningsLast` the warning is delayed. In a thread of this package it is never raised: if warnings are
    errors, it is logged (logger ``ckptstore``, level WARNING).
    """
    if _delayed.depth:
        _delayed.warnings.append((message, category))
        return
    level = 2  # 1 would be a line of this function
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    if frame is None or frame.f_globals.get("__name__") in _THREADS:
        level -= 1
    try:
        warnings.warn(message, category, stacklevel=level)
    except Warning:
        if not threading.current_thread().name.startswith(f"{_PACKAGE}-"):
            raise
        # Prevents: a save that fails because its thread gave a warning.
        _LOG.warning("%s: %s", category.__name__, message)


def _is_internal(module: str) -> bool:
    return module in _BETWEEN or module == _PACKAGE or (module.startswith(f"{_PACKAGE}.") and ".cli" not in module)
