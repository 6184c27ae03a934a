"""The state digest of `formats.digest`, computed where the tensor lives.

torch has no unsigned 64-bit arithmetic, and needs none: modulo 2^64, products and sums of int64 have the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats import digest as reference
from ckptstore.formats.sources import TensorSource
from ckptstore.frameworks import torch_tensors as adapter

__all__ = ["device_digests", "digest", "digests", "partial_on_device"]

_BATCH = 64  # blocks of 256 KiB at once: 32 MiB of int64 scratch, enough to fill a GPU
_WORTH = 1 << 20  # bytes from which a device is asked: a dozen kernels are launched for each tensor
_KEPT = 65536  # multipliers kept on each device: 512 KiB, for tensors up to 16 GiB


def digest(tensor: torch.Tensor) -> int:
    """The digest D of a tensor on any device, as an unsigned 64-bit number; equals the numpy reference.

    On the CPU the reference itself computes it. On a device, the work goes to the current stream, and is waited for.

    Raises:
        UnsupportedStateError: a tensor that cannot be stored has no digest.
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Digests of many tensors, with one wait for all those on one device."""
    found = [0] * len(tensors)
    waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        flat = adapter.flat_bytes(adapter.TorchSource(tensor).resolved.contiguous())
        if adapter.on_host(flat):
            found[index] = reference.digest(flat.numpy())
            continue
        waiting.setdefault(flat.device, []).append((index, partial_on_device(flat, 0)))
    for results in waiting.values():
        sums = torch.stack([result for _, result in results]).tolist()
        for (index, _), total in zip(results, sums, strict=True):
            tensor = tensors[index]
            found[index] = reference.combine(total, nbytes=tensor.numel() * tensor.element_size())
    return found


def device_digests(sources: Mapping[str, TensorSource]) -> dict[str, int]:
    """Digests of the larger ones of those tensors that are on CUDA devices, by name; the host computes all others'.

    Each is computed on the stream on which its tensor is read. Returns when they are there. A device without memory
    for the scratch (some 100 MiB, and a copy of a strided tensor) is not asked on: what it has computed is used.
    """
    by_stream: dict[torch.cuda.Stream | None, dict[str, adapter.TorchSource]] = {}
    for name, source in sources.items():
        if isinstance(source, adapter.TorchSource) and source.nbytes >= _WORTH and _computes(source.tensor):
            by_stream.setdefault(source.stream, {})[name] = source
    found: dict[str, int] = {}
    for stream, members in by_stream.items():
        with adapter.on_stream(stream):
            partials: dict[str, torch.Tensor] = {}
            with contextlib.suppress(torch.OutOfMemoryError):
                for name, source in members.items():
                    image = adapter.flat_bytes(source.resolved.contiguous())
                    partials[name] = partial_on_device(image, 0)
            sums = torch.stack(list(partials.values())).tolist() if partials else []
        for (name, _), total in zip(partials.items(), sums, strict=True):
            found[name] = reference.combine(total, nbytes=members[name].nbytes)
    return found


def _computes(tensor: torch.Tensor) -> bool:
    """Whether the device that a tensor is on computes its digest."""
    return tensor.is_cuda


def partial_on_device(image: torch.Tensor, first_word: int) -> torch.Tensor:
    """`formats.digest.partial` in torch operations on the image's own device, without waiting for it.

    Args:
        image: contiguous uint8, 1-D: the part of the image that starts at word `first_word`. Only the last part of a
            tensor may have a length that is not a multiple of 4.
        first_word: position of the first word, counted from the start of the tensor.

    Returns:
        0-d int64 tensor on the same device: the partial digest's bits, read as a signed number.
    """
    total = torch.zeros((), dtype=torch.int64, device=image.device)
    if not image.numel():
        return total
    size = reference.BLOCK_WORDS
    tail = image.numel() % 4
    if tail or image.storage_offset() % 4:  # words must be whole and aligned for the view below
        image = torch.nn.functional.pad(image, (0, -tail % 4)) if tail else image.clone()
    words = image.view(torch.int32)
    block, skip = divmod(first_word, size)
    done = 0
    while done < words.numel():
        left = words.numel() - done
        rows = min(left // size, _BATCH) if not skip else 0
        if rows:
            part = words[done : done + rows * size].view(rows, size)
            scales, advance = _weights(image.device), rows
        else:
            part = words[done : done + min(left, size - skip)].view(1, -1)
            scales, advance = _weights(image.device)[skip : skip + part.numel()], 1
        products = part.to(torch.int64).bitwise_and_(0xFFFFFFFF).mul_(scales)
        total += (products.sum(1) * _multipliers(block, advance, image.device)).sum()
        done += part.numel()
        block, skip = block + advance, 0
    return total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """K as int64 on `device`: 512 KiB, kept."""
    return _upload(reference.weights(), device)


def _multipliers(first: int, count: int, device: torch.device) -> torch.Tensor:
    if first + count <= _KEPT:
        return _kept_multipliers(device)[first : first + count]
    return _upload(reference.multipliers(first, count), device)


@lru_cache(maxsize=16)
def _kept_multipliers(device: torch.device) -> torch.Tensor:
    """The first M on `device`, kept as well: an upload would wait for the device."""
    return _upload(reference.multipliers(0, _KEPT), device)


def _upload(constants: npt.NDArray[np.uint64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(constants.view("<i8").copy()).to(device)
