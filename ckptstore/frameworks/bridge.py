"""The only access to torch and other frameworks for other rooms. It imports a framework only if the caller has.

A state with a torch tensor proves that torch is imported. On a machine without torch, this room imports nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import MissingDependencyError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ckptstore.formats.states.object_parts import Make
    from ckptstore.formats.states.state import FlatState, Parts, Recognise, Tagged, TensorSource
    from ckptstore.frameworks.torch_offload import CopyQueue
    from ckptstore.host.buffers import Bytes

__all__ = [
    "ADAPTERS",
    "Adapter",
    "as_bf16",
    "away",
    "copy_queue",
    "device_bytes",
    "device_digests",
    "device_of",
    "environment",
    "environment_differences",
    "flattened",
    "object_maker",
    "optimizers",
    "place_of_device",
    "process_group",
    "register",
    "registered",
    "remainders",
    "roots",
    "shards",
    "source_of",
    "tensors",
    "torch_devices",
    "torch_in_use",
    "torch_roots",
    "uses_devices",
]


def torch_in_use() -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


def tensors() -> ModuleType:
    """Import `ckptstore.frameworks.torch_tensors`. Raises `MissingDependencyError` if torch is not installed."""
    try:
        from ckptstore.frameworks import torch_tensors as module  # importing torch takes seconds: only on demand
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "this needs torch, which is not installed: pip install 'ckptstore[torch]', or load with framework='numpy'"
        ) from error
    return module


def optimizers() -> ModuleType:
    """Import `ckptstore.frameworks.torch_optimizers`. Raises `MissingDependencyError` if torch is not installed."""
    tensors()  # its error says how to install torch
    from ckptstore.frameworks import torch_optimizers as module

    return module


def shards() -> ModuleType:
    """Import `ckptstore.frameworks.torch_shards`. Only for callers that have torch."""
    from ckptstore.frameworks import torch_shards as module  # see above

    return module


def _torch(sharded: bool) -> Recognise:
    found: Recognise = (shards() if sharded else tensors()).recognise
    return found


@dataclass(frozen=True, slots=True)
class Adapter:
    """How a state takes the tensors of one framework.

    Attributes:
        recognise: imports the adapter's module and returns the function that `state.flatten` calls for each object. Its
            argument: whether a writer of many ranks asks, which takes this rank's part of a sharded tensor.
        overwritten: whether ``into=`` may name these tensors. If False, they are refused there.
    """

    recognise: Callable[[bool], Recognise]
    overwritten: bool = False


ADAPTERS: Final[Mapping[str, Adapter]] = MappingProxyType({"torch": Adapter(_torch, overwritten=True)})
"""The adapters, by import name of the framework. Adapters of frameworks that are not imported are skipped."""


def flattened(state: Any, *, sharded: bool = False, overwritten: bool = False) -> FlatState:
    """Flatten a state, including tensors of frameworks. Raises `UnsupportedStateError` naming the key path.

    Args:
        state: the nested state; or a `FlatState`, which is returned unchanged.
        sharded: take this rank's part of a DTensor, and parts (`Shard`). If False, they are refused unless they are
            whole.
        overwritten: the tensors will be overwritten. Tensors of a framework that does not support it are refused.
    """
    from ckptstore.formats.sources import place_of  # numpy, which callers that only read the log do not need
    from ckptstore.formats.states.state import FlatState, flatten

    flat = state if isinstance(state, FlatState) else flatten(state, _recogniser(sharded, overwritten))
    if not sharded:
        for name, source in flat.tensors.items():
            if getattr(source, "offset", None) is not None and place_of(source) != (None, None):
                raise _incomplete(name, source)
    return flat


def _incomplete(name: str, source: TensorSource) -> UnsupportedStateError:
    from ckptstore.formats.segment_files.boxes import Box
    from ckptstore.formats.sources import place_of

    whole, offset = place_of(source)
    box = Box(offset or (), tuple(source.shape))
    return UnsupportedStateError(
        f"tensor {name!r} of shape {list(whole or ())}: the state has only its elements {box}: give the others, too "
        "(Shards), or open the store with writer(group=...), where other ranks have them"
    )


def source_of(value: object, *, sharded: bool = False, overwritten: bool = False) -> TensorSource | None:
    """The source of one tensor, array or `Shard`; None: it is none of them.

    Args:
        sharded, overwritten: as for `flattened`.

    Raises:
        UnsupportedStateError: the tensor cannot be stored, or not be overwritten.
    """
    import numpy as np  # see `flattened`

    from ckptstore.formats.sources import NumpySource
    from ckptstore.formats.states.state import Parts, Tagged

    found = _recogniser(sharded, overwritten)(value)
    if found is None and type(value) is np.ndarray:
        return NumpySource(value)
    return None if isinstance(found, Tagged | Parts) else found


def _recogniser(sharded: bool, overwritten: bool) -> Recognise:
    asked = [
        adapter.recognise(sharded) if adapter.overwritten or not overwritten else _refusing(adapter.recognise(sharded))
        for name, adapter in ADAPTERS.items()
        if name in sys.modules
    ]
    placed: dict[object, object] = {}

    def recognise(value: object) -> TensorSource | Tagged | Parts | None:
        if _is_placed(type(value)):
            source = _shards_source(value, overwritten)
            place = place_of(source)
            # Prevents: two parts of different places that are stored as one tensor, because their memory is one.
            if placed.setdefault(source.identity, place) != place:
                raise UnsupportedStateError("another Shard has the same memory, and another place in its tensor")
            return source
        for one in asked:
            if (found := one(value)) is not None:
                return found
        return None

    from ckptstore.formats.sources import place_of

    return recognise


def _is_placed(kind: type) -> bool:
    """Whether it is `Shard` or `Shards`. A state has one only if their module is imported."""
    module = sys.modules.get("ckptstore.formats.states.shard")
    return module is not None and (kind is module.Shard or kind is module.Shards)


def _shards_source(value: Any, overwritten: bool) -> TensorSource:
    """The source of a `Shard` or `Shards`."""
    from ckptstore.formats.states.shard import JoinedSource, PlacedArray, Shard

    if not isinstance(value, Shard):
        if len(value.shards) > 1:
            return JoinedSource(value, [_shards_source(one, overwritten) for one in value.shards])
        (value,) = value.shards
    inner = source_of(value.tensor, overwritten=overwritten)
    if inner is None:
        kind = type(value.tensor)
        raise UnsupportedStateError(f"a Shard of a {kind.__module__}.{kind.__qualname__}, not of a tensor or array")
    if inner.origin == "numpy":
        return PlacedArray(value)
    found: TensorSource = shards().PlacedTensor(value)
    return found


_TORCH_KINDS: Final = ("torch.sparse", "torch.generator")
"""Kinds that need torch. Loaded without it they become a `Foreign`."""


def object_maker(*, to_torch: bool, keep_foreign: bool = False) -> Make:
    """Return what makes the objects of a loaded state, for `state.unflatten`: see `state_objects.loader`.

    Args:
        to_torch: tensors that were torch tensors are torch tensors again.
        keep_foreign: see `Store.load`.
    """
    # They import numpy: see `flattened`.
    from ckptstore.formats.states.numpy_objects import NUMPY
    from ckptstore.formats.states.state_objects import loader

    if not to_torch:
        return loader(NUMPY, _TORCH_KINDS, keep_foreign=keep_foreign)
    tensors()  # its error says how to install torch
    from ckptstore.frameworks.torch_objects import MAKERS  # see `optimizers`

    return loader({**NUMPY, **MAKERS}, (), keep_foreign=keep_foreign)


def _refusing(recognise: Recognise) -> Recognise:
    def refuse(value: object) -> TensorSource | Tagged | Parts | None:
        # Prevents: a restore into a copy of the caller's array, which would not change the array itself.
        if (found := recognise(value)) is not None:
            kind = type(value)
            raise UnsupportedStateError(
                f"{kind.__module__}.{kind.__qualname__} cannot be overwritten: load without into=, then convert"
            )
        return found

    return refuse


def process_group(group: Any) -> tuple[int, int, Any]:
    """Rank, size and mailbox of a `torch.distributed` process group: `torch_ranks.process_group`."""
    tensors()  # its error says how to install torch
    from ckptstore.frameworks import torch_ranks  # see above

    return torch_ranks.process_group(group)


def device_bytes() -> int:
    """The device memory that this package holds in this process; 0 if nothing of it uses devices."""
    module = sys.modules.get("ckptstore.frameworks.torch_device_memory")
    return 0 if module is None else int(module.held())


def device_digests(sources: Mapping[str, TensorSource], *, small: bool = False) -> Mapping[str, int]:
    """State digests of tensors on devices, by name, computed there: `torch_digest.device_digests`.

    They are computed after the work that was queued before. Reading a digest waits for it.

    Args:
        small: also of small tensors.
    """
    if not torch_in_use():
        return {}
    from ckptstore.frameworks import torch_digest  # see above

    return torch_digest.device_digests(sources, small=small)


def away(source: TensorSource) -> bool:
    """Whether it is a tensor on a device: `torch_recomputed.away`."""
    if not torch_in_use():
        return False
    from ckptstore.frameworks import torch_recomputed  # see above

    return torch_recomputed.away(source)


def place_of_device(source: TensorSource) -> Hashable:
    """The device and the stream of a tensor that is `away`: `torch_recomputed.place_of`."""
    from ckptstore.frameworks import torch_recomputed  # see above

    return torch_recomputed.place_of(source)


def remainders(sources: Sequence[TensorSource]) -> TensorSource:
    """The remainders of tensors on one device, computed there: `torch_recomputed.remainders`.

    Raises:
        MemoryError: the device has no memory for them.
    """
    from ckptstore.frameworks import torch_recomputed  # see above

    return torch_recomputed.remainders(sources)


def roots(numbers: Any) -> Any:
    """Square roots of an fp32 array as torch computes them on this machine: `torch_recomputed.roots`."""
    from ckptstore.frameworks import torch_recomputed  # see above

    return torch_recomputed.roots(numbers)


def as_bf16(source: TensorSource) -> TensorSource:
    """A tensor on a device, converted there: `torch_recomputed.as_bf16`. Raises as `remainders`."""
    from ckptstore.frameworks import torch_recomputed  # see above

    return torch_recomputed.as_bf16(source)


def uses_devices() -> bool:
    """Whether this process uses CUDA devices, so that a state may have tensors there."""
    if not torch_in_use():
        return False
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.uses_devices()


def copy_queue(sources: Mapping[str, TensorSource]) -> CopyQueue | None:
    """The copy queue of a state with tensors on devices (`torch_offload.CopyQueue`). None: it has no such tensors."""
    if not torch_in_use():
        return None
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.copy_queue(sources)


def device_of(sources: Mapping[str, TensorSource]) -> Any:
    """A CUDA device that has tensors of the state (`torch_offload.device_of`). None: there is none."""
    if not torch_in_use():
        return None
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.device_of(sources)


def register(memory: Bytes, device: Any) -> None:
    """Register memory, so that devices copy to it without the host, if they can: `torch_offload.register`.

    Args:
        memory: made by `host.buffers.aligned`.
        device: from `device_of`.
    """
    from ckptstore.frameworks import torch_offload  # see above

    torch_offload.register(memory, device)


def registered(memory: Bytes) -> bool:
    """Whether devices copy to this memory without the host: `torch_offload.registered`."""
    from ckptstore.frameworks import torch_offload  # see above

    return torch_offload.registered(memory)


def environment() -> dict[str, Any]:
    """The settings that determine this process's bits. Empty if it does not use torch."""
    if not torch_in_use():
        return {}
    from ckptstore.frameworks.torch_environment import describe_environment  # see above

    return dict(describe_environment())


def torch_devices() -> dict[str, Any]:
    """Import torch and describe its devices: ``threads``, ``devices`` (number of GPUs), ``gpu`` (the first one's name).

    A broken installation of torch may raise any error.
    """
    from ckptstore.frameworks.torch_environment import describe_devices  # takes seconds: only on demand

    return describe_devices()


def torch_roots() -> float:
    """Import torch and measure the share (0 to 1) of its square roots that are not rounded to nearest.

    A broken installation of torch may raise any error.
    """
    from ckptstore.frameworks.torch_environment import inexact_roots

    return inexact_roots()


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines ``name: before -> now`` for every difference. Empty if the bits should repeat."""
    return [
        f"{name}: {before.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
