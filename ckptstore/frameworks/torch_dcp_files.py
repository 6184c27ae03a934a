"""Read the tensors and values in the ``.distcp`` files of ``torch.distributed.checkpoint``. No pickled code is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ckptstore.errors import FormatError, StorageError, UnsupportedStateError
from ckptstore.frameworks import torch_files
from ckptstore.frameworks.dcp_items import DcpItem
from ckptstore.frameworks.torch_tensors import TorchSource

__all__ = ["dtype_name", "joined", "value_of"]

_PICKLES: Final = (b"PK", b"\x80")
"""How a zip archive and a bare pickle of ``torch.save`` begin."""


def dtype_name(name: str) -> str:
    """The logical name of torch's dtype (``float32``). Raises `UnsupportedStateError` if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedStateError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return TorchSource(torch.empty(0, dtype=found)).dtype


def value_of(folder: Path, item: DcpItem) -> Any:
    """A value that is not a tensor.

    Raises:
        UnsupportedStateError: it would need pickled code.
        FormatError: it is damaged or missing.
        StorageError: it cannot be read.
    """
    return torch_files.load_image(f"{folder / item.file}: bytes {item.offset} and following", _bytes(folder, item))


def joined(folder: Path, name: str, dtype: str, shape: Sequence[int], boxes: Sequence[DcpItem]) -> TorchSource:
    """A tensor, put together from its boxes.

    Raises:
        FormatError: a box is damaged or missing, or has another dtype or shape than described.
        StorageError: a file cannot be read.
    """
    wanted = getattr(torch, dtype)
    whole = torch.empty(tuple(shape), dtype=wanted)
    for item in boxes:
        found = _tensor(folder, name, item)
        if found.dtype != wanted or tuple(found.shape) != tuple(item.shape):
            raise FormatError(
                f"{folder / item.file}: {name} has a box of {found.dtype} {list(found.shape)}, where {wanted} "
                f"{list(item.shape)} is described"
            )
        place = tuple(slice(first, first + length) for first, length in zip(item.begin, item.shape, strict=True))
        whole[place] = found
    return TorchSource(whole)


def _tensor(folder: Path, name: str, item: DcpItem) -> torch.Tensor:
    image = _bytes(folder, item)
    if not image.startswith(_PICKLES):
        raise UnsupportedStateError(
            f"{folder / item.file}: {name} is not in the form of torch.save: save it in that form"
        )
    found = torch_files.load_image(f"{folder / item.file}: {name}", image)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        raise FormatError(f"{folder / item.file}: {name} is a {type(found).__name__}, not a dense tensor")
    return found.detach()


def _bytes(folder: Path, item: DcpItem) -> bytes:
    path = folder / item.file
    try:
        with path.open("rb") as file:
            # Before the read, which allocates what a damaged description says.
            if item.offset + item.length <= os.fstat(file.fileno()).st_size:
                file.seek(item.offset)
                image = file.read(item.length)
            else:
                image = b""
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except OSError as error:
        raise StorageError(error.errno, error.strerror, str(path)) from error
    if len(image) != item.length:
        raise FormatError(f"{path}: truncated: it ends before byte {item.offset + item.length}")
    return image
