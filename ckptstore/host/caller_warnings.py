"""Warnings that blame the line which called into this package, however deep the reason lies."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from types import FrameType
from typing import Final

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
    "warn",
]

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
    """The term before ended without closing, and steps that waited for their batch then are not in the store."""


class LossyWarning(UserWarning):
    """What was restored is not what training had: it was stored so on request (`DiffOptions.accumulate`)."""


class RemoteWarning(UserWarning):
    """What is saved does not get to the store's remote: it is gone, refuses, or does not answer. Saves go on."""


class UnexplainedStepWarning(UserWarning):
    """What was said of a step does not explain all of it: it takes more bytes than it might, and no bit is lost."""


class UnpinnedWarning(UserWarning):
    """A reader that cannot write (no access, no space) claims nothing: gc may delete what it reads, and it says so."""


def warn(message: str, category: type[Warning]) -> None:
    """`warnings.warn` at the line of the caller's code; in a thread of ours, at the last line of ours."""
    level = 2  # 1 would be the last line of this function
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passed(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    if frame is None or frame.f_globals.get("__name__") in _THREADS:
        level -= 1
    warnings.warn(message, category, stacklevel=level)


def _passed(module: str) -> bool:
    return module in _BETWEEN or module == _OURS or (module.startswith(f"{_OURS}.") and ".cli" not in module)
