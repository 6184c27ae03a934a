"""How a checkpoint of DCP is stored in a store: a flat dict by DCP's names, and a member that describes it.

`formats.states.dcp_member` says what that member has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.frameworks import bridge

__all__ = ["as_bytes", "planner_data", "planner_form", "tensors_in", "values_by_name"]


def planner_form(planner: Any) -> dict[str, list[str | int]]:
    """DCP's planner data (name -> path of strings and integers, or None) as a state can hold it."""
    return {str(name): list(path) for name, path in planner.items()} if isinstance(planner, Mapping) else {}


def planner_data(form: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]] | None:
    """The inverse of `planner_form`."""
    return {name: tuple(path) for name, path in form.items()} if form else None


def tensors_in(name: str, value: Any) -> list[str] | None:
    """The names that tensors in a value get; None: a state cannot hold it."""
    try:
        return list(bridge.flattened({name: value}).tensors)
    except UnsupportedStateError:
        return None


def values_by_name(state: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a state without tensors, by the names that DCP gives them: keys joined by dots."""
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from values_by_name(value, f"{name}.")
        else:
            yield name, value


def as_bytes(data: bytes | memoryview) -> torch.Tensor:
    """Bytes as a tensor: 1-D uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
