"""The device's part of a step that the host computes again: what leaves the device instead of the new state.

In torch operations of any device; on the CPU they give the same bytes. None of them waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats.remainders import PER_BYTE, packed_size
from ckptstore.formats.sources import BoxSource, TensorSource
from ckptstore.frameworks.torch_tensors import TorchSource, image, on_stream

__all__ = ["as_bf16", "away", "pack", "place_of", "remainders", "roots", "unboxed"]

_BATCH: Final = PER_BYTE << 21
"""Numbers at once: 50 MiB of scratch."""


def away(source: TensorSource) -> bool:
    """Whether it is a tensor on a device whose reads can be queued."""
    return isinstance(source, TorchSource) and source.stream is not None


def unboxed(source: TensorSource) -> TensorSource:
    """A box of a contiguous tensor on a device, as a tensor of its own; any other source itself."""
    if not isinstance(source, BoxSource):
        return source
    inner = source.source
    if not away(inner) or not isinstance(inner, TorchSource) or not inner.resolved.is_contiguous():
        return source
    first = source.start // inner.tensor.element_size()
    part = inner.resolved.view(-1)[first : first + math.prod(source.shape)]
    with on_stream(inner.stream):
        return TorchSource(part.view(source.shape))


def place_of(source: TensorSource) -> Hashable:
    """The device and the stream of a tensor on a device."""
    assert isinstance(source, TorchSource)
    return source.tensor.device, source.stream


def remainders(sources: Sequence[TensorSource]) -> TorchSource:
    """Queue the computation of the remainders of fp32 tensors on one device, end to end (`formats.remainders`).

    Raises:
        MemoryError: the device has no memory for the scratch and the result.
    """
    with _queueing(sources[0]):
        words = [_words(one) for one in sources]
        return TorchSource(pack(words[0] if len(words) == 1 else torch.cat(words)))


def _words(source: TensorSource) -> torch.Tensor:
    assert isinstance(source, TorchSource)
    return image(source.resolved.contiguous()).view(-1)


def pack(words: torch.Tensor) -> torch.Tensor:
    """The remainders of int32 words, five to a byte, on their own device."""
    count = words.numel()
    out = torch.empty(packed_size(count), dtype=torch.uint8, device=words.device)
    for start in range(0, count, _BATCH):
        digits = torch.remainder(words[start : start + _BATCH], 3).to(torch.uint8)
        if missing := -digits.numel() % PER_BYTE:
            digits = torch.nn.functional.pad(digits, (0, missing))
        rows = digits.view(-1, PER_BYTE)
        sums = out[start // PER_BYTE :][: len(rows)]
        sums.copy_(rows[:, PER_BYTE - 1])
        for place in reversed(range(PER_BYTE - 1)):
            sums.mul_(3).add_(rows[:, place])
    return out


def roots(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Square roots as torch computes them on the CPU: its library rounds some of them otherwise than to nearest."""
    found: npt.NDArray[np.float32] = torch.sqrt(torch.from_numpy(numbers)).numpy()
    return found


def as_bf16(source: TensorSource) -> TorchSource:
    """Queue the conversion of an fp32 tensor to bf16. Raises as `remainders`."""
    assert isinstance(source, TorchSource)
    with _queueing(source):
        return TorchSource(source.resolved.to(torch.bfloat16))


@contextlib.contextmanager
def _queueing(source: TensorSource) -> Iterator[None]:
    """Queue work on the stream of a tensor."""
    assert isinstance(source, TorchSource)
    try:
        with on_stream(source.stream), torch.no_grad():
            yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"no memory on {source.tensor.device}") from error
