"""DTensors of a training script (FSDP2, tensor parallelism): their sharding, and the targets of a restore.

A rank holds only its shards, so a checkpoint is read into them: into the parameters themselves, and into similar shards
for optimizer slots that do not exist yet. No rank holds a whole tensor in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.frameworks.torch_tensors import torch_dtype

__all__ = ["DTensorTargets", "sharding"]


def sharding(tensors: Iterable[torch.Tensor]) -> str:
    """How the DTensors among them are sharded, for messages: ``S(0) of (4,)``. Empty: there are none."""
    found = {
        f"{' '.join(map(str, one.placements))} of {tuple(one.device_mesh.shape)}"  # type: ignore[attr-defined]
        for one in tensors
        if _is_distributed(one)
    }
    return ", ".join(sorted(found))


class DTensorTargets:
    """DTensors that a checkpoint's tensors are read into, by their names in the checkpoint.

    Attributes:
        found: name -> DTensor of the checkpoint's dtype and shape. No two share memory.
    """

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._taken: set[int] = set()

    def of(self, outline: Any, live: Any) -> None:
        """Find the DTensors of the script's current state.

        Args:
            outline: a part of the checkpoint's state, with a `TensorEntry` for each tensor.
            live: the same part of the script's state. A tensor without a DTensor of its shape there gets no target.
        """
        if isinstance(outline, TensorEntry):
            self._take(outline, live)
        elif isinstance(outline, Mapping) and isinstance(live, Mapping):
            for key in outline.keys() & live.keys():
                self.of(outline[key], live[key])
        elif isinstance(outline, list | tuple) and isinstance(live, list | tuple):
            for one, its in zip(outline, live, strict=False):
                self.of(one, its)

    def of_optimizer(
        self, outline: Any, optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Any, torch.Tensor]]
    ) -> None:
        """Find or create DTensors for an optimizer's slots that have their parameter's shape.

        Slots that do not exist yet get DTensors with the parameter's sharding.

        Args:
            outline: the optimizer's state in the checkpoint.
            pairs: (number in the checkpoint, the script's parameter).
        """
        if not isinstance(outline, Mapping) or not isinstance(outline.get("state"), Mapping):
            return
        for number, parameter in pairs:
            slots = outline["state"].get(number)
            for key, entry in slots.items() if isinstance(slots, Mapping) else ():
                if isinstance(entry, TensorEntry) and key != "step":  # a step is a number, whatever its shape
                    self._take(entry, optimizer.state.get(parameter, {}).get(key, parameter), parameter)

    def of_parameters(self, outline: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """Create DTensors for what a compressor keeps of each parameter, with the parameter's sharding.

        Args:
            outline: the compressor's state in the checkpoint: dicts of tensors by the parameter's name.
        """
        for kept in outline.values() if isinstance(outline, Mapping) else ():
            for name, entry in kept.items() if isinstance(kept, Mapping) else ():
                if isinstance(entry, TensorEntry) and name in parameters:
                    self._take(entry, parameters[name], parameters[name])

    def _take(self, entry: TensorEntry, live: Any, beside: torch.Tensor | None = None) -> None:
        """Find a tensor's target: `live`, or a new one if `live` has another dtype, is `beside` or was taken."""
        if entry.name in self.found or not _is_distributed(live) or tuple(live.shape) != tuple(entry.shape):
            return
        dtype, address = torch_dtype(entry.dtype), live.detach().to_local().data_ptr()
        if live is beside or live.dtype != dtype or address in self._taken:
            live = torch.empty_like(live.detach(), dtype=dtype)
        elif address:  # an empty shard has none
            self._taken.add(address)
        self.found[entry.name] = live


def _is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor, without an import that not every torch has."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")
