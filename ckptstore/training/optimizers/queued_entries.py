"""Entries of gradients on a device, which travel to the host while training continues.

Every size is known beforehand, so the host waits for nothing: a device sends a fixed number of positions, in any order
and with repetitions, and the values there. The host sorts them when somebody reads the gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.formats.optim import SparseGradient
from ckptstore.frameworks.torch_offload import PinnedCopy
from ckptstore.frameworks.torch_shards import local_gradient, local_part
from ckptstore.write.steps.updates import LateGradient

__all__ = ["EntriesOnDevice", "queued_entries"]


@dataclass(frozen=True, slots=True, eq=False)
class EntriesOnDevice:
    """Where gradients on one device may differ from zero.

    Attributes:
        parameters: whose gradients they are; of a DTensor this rank's part.
        places: positions in the gradients, one after another: integers in any order, also repeated ones.
    """

    parameters: tuple[torch.Tensor, ...]
    places: torch.Tensor

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [local_part(one).numel() for one in self.parameters]


def queued_entries(found: Sequence[EntriesOnDevice], unchecked: set[torch.Tensor]) -> dict[torch.Tensor, LateGradient]:
    """Queue a copy of what the present gradients hold at these places -> the gradients, by parameter.

    A parameter without a gradient in fp32 is not in it. A gradient that differs from zero elsewhere is read as None.

    Args:
        found: all on one device.
        unchecked: parameters whose gradients are known to be zero elsewhere.
    """
    values: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    parts: list[tuple[EntriesOnDevice, dict[int, int]]] = []
    for one in found:
        flats = [_flat(parameter) for parameter in one.parameters]
        counted: dict[int, int] = {}
        for number, (parameter, flat) in enumerate(zip(one.parameters, flats, strict=True)):
            if flat is not None and parameter not in unchecked:
                counted[number] = len(counts)
                counts.append(torch.count_nonzero(flat.view(torch.int32)))
        values.append(_whole(one, flats).index_select(0, one.places))
        parts.append((one, counted))
    if not found:
        return {}
    places = torch.cat([one.places for one in found]).to(torch.int32)
    numbers = [places, torch.cat(values).view(torch.int32)]
    if counts:
        numbers.append(torch.stack(counts).to(torch.int32))
    message = _Message(PinnedCopy(torch.cat(numbers)), len(places), parts)
    return {
        parameter: LateGradient(size, partial(message.gradient, number, place))
        for number, one in enumerate(found)
        for place, (parameter, size) in enumerate(zip(one.parameters, one.sizes, strict=True))
        if _flat(parameter) is not None
    }


def _flat(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = local_gradient(parameter)
    return None if gradient is None or gradient.dtype != torch.float32 else gradient.detach().reshape(-1)


def _whole(one: EntriesOnDevice, flats: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if len(flats) == 1 and flats[0] is not None:
        return flats[0]
    return torch.cat(
        [
            torch.zeros(size, device=one.places.device) if flat is None else flat
            for size, flat in zip(one.sizes, flats, strict=True)
        ]
    )


class _Message:
    """What a device sends: all positions, all values, and how many numbers of some gradients are other than +0.0."""

    def __init__(self, copy: PinnedCopy, count: int, parts: Sequence[tuple[EntriesOnDevice, dict[int, int]]]) -> None:
        """
        Args:
            count: how many positions there are.
            parts: what they are of, in their order, and which of its gradients are counted at which place.
        """
        self._copy: PinnedCopy | None = copy
        self._count = count
        # No tensors: somebody may keep the message for long.
        self._sizes = [one.sizes for one, _ in parts]
        self._lengths = [len(one.places) for one, _ in parts]
        self._counted = [counted for _, counted in parts]
        self._read: list[list[SparseGradient | None]] = []
        self._lock = threading.Lock()

    def gradient(self, part: int, number: int) -> SparseGradient | None:
        """The gradient of one of a part's parameters, after a wait for the device."""
        with self._lock:
            if self._copy is not None:
                self._read = self._gradients(self._copy.wait().numpy())
                self._copy = None  # its memory is for the next message
        return self._read[part][number]

    def _gradients(self, message: npt.NDArray[np.int32]) -> list[list[SparseGradient | None]]:
        places, patterns, counts = np.split(message, [self._count, 2 * self._count])
        found = []
        at = 0
        for sizes, length, counted in zip(self._sizes, self._lengths, self._counted, strict=True):
            indices, first = np.unique(places[at : at + length].astype(np.int64), return_index=True)
            values = patterns[at : at + length][first].view(np.float32)
            starts = [*accumulate(sizes, initial=0)]
            bounds = np.searchsorted(indices, starts)
            gradients: list[SparseGradient | None] = []
            for number, size in enumerate(sizes):
                own = slice(bounds[number], bounds[number + 1])
                entries = int(np.count_nonzero(values[own].view(np.int32)))
                elsewhere = number in counted and int(counts[counted[number]]) != entries
                entry = SparseGradient(indices[own] - starts[number], values[own], size)
                gradients.append(None if elsewhere else entry)
            found.append(gradients)
            at += length
        return found
