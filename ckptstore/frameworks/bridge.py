"""The engine's only way to torch: through this room, and only when the caller already uses torch.

A state that holds a torch tensor proves that torch is imported; a machine without torch never pays for it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptstore.formats.state import FlatState, TensorSource

__all__ = [
    "device_digests",
    "environment",
    "environment_differences",
    "flattened",
    "process_group",
    "shards",
    "stepping",
    "tensors",
    "torch_here",
    "torch_in_use",
    "torch_roots",
]


def torch_in_use() -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


def tensors() -> ModuleType:
    """`ckptstore.frameworks.torch_tensors`. Raises `MissingDependencyError` when torch is not installed."""
    try:
        from ckptstore.frameworks import torch_tensors as module  # torch costs seconds: only on demand
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "this needs torch, which is not installed: pip install 'ckptstore[torch]', or load with framework='numpy'"
        ) from error
    return module


def stepping() -> ModuleType:
    """`ckptstore.frameworks.torch_stepping`. Raises `MissingDependencyError` when torch is not installed."""
    tensors()  # says how to get torch
    from ckptstore.frameworks import torch_stepping as module  # see above

    return module


def shards() -> ModuleType:
    """`ckptstore.frameworks.torch_shards`, for those who have torch."""
    from ckptstore.frameworks import torch_shards as module  # see above

    return module


def flattened(state: Any, *, sharded: bool = False) -> FlatState:
    """Take a state apart, torch tensors included. Raises `UnsupportedStateError` naming the key path.

    Args:
        sharded: take of a DTensor what this rank has; else it is refused, because that is not all of it.
    """
    from ckptstore.formats.state import flatten  # numpy: not for those who only read the log

    if not torch_in_use():
        return flatten(state)
    return flatten(state, (shards() if sharded else tensors()).recognise)


def process_group(group: Any) -> tuple[int, int, Any]:
    """Rank, size and mailbox of a `torch.distributed` process group: `torch_ranks.process_group`."""
    tensors()  # says how to get torch
    from ckptstore.frameworks import torch_ranks  # see above

    return torch_ranks.process_group(group)


def device_digests(sources: Mapping[str, TensorSource]) -> dict[str, int]:
    """State digests of tensors on devices that compute them, by name: `torch_digest.device_digests`."""
    if not torch_in_use():
        return {}
    from ckptstore.frameworks import torch_digest  # see above

    return torch_digest.device_digests(sources)


def environment() -> dict[str, Any]:
    """What decides this process's bits; empty when it does not use torch."""
    if not torch_in_use():
        return {}
    from ckptstore.frameworks.torch_environment import describe_environment  # see above

    return dict(describe_environment())


def torch_here() -> dict[str, Any]:
    """Import torch, and say what it finds here: ``threads``, ``devices`` (GPUs), ``gpu`` (the first one's name).

    Raises whatever an installation of torch that is broken raises.
    """
    from ckptstore.frameworks.torch_environment import describe_devices  # seconds: for those who ask

    return describe_devices()


def torch_roots() -> float:
    """Import torch, and see how many of its square roots are not rounded to nearest: a share of 0 to 1.

    Raises whatever an installation of torch that is broken raises.
    """
    from ckptstore.frameworks.torch_environment import inexact_roots

    return inexact_roots()


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines ``name: before -> now`` for what differs; empty when bits should repeat."""
    return [
        f"{name}: {before.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
