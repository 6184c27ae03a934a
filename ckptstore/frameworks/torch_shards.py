"""DTensors (FSDP2, tensor parallelism) and `Shard`s of torch tensors: find this rank's box of the whole, copy into it.

A rank's part of a DTensor is an ordinary tensor. Its position in the whole tensor follows from mesh and placements,
without communication between ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.states.shard import place_within
from ckptstore.frameworks import torch_tensors
from ckptstore.frameworks.torch_tensors import TorchSource, image

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckptstore.formats.states.shard import Shard
    from ckptstore.formats.states.state import Parts, Tagged

__all__ = [
    "PlacedTensor",
    "ShardSource",
    "copy_box_into",
    "local_gradient",
    "local_part",
    "part_for",
    "place_in_whole",
    "recognise",
    "sharded_as",
]


def recognise(value: object) -> TorchSource | Tagged | Parts | None:
    """As `torch_tensors.recognise`, and for a DTensor a source of this rank's part.

    A parameter that is a DTensor is stored as its data and restored as a tensor: whole, or as ``into=`` specifies.

    Raises:
        UnsupportedStateError: as `torch_tensors.recognise`; or this rank's part of a DTensor is not a box.
    """
    kind = type(value)  # checked by name: importing torch.distributed fails in some builds of torch
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        return ShardSource(value)
    return torch_tensors.recognise(value)


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, in its own memory; any other tensor itself."""
    if not hasattr(tensor, "placements"):
        return tensor  # type: ignore[no-any-return]
    part: torch.Tensor = tensor.detach().to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective that is still under way


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient, of a DTensor this rank's part: the same object as long as the gradient is.

    Raises:
        UnsupportedStateError: the gradient is not placed as the parameter.
    """
    gradient: Any = parameter.grad
    if gradient is None or not hasattr(parameter, "placements"):
        return gradient  # type: ignore[no-any-return]
    placed = getattr(gradient, "placements", None)
    # Prevents: a partial sum that is taken for the gradient: the optimizer adds those of all ranks first.
    if placed != parameter.placements:
        raise UnsupportedStateError(f"a gradient is placed as {placed}, and its parameter as {parameter.placements}")
    with torch.no_grad():  # else torch makes a view of it
        part: torch.Tensor = gradient.to_local()
    return part.wait() if hasattr(part, "wait") else part


def sharded_as(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """The tensor of which each rank has such a part of its own: a DTensor, if the parameter is one."""
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    whole = torch.empty(parameter.shape, device="meta")
    how: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, **how)


def part_for(parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of a parameter's shape, which is a DTensor placed as the parameter, or whole."""
    if hasattr(tensor, "placements") or not hasattr(parameter, "placements"):
        return local_part(tensor)
    shape, offset = place_in_whole(parameter)
    return tensor[tuple(slice(start, start + count) for start, count in zip(offset, shape, strict=True))]


def place_in_whole(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this rank's box of a DTensor. If it is replicated, the box is the whole tensor.

    Raises:
        UnsupportedStateError: this rank has no box: the DTensor is a partial sum over ranks, its mesh does not have
            this rank, or this rank's elements are not contiguous in a dimension.
    """
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedStateError(
            f"a DTensor placed as {placements} cannot be stored: its ranks have partial sums; redistribute it to Shard "
            "or Replicate first"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedStateError(
            "a DTensor cannot be stored: its device mesh does not include this rank; leave it out of this rank's state"
        )
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    if any(type(placement).__name__ == "_StridedShard" for placement in placements):
        _check_neighbours(whole, mesh.shape, coordinate, placements, offset)
    return tuple(shape), tuple(offset) if offset else (0,) * len(whole)


def _check_neighbours(
    whole: tuple[int, ...], mesh: Any, coordinate: list[int], placements: Any, offset: tuple[int, ...]
) -> None:
    """Raise `UnsupportedStateError` if a rank's elements are not contiguous in a dimension of the whole tensor."""
    for dimension, length in enumerate(whole):
        having = torch.arange(length)
        for axis, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dimension:
                parts, _ = placement._split_tensor(having, mesh[axis], with_padding=False, contiguous=False)
                having = parts[coordinate[axis]]
        if len(having) and not torch.equal(having, torch.arange(len(having)) + offset[dimension]):
            raise UnsupportedStateError(
                f"a DTensor of shape {list(whole)} placed as {placements} cannot be stored: this rank's part of "
                f"dimension {dimension} is not contiguous; choose sizes that the mesh divides evenly"
            )


class PlacedTensor(TorchSource):
    """A part of a tensor (`formats.sources.TensorSource`), and its position in the whole.

    Attributes:
        global_shape: shape of the whole tensor; None if this rank has all of it.
        offset: offset of this rank's part in each dimension; None if this rank has all of it.
        owner: the object in the state.
    """

    __slots__ = ("global_shape", "offset", "owner")

    global_shape: tuple[int, ...] | None
    offset: tuple[int, ...] | None

    def __init__(self, shard: Shard) -> None:
        """Wrap the tensor of a `Shard`. Raises `UnsupportedStateError` if it has no plain bytes."""
        super().__init__(shard.tensor)
        self.owner: Any = shard
        self.global_shape, self.offset = place_within(shard.box, shard.global_shape)


class ShardSource(PlacedTensor):
    """This rank's part of a DTensor, which is its `owner`."""

    __slots__ = ()

    def __init__(self, distributed: Any) -> None:
        """Wrap a DTensor. Raises `UnsupportedStateError` if this rank's part is not a box of plain bytes."""
        with torch.no_grad():
            TorchSource.__init__(self, local_part(distributed))
        shape, offset = place_in_whole(distributed)
        if shape != self.shape:
            raise UnsupportedStateError(
                f"a DTensor of shape {list(distributed.shape)} placed as {distributed.placements}: this rank has "
                f"{list(self.shape)} of it, but the placements give {list(shape)}"
            )
        self.owner = distributed
        self.global_shape, self.offset = place_within(Box(offset, shape), tuple(distributed.shape))


def copy_box_into(tensor: torch.Tensor, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
    """Write elements into a box of an existing tensor, in place.

    The tensor may be a leaf that requires grad, strided, and on any device. Autograd notices the change.

    Args:
        tensor: a plain tensor.
        index: the box in it.
        elements: the elements' bits, as integers (or `complex128`) of the tensor's item size, with any strides.
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
