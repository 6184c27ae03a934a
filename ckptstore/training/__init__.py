"""For training scripts: the `Checkpointer`, `OptimizerStep`, snapshots layer by layer, loaders. It needs torch.

Imports `agent`, `store`, `write` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from ckptstore.training.checkpointer import Checkpointer
    from ckptstore.training.generators import generator_states, restore_generators
    from ckptstore.training.layerwise.gate_times import Gate, LayerwiseReport
    from ckptstore.training.layerwise.layerwise_snapshots import LayerwiseSnapshots
    from ckptstore.training.loaders.counted_batches import CountedBatches
    from ckptstore.training.loaders.loader_counting import counted
    from ckptstore.training.optimizers.optimizer_step import OptimizerStep, QuantizedGradient, clip_factor
    from ckptstore.training.optimizers.topk import TopKHook
    from ckptstore.training.settings import CheckpointerOptions, SlowSavesWarning, UnsavedStepWarning

_HOME = {
    "Checkpointer": "checkpointer",
    "CheckpointerOptions": "settings",
    "CountedBatches": "loaders.counted_batches",
    "Gate": "layerwise.gate_times",
    "LayerwiseReport": "layerwise.gate_times",
    "LayerwiseSnapshots": "layerwise.layerwise_snapshots",
    "OptimizerStep": "optimizers.optimizer_step",
    "QuantizedGradient": "optimizers.optimizer_step",
    "SlowSavesWarning": "settings",
    "TopKHook": "optimizers.topk",
    "UnsavedStepWarning": "settings",
    "clip_factor": "optimizers.optimizer_step",
    "counted": "loaders.loader_counting",
    "generator_states": "generators",
    "restore_generators": "generators",
}

__all__ = [
    "Checkpointer",
    "CheckpointerOptions",
    "CountedBatches",
    "Gate",
    "LayerwiseReport",
    "LayerwiseSnapshots",
    "OptimizerStep",
    "QuantizedGradient",
    "SlowSavesWarning",
    "TopKHook",
    "UnsavedStepWarning",
    "clip_factor",
    "counted",
    "generator_states",
    "restore_generators",
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
