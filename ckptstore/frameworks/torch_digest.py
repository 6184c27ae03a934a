"""Compute the state digest of `formats.digest` on the tensor's own device.

torch has no unsigned 64-bit arithmetic. It does not need any: modulo 2^64, products and sums of int64 have the same
bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats import digest as reference
from ckptstore.formats.sources import TensorSource
from ckptstore.frameworks import torch_tensors as adapter
from ckptstore.frameworks.torch_device_memory import HeldTensors

__all__ = ["DeviceDigests", "device_digests", "digest", "digests", "partial_on_device", "partials_of_small"]

_BATCH = 64  # blocks of 256 KiB at once: 32 MiB of int64 scratch, enough to fill a GPU
_WORTH = 1 << 20  # smallest tensor, in bytes, that a device digests: each tensor needs a dozen kernel launches
_SMALL_BATCH = 16 << 20  # bytes of small tensors that are digested at once, with six times as much scratch
_KEPT = 65536  # multipliers kept on each device: 512 KiB, for tensors up to 16 GiB


def digest(tensor: torch.Tensor) -> int:
    """The digest D of a tensor on any device (SPEC section 4), as an unsigned 64-bit number.

    Equals the numpy reference. On the CPU the reference itself computes it. On a device, this queues the work on the
    current stream and waits for it.

    Raises:
        UnsupportedStateError: the tensor cannot be stored, so it has no digest.
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Digests of many tensors, with one wait per device. Raises as `digest`."""
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


class DeviceDigests(Mapping[str, int]):
    """Digests that devices compute, by name. The names are known at once. Reading a digest waits for its device."""

    def __init__(self, names: Mapping[str, int], waiting: Sequence[_PendingDigests]) -> None:
        """
        Args:
            names: bytes of each tensor.
            waiting: the sums that are being computed.
        """
        self._nbytes = dict(names)
        self._waiting = list(waiting)
        self._found: dict[str, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> int:
        nbytes = self._nbytes[name]
        with self._lock:
            while self._waiting:
                self._found.update(self._waiting[-1].wait())
                self._waiting.pop()
        return reference.combine(self._found[name], nbytes=nbytes)

    def __contains__(self, name: object) -> bool:
        return name in self._nbytes  # waits for nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._nbytes)

    def __len__(self) -> int:
        return len(self._nbytes)


@dataclass(frozen=True, slots=True)
class _PendingDigests:
    """Partial digests that are being copied to the host.

    Attributes:
        names: the tensors.
        host: 1-D int64, in the order of `names`; valid once `ready` has happened.
        ready: the end of the copy. None: the copy is done.
        stream: the stream of the copy, or None.
    """

    names: tuple[str, ...]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    stream: torch.cuda.Stream | None

    @classmethod
    def queued(cls, names: Sequence[str], partials: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> Self:
        """Queue a copy to the host on `stream`. None: the device has no streams, so this waits for the copy.

        Args:
            partials: 1-D; together one number for each name.
        """
        sums = torch.cat(list(partials))
        if stream is None:
            return cls(tuple(names), sums.cpu(), None, None)
        host = torch.empty(len(names), dtype=torch.int64, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        return cls(tuple(names), host, stream.record_event(), stream)

    def wait(self) -> dict[str, int]:
        if self.ready is not None and self.stream is not None:
            with torch.cuda.device(self.stream.device):  # Prevents: a context on the first GPU, a thread's default.
                self.ready.synchronize()
        return dict(zip(self.names, self.host.tolist(), strict=True))


def device_digests(
    sources: Mapping[str, TensorSource],
    on: Callable[[adapter.TorchSource], torch.cuda.Stream | None] = lambda source: source.stream,
    *,
    small: bool = False,
) -> DeviceDigests:
    """Queue the digests of the larger tensors on CUDA devices. Returns them by name; the host computes all others.

    If a device has no memory for the scratch (some 100 MiB, and a copy of a strided tensor), it computes no further
    digests. Those that it has queued are used.

    Args:
        sources: the tensors.
        on: returns the stream on which a digest is computed; by default the stream on which the tensor is read. For any
            other stream the caller must ensure the order.
        small: also compute those of small tensors, together. Without it they are worth computing where their bytes
            are: on the host, which gets them anyway.
    """
    by_stream: dict[torch.cuda.Stream | None, dict[str, adapter.TorchSource]] = {}
    for name, source in sources.items():
        least = 1 if small else _WORTH
        if isinstance(source, adapter.TorchSource) and source.nbytes >= least and _computes(source.tensor):
            by_stream.setdefault(on(source), {})[name] = source
    found: dict[str, int] = {}
    waiting = []
    for stream, members in by_stream.items():
        with adapter.on_stream(stream):
            names: list[str] = []
            partials: list[torch.Tensor] = []
            with contextlib.suppress(torch.OutOfMemoryError):
                for batch in _batches(members):
                    images = []
                    for name in batch:
                        data = members[name].resolved
                        if stream is not None:
                            data.record_stream(stream)  # Prevents: memory reused before its digest is computed.
                        images.append(adapter.flat_bytes(data.contiguous()))
                    large = images[0].numel() >= _WORTH
                    partials.append(partial_on_device(images[0], 0).view(1) if large else partials_of_small(images))
                    names += batch
            if partials:
                waiting.append(_PendingDigests.queued(names, partials, stream))
                found.update((name, members[name].nbytes) for name in names)
    return DeviceDigests(found, waiting)


def _batches(members: Mapping[str, adapter.TorchSource]) -> list[list[str]]:
    """The names of tensors that are digested together: each large one alone."""
    large: list[list[str]] = []
    small: list[list[str]] = [[]]
    size = 0
    for name, source in members.items():
        if source.nbytes >= _WORTH:
            large.append([name])
            continue
        if size + source.nbytes > _SMALL_BATCH:
            small.append([])
            size = 0
        small[-1].append(name)
        size += source.nbytes
    return [*large, *(batch for batch in small if batch)]


def _computes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device computes its digest."""
    return tensor.is_cuda


