"""For training scripts: the `Checkpointer`, `OptimizerStep`, snapshots layer by layer. It needs torch.

Imports `agent`, `store`, `write` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from ckptstore.training.checkpointer import Checkpointer
    from ckptstore.training.layerwise.gate_times import Gate, LayerwiseReport
    from ckptstore.training.layerwise.layerwise_snapshots import LayerwiseSnapshots
    from ckptstore.training.optimizers.optimizer_step import OptimizerStep, clip_factor
    from ckptstore.training.optimizers.topk import TopKHook
    from ckptstore.training.settings import CheckpointerOptions, SlowSavesWarning, UnsavedStepWarning

_HOME = {
    "Checkpointer": "checkpointer",
    "CheckpointerOptions": "settings",
    "Gate": "layerwise.gate_times",
    "LayerwiseReport": "layerwise.gate_times",
    "LayerwiseSnapshots": "layerwise.layerwise_snapshots",
    "OptimizerStep": "optimizers.optimizer_step",
    "SlowSavesWarning": "settings",
    "TopKHook": "optimizers.topk",
    "UnsavedStepWarning": "settings",
    "clip_factor": "optimizers.optimizer_step",
}

__all__ = [
    "Checkpointer",
    "CheckpointerOptions",
    "Gate",
    "LayerwiseReport",
    "LayerwiseSnapshots",
    "OptimizerStep",
    "SlowSavesWarning",
    "TopKHook",
    "UnsavedStepWarning",
    "clip_factor",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckptstore.training' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"ckptstore.training.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingDependencyError(f"{name} needs torch: pip install torch (or 'ckptstore[torch]')") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
