"""Objects of torch that are stored as parts: sparse tensors and generators (SPEC.md 3.4)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats.states.object_parts import Parts
from ckptstore.formats.states.registered_types import Foreign

__all__ = ["MAKERS", "SPARSE", "take_generator", "take_sparse"]

SPARSE: Final[Mapping[torch.layout, str]] = MappingProxyType(
    {
        torch.sparse_coo: "coo",
        torch.sparse_csr: "csr",
        torch.sparse_csc: "csc",
        torch.sparse_bsr: "bsr",
        torch.sparse_bsc: "bsc",
    }
)
"""Layouts of sparse tensors, with their names in a tree."""
_LAYOUTS: Final = {name: layout for layout, name in SPARSE.items()}


def take_sparse(tensor: torch.Tensor) -> Parts:
    """Take a sparse tensor apart, in any layout. Raises `UnsupportedStateError` if it is not coalesced."""
    name = SPARSE[tensor.layout]
    size = list(tensor.shape)
    data = tensor.detach()
    if name == "coo":
        if not data.is_coalesced():  # torch shows the indices of no other
            raise UnsupportedStateError("a sparse tensor that is not coalesced cannot be stored: store its coalesce()")
        return Parts("torch.sparse", {"size": size, "indices": data.indices(), "values": data.values()}, name)
    rows = name in ("csr", "bsr")
    outer, inner = (data.crow_indices, data.col_indices) if rows else (data.ccol_indices, data.row_indices)
    return Parts("torch.sparse", {"size": size, "outer": outer(), "inner": inner(), "values": data.values()}, name)


def take_generator(generator: torch.Generator) -> Parts:
    """Take a generator of random numbers apart: its state, and the device as name."""
    return Parts("torch.generator", generator.get_state(), str(generator.device))


def _make_sparse(parts: Any, name: str) -> Any:
    members = ["size", "indices", "values"] if name == "coo" else ["size", "outer", "inner", "values"]
    if name not in _LAYOUTS or not isinstance(parts, dict) or list(parts) != members:
        raise FormatError("its parts are of another form")
    size = parts["size"]
    if not isinstance(size, list) or not all(type(one) is int and 0 <= one < 2**63 for one in size):
        raise FormatError(f"its size is {size!r:.80}")
    tensors = [one for one in parts.values() if isinstance(one, torch.Tensor)]
    if len(tensors) != len(members) - 1:
        return Foreign(name, parts, "torch.sparse")  # loaded without torch
    # Prevents: indices beyond the size, with which torch reads and writes beyond its memory.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some layouts a beta; a script may make warnings errors
        if name == "coo":
            indices, elements = tensors
            return torch.sparse_coo_tensor(indices, elements, size, is_coalesced=True, check_invariants=True)
        outer, inner, elements = tensors
        layout = _LAYOUTS[name]
        return torch.sparse_compressed_tensor(outer, inner, elements, size, layout=layout, check_invariants=True)


def _make_generator(parts: Any, name: str) -> Any:
    if not isinstance(parts, torch.Tensor):
        return Foreign(name, parts, "torch.generator")  # loaded without torch
    try:
        generator = torch.Generator(torch.device(name))
    except (RuntimeError, AssertionError, NotImplementedError):  # this machine does not have the device
        return Foreign(name, parts, "torch.generator")
    generator.set_state(parts.cpu())
    return generator


MAKERS: Final[Mapping[str, Callable[[Any, str], Any]]] = MappingProxyType(
    {"torch.sparse": _make_sparse, "torch.generator": _make_generator}
)
"""Makers for `state_objects.loader`. They check every part, which comes from an untrusted source."""
