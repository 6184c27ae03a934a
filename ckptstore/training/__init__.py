"""What trains: optimizers' steps as the store takes them, for users (`OptimizerStep`, `clip_factor`); needs torch.

Imports `frameworks`, `write` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptstore.training.optimizers import OptimizerStep, clip_factor

__all__ = ["OptimizerStep", "clip_factor"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckptstore.training' has no attribute {name!r}")
    value = getattr(import_module("ckptstore.training.optimizers"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
