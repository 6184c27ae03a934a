"""The engine's only way to torch and other frameworks: through this room, and only if the caller already uses them.

A state that holds a torch tensor proves that torch is imported; a machine without torch never pays for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import MissingDependencyError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptstore.formats.state import FlatState, Recognise, Tagged, TensorSource
    from ckptstore.frameworks.torch_offload import CopyQueue
    from ckptstore.host.buffers import Bytes

__all__ = [
    "ADAPTERS",
    "Adapter",
    "copy_queue",
    "device_digests",
    "device_of",
    "environment",
    "environment_differences",
    "flattened",
    "process_group",
    "register",
    "registered",
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
    """`ckptstore.frameworks.torch_optimizers`. Raises `MissingDependencyError` when torch is not installed."""
    tensors()  # says how to get torch
    from ckptstore.frameworks import torch_optimizers as module

    return module


def shards() -> ModuleType:
    """`ckptstore.frameworks.torch_shards`, for those who have torch."""
    from ckptstore.frameworks import torch_shards as module  # see above

    return module


def _torch(sharded: bool) -> Recognise:
    found: Recognise = (shards() if sharded else tensors()).recognise
    return found


@dataclass(frozen=True, slots=True)
class Adapter:
    """How the tensors of one framework are taken into a state.

    Attributes:
        recognise: gives what `formats.state.flatten` asks about each object; imports the adapter's module. It is told
            whether a writer of many ranks asks, which takes of a sharded tensor what its rank has.
        overwritten: whether ``into=`` may name these tensors. If not, it refuses them.
    """

    recognise: Callable[[bool], Recognise]
    overwritten: bool = False


ADAPTERS: Final[Mapping[str, Adapter]] = MappingProxyType({"torch": Adapter(_torch, overwritten=True)})
"""By the name under which a framework is imported. One that this process has not imported is not asked."""


def flattened(state: Any, *, sharded: bool = False, overwritten: bool = False) -> FlatState:
    """Take a state apart, tensors of frameworks included. Raises `UnsupportedStateError` naming the key path.

    Args:
        sharded: take of a DTensor what this rank has; else it is refused, because that is not all of it.
        overwritten: its tensors are to be overwritten. Those of a framework for which nobody can do that are refused.
    """
    from ckptstore.formats.state import flatten  # numpy: not for those who only read the log

    asked = [
        adapter.recognise(sharded) if adapter.overwritten or not overwritten else _refusing(adapter.recognise(sharded))
        for name, adapter in ADAPTERS.items()
        if name in sys.modules
    ]
    if len(asked) < 2:
        return flatten(state, asked[0] if asked else None)
    return flatten(state, lambda value: next((found for one in asked if (found := one(value)) is not None), None))


def _refusing(recognise: Recognise) -> Recognise:
    def refuse(value: object) -> TensorSource | Tagged | None:
        # Prevents: a restore into a copy of the caller's array, which leaves the array as it was.
        if (found := recognise(value)) is not None:
            kind = type(value)
            raise UnsupportedStateError(
                f"{kind.__module__}.{kind.__qualname__} cannot be overwritten: load without into=, then convert"
            )
        return found

    return refuse


def process_group(group: Any) -> tuple[int, int, Any]:
    """Rank, size and mailbox of a `torch.distributed` process group: `torch_ranks.process_group`."""
    tensors()  # says how to get torch
    from ckptstore.frameworks import torch_ranks  # see above

    return torch_ranks.process_group(group)


def device_digests(sources: Mapping[str, TensorSource]) -> Mapping[str, int]:
    """State digests of tensors on devices that compute them, by name: `torch_digest.device_digests`.

    They are computed behind the work that was queued before; to look at one waits for it.
    """
    if not torch_in_use():
        return {}
    from ckptstore.frameworks import torch_digest  # see above

    return torch_digest.device_digests(sources)


def copy_queue(sources: Mapping[str, TensorSource]) -> CopyQueue | None:
    """How to copy a state with tensors on devices (`torch_offload.CopyQueue`); None: it has none."""
    if not torch_in_use():
        return None
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.copy_queue(sources)


def device_of(sources: Mapping[str, TensorSource]) -> Any:
    """A device that copies tensors of a state to registered memory (`torch_offload.device_of`); None: none does."""
    if not torch_in_use():
        return None
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.device_of(sources)


def register(memory: Bytes, device: Any) -> None:
    """Have devices copy to this memory by themselves, if they can: `torch_offload.register`.

    Args:
        device: what `device_of` gave.
    """
    from ckptstore.frameworks import torch_offload  # see above

    torch_offload.register(memory, device)


def registered(memory: Bytes) -> bool:
    """Whether devices copy to this memory by themselves: `torch_offload.registered`."""
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.registered(memory)


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
