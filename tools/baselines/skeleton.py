"""A state without the bytes of its tensors: for formats that keep these apart."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

import torch

from tools.bench.training.training_loop import State, mapped

__all__ = ["described", "filled", "nbytes", "raw"]

_MARK: Final = "\0tensor"


def described(state: State) -> bytes:
    """The state with the type and shape of each tensor in its place."""
    file = io.BytesIO()
    torch.save(mapped(state, lambda _name, one: {_MARK: [str(one.dtype).partition(".")[2], list(one.shape)]}), file)
    return file.getvalue()


def filled(text: bytes | bytearray, read: Callable[[torch.Tensor], None]) -> State:
    """The inverse: `read` gets each new tensor, in the order of `tensors`, and fills it."""

    def built(value: Any) -> Any:
        if isinstance(value, dict):
            if _MARK in value:
                dtype, shape = value[_MARK]
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                read(tensor)
                return tensor
            return {key: built(one) for key, one in value.items()}
        return type(value)(map(built, value)) if isinstance(value, list | tuple) else value

    found: State = built(torch.load(io.BytesIO(text), weights_only=True))
    return found


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory; of one that is contiguous, its own."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