def partial_on_device(image: torch.Tensor, first_word: int) -> torch.Tensor:
    """`formats.digest.partial` in torch operations, queued on the image's own device.

    Args:
        image: contiguous uint8, 1-D: the part of the image that starts at word `first_word`. Its length must be a
            multiple of 4, except for the last part of a tensor.
        first_word: position of the first word, counted from the start of the tensor.

    Returns:
        0-d int64 tensor on the same device: the partial digest's bits as a signed number.
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


def partials_of_small(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """`formats.digest.partial` of many whole tensors, queued on their device in a dozen launches.

    Args:
        images: contiguous uint8, 1-D, on one device, each of 1 to `_WORTH` bytes.

    Returns:
        1-D int64 tensor on the same device: the bits of the partial digest of each image, as signed numbers.
    """
    device = images[0].device
    counts = tuple(-(-image.numel() // 4) for image in images)
    pieces, scales = [], []
    for image, count in zip(images, counts, strict=True):
        pieces.append(image)
        if pad := 4 * count - image.numel():
            pieces.append(_zeros(device)[:pad])
        scales.append(_word_weights(device)[:count])
    products = torch.cat(pieces).view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF).mul_(torch.cat(scales))
    sums = torch.cumsum(products, 0)[_ends(counts, device)]
    return torch.cat([sums[:1], sums[1:] - sums[:-1]])


@lru_cache(maxsize=16)
def _zeros(device: torch.device) -> torch.Tensor:
    return _kept(torch.zeros(4, dtype=torch.uint8, device=device))


@lru_cache(maxsize=16)
def _word_weights(device: torch.device) -> torch.Tensor:
    """The weight of each word of a small tensor, as int64 on `device` (2 MiB), cached."""
    blocks = -(-_WORTH // (4 * reference.BLOCK_WORDS))
    return _kept(_upload(np.outer(reference.multipliers(0, blocks), reference.weights()).reshape(-1), device))


@lru_cache(maxsize=64)
def _ends(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The position of the last word of each of some tensors, cached, because an upload would wait for the device."""
    return _kept(torch.tensor(np.cumsum(counts) - 1).to(device))


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """The weights K as int64 on `device` (512 KiB), cached."""
    return _kept(_upload(reference.weights(), device))


def _multipliers(first: int, count: int, device: torch.device) -> torch.Tensor:
    if first + count <= _KEPT:
        return _kept_multipliers(device)[first : first + count]
    return _upload(reference.multipliers(first, count), device)


@lru_cache(maxsize=16)
def _kept_multipliers(device: torch.device) -> torch.Tensor:
    """The first multipliers M on `device`, cached, because an upload would wait for the device."""
    return _kept(_upload(reference.multipliers(0, _KEPT), device))


def _kept(constants: torch.Tensor) -> torch.Tensor:
    """Wait for the upload of constants, which was queued on one stream, so that any stream may use them."""
    if constants.is_cuda:
        torch.cuda.current_stream(constants.device).synchronize()
        _constants.add(constants)
    return constants


_constants: Final = HeldTensors()


def _upload(constants: npt.NDArray[np.uint64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(constants.view("<i8").copy()).to(device)
