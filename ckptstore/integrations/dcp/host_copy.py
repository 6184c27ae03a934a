"""Host memory for the copy that ``dcp.async_save`` makes of a state, kept from one save of a store to the next.

torch's own stager asks the system for new memory at each save, and copies the shards of a `DTensor` on the CPU twice.
New memory costs a page fault for each 4 KiB, which takes about as long as the copy itself.
"""

from __future__ import annotations

import copy
import io
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

__all__ = ["HostCopy", "Pairs"]

Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of one process, of a `DTensor` its local part, each with its copy."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_VALUES: Final = (int, float, str, bytes, io.BytesIO, type(None))


class HostCopy:
    """Memory that holds a copy of one state. One thread uses it at a time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], tuple[torch.Tensor, bool]] = {}  # by path: and whether it is pinned
        self._before: dict[tuple[Any, ...], tuple[torch.Tensor, bool]] = {}
        self._devices: set[torch.device] = set()
        self._pairs: Pairs | None = None

    @torch.no_grad()
    def fill(self, state: dict[str, Any], pairs: Pairs | None = None) -> dict[str, Any]:
        """Copy a state -> the copy, which is valid until the next call.

        Memory that this state does not need is freed.

        Args:
            pairs: each tensor whose copy is in this memory is added to it.
        """
        self._before, self._memory = self._memory, {}
        self._pairs = pairs
        try:
            found: dict[str, Any] = self._copy(state, ())
            for device in self._devices:
                torch.cuda.current_stream(device).synchronize()
        finally:
            self._before = {}
            self._devices.clear()
            self._pairs = None  # keeps no state alive
        return found

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        """A copy of what stands at a path. Containers become plain ones, as torch's stager does it."""
        if isinstance(value, DTensor):
            local = value.to_local()
            if type(local) not in _PLAIN or local.layout != torch.strided:
                return _other(value)
            mine, places = self._tensor(local, path), value.placements
            return DTensor.from_local(
                mine, value.device_mesh, places, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN or value.layout != torch.strided:
                return _other(value)
            return self._tensor(value, path)
        if isinstance(value, dict):
            return {key: self._copy(one, (*path, key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            found = [self._copy(one, (*path, number)) for number, one in enumerate(value)]
            return tuple(found) if isinstance(value, tuple) else found
        return value if isinstance(value, _VALUES) else copy.deepcopy(value)

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        """A copy of a tensor in the memory that stood at its path before, if it fits."""
        pin = value.device.type == "cuda" and value.numel() > 0
        mine, pinned = self._before.get(path, (None, False))
        if mine is None or mine.dtype != value.dtype or mine.shape != value.shape or pinned != pin:
            mine = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin)
        mine.copy_(value, non_blocking=pin)
        if pin:
            self._devices.add(value.device)
        self._memory[path] = mine, pin
        if self._pairs is not None:
            self._pairs.append((value, mine))
        return mine


def _other(value: Any) -> Any:
    """A copy of a tensor that is neither a plain one nor a `DTensor` of plain ones, by torch's own stager."""
    return BlockingAsyncStager().stage({"": value})[""]
