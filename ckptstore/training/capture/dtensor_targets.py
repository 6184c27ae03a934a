"""DTensors of a training script (FSDP2, tensor parallelism): how they are cut, and where a checkpoint's tensors go.

A rank has its shards and nothing else. So a checkpoint is read into them: into the parameters themselves, and into
shards like them for what an optimizer keeps and has not made yet. Nobody has a whole tensor in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptstore.formats.segment import TensorEntry
from ckptstore.frameworks.torch_tensors import torch_dtype

__all__ = ["DTensorTargets", "sharding"]


def sharding(tensors: Iterable[torch.Tensor]) -> str:
    """How the DTensors among them are cut, for people: ``S(0) of (4,)``. Empty: there is none."""
    found = {
        f"{' '.join(map(str, one.placements))} of {tuple(one.device_mesh.shape)}"  # type: ignore[attr-defined]
        for one in tensors
        if _is_distributed(one)
    }
    return ", ".join(sorted(found))


class DTensorTargets:
    """DTensors that a checkpoint's tensors are read into, by the names that it has for them.

    Attributes:
        found: name -> DTensor of the checkpoint's dtype and shape. No two share memory.
    """

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._taken: set[int] = set()

    def of(self, outline: Any, live: Any) -> None:
        """Find DTensors in a state that the script has now.

        Args:
            outline: a part of the checkpoint's state, with a `TensorEntry` for each tensor.
            live: the same part of the script's; where it has no DTensor of that shape, there is no room.
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
        """What it keeps for DTensors, in their shape: if that is not made yet, it gets DTensors that are cut alike.

        Args:
            outline: its state in the checkpoint.
            pairs: numbers of parameters there, each with the script's parameter.
        """
        if not isinstance(outline, Mapping) or not isinstance(outline.get("state"), Mapping):
            return
        for number, parameter in pairs:
            slots = outline["state"].get(number)
            for key, entry in slots.items() if isinstance(slots, Mapping) else ():
                if isinstance(entry, TensorEntry) and key != "step":  # that is a number, whatever its shape
                    self._take(entry, optimizer.state.get(parameter, {}).get(key, parameter), parameter)

    def _take(self, entry: TensorEntry, live: Any, beside: torch.Tensor | None = None) -> None:
        """Take `live` for a tensor if it fits; one like it where it is of another dtype, is `beside`, or is taken."""
        if entry.name in self.found or not _is_distributed(live) or tuple(live.shape) != tuple(entry.shape):
            return
        dtype, address = torch_dtype(entry.dtype), live.detach().to_local().data_ptr()
        if live is beside or live.dtype != dtype or address in self._taken:
            live = torch.empty_like(live.detach(), dtype=dtype)
        elif address:  # an empty shard has none
            self._taken.add(address)
        self.found[entry.name] = live


def _is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor; asked without importing what not every torch has."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")
