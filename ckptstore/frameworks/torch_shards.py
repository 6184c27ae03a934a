"""DTensors (FSDP2, tensor parallelism): which box of the whole tensor this rank has, and copying into it.

A rank's part of a DTensor is an ordinary tensor. Where it lies in the whole one follows from mesh and placements:
nobody talks to other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.frameworks import torch_tensors
from ckptstore.frameworks.torch_tensors import TorchSource, image

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.formats.state import Tagged

__all__ = ["ShardSource", "copy_box_into", "place_in_whole", "recognise"]


def recognise(value: object) -> TorchSource | Tagged | None:
    """As `torch_tensors.recognise`; of a DTensor, what this rank has of it.

    A parameter that is a DTensor is stored as its data and comes back as a tensor: whole, or as ``into=`` says.

    Raises:
        UnsupportedStateError: as there; a DTensor that is no box of a tensor here.
    """
    kind = type(value)  # asked without importing torch.distributed, which not every torch has
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        return ShardSource(value)
    return torch_tensors.recognise(value)


def place_in_whole(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of the box that this rank has of a DTensor: all of it, if it is replicated.

    Raises:
        UnsupportedStateError: this rank has no box of it: it is to be summed up over ranks, lies on a mesh without this
            rank, or in pieces that are no neighbours.
    """
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedStateError(
            f"a DTensor placed as {placements} cannot be stored: its ranks' values are still to be added up; "
            "redistribute it to Shard or Replicate before"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedStateError("a DTensor on a mesh that this rank is no part of has nothing to store here")
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    if any(type(placement).__name__ == "_StridedShard" for placement in placements):
        _check_neighbours(whole, mesh.shape, coordinate, placements, offset)
    return tuple(shape), tuple(offset) if offset else (0,) * len(whole)


def _check_neighbours(
    whole: tuple[int, ...], mesh: Any, coordinate: list[int], placements: Any, offset: tuple[int, ...]
) -> None:
    """Raises `UnsupportedStateError` if the elements that a rank has are no neighbours in the whole tensor."""
    for dimension, length in enumerate(whole):
        having = torch.arange(length)
        for axis, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dimension:
                parts, _ = placement._split_tensor(having, mesh[axis], with_padding=False, contiguous=False)
                having = parts[coordinate[axis]]
        if len(having) and not torch.equal(having, torch.arange(len(having)) + offset[dimension]):
            raise UnsupportedStateError(
                f"a DTensor of shape {list(whole)} placed as {placements} cannot be stored: what this rank has of "
                f"dimension {dimension} are no neighbours; choose sizes that the mesh divides evenly"
            )


class ShardSource(TorchSource):
    """What this rank has of a DTensor (`formats.sources.TensorSource`), and where that lies in the whole.

    Attributes:
        global_shape: shape of the whole tensor; None if this rank has all of it.
        offset: where its part begins in that; None likewise.
        distributed: the DTensor.
    """

    __slots__ = ("distributed", "global_shape", "offset")

    def __init__(self, distributed: Any) -> None:
        """Wrap a DTensor. Raises `UnsupportedStateError` if it has no box of plain bytes here."""
        with torch.no_grad():
            local = distributed.detach().to_local()
        if hasattr(local, "wait"):  # a collective that is still under way
            local = local.wait()
        super().__init__(local)
        shape, offset = place_in_whole(distributed)
        if shape != self.shape:
            raise UnsupportedStateError(
                f"a DTensor of shape {list(distributed.shape)} placed as {distributed.placements}: this rank has "
                f"{list(self.shape)} of it, which should be {list(shape)}"
            )
        whole = tuple(distributed.shape)
        self.distributed = distributed
        self.global_shape: tuple[int, ...] | None = None if shape == whole else whole
        self.offset: tuple[int, ...] | None = None if shape == whole else offset


def copy_box_into(tensor: torch.Tensor, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
    """Write the elements of a box of an existing tensor, in place.

    The tensor may be a leaf that requires grad, strided, and on any device; autograd sees that it changed.

    Args:
        tensor: a plain one.
        index: where the box lies in it.
        elements: integers (or `complex128`) of the tensor's item size: its elements, bit for bit. Of any strides.
    """
    piece = np.ascontiguousarray(elements)
    target = tensor.detach()
    lazy = target.is_conj() or target.is_neg()
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        values = torch.from_numpy(piece.reshape(-1).view(np.uint8)).view(target.dtype).reshape(elements.shape)
        if lazy:
            target[index].copy_(values)
        else:
            image(target)[index].copy_(image(values))
