"""Where the tensors and values of a folder of ``torch.distributed.checkpoint`` are stored, or come from. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.formats.segment_files.boxes import Box
from ckptstore.host.buffers import Bytes

__all__ = ["DcpItem", "DcpTensor", "SuppliedBytes", "SuppliedTensor"]


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where one box of a tensor, or one value, is stored.

    Attributes:
        file: name of the file in the folder.
        offset, length: its bytes there.
        begin: first element of the box in the tensor, by dimension; empty for a value.
        shape: shape of the box.
    """

    file: str
    offset: int
    length: int
    begin: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the checkpoint: torch's name of its dtype (``float32``), its shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[DcpItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SuppliedTensor:
    """A tensor to write, which is read box by box when the writer asks for it.

    Attributes:
        dtype: logical dtype.
        shape: its shape.
        boxes: the boxes that are written, which cover it without overlaps.
        read: returns the image of one of the boxes.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    read: Callable[[Box], Bytes]


@dataclass(frozen=True, slots=True, eq=False)
class SuppliedBytes:
    """A value to write as bytes that a planner of DCP once made. `read` returns them."""

    read: Callable[[], bytes]
