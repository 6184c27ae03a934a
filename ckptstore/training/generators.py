"""The global random generators of this process, for shims that save and restore them without a `Checkpointer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.training import rng

__all__ = ["generator_states", "restore_generators"]


def generator_states() -> dict[str, Any]:
    """The states of the global generators of Python, numpy and torch, copied, as a part of a state.

    CUDA devices are among them once this process uses CUDA.
    """
    return rng.global_states()


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators to what `generator_states` found, in this process or in another one.

    Raises:
        FormatError: it is no such state.
    """
    rng.restore(states)
