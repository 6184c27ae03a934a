"""Where the tensors and values of a folder of ``torch.distributed.checkpoint`` are stored. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DcpItem", "DcpTensor"]


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
