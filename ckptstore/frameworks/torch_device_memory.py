"""Counts the device memory that this package holds in this process from step to step (`SaveMetrics.device_bytes`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Final, Protocol

import torch

__all__ = ["DeviceHolder", "HeldTensors", "bytes_of", "count_in", "held"]


class DeviceHolder(Protocol):
    """Something that holds tensors on devices."""

    def device_bytes(self) -> int:
        """The bytes that they take now. Any thread may ask."""


_lock: Final = threading.Lock()
_holders: Final[weakref.WeakSet[DeviceHolder]] = weakref.WeakSet()


def count_in(holder: DeviceHolder) -> None:
    """Count what this holds, as long as it lives."""
    with _lock:
        _holders.add(holder)


def held() -> int:
    """The bytes of device memory that all holders have now."""
    with _lock:
        holders = list(_holders)
    return sum(one.device_bytes() for one in holders)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of those tensors that are on CUDA devices."""
    return sum(one.nbytes for one in tensors if one.is_cuda)


class HeldTensors:
    """Tensors that others hold, counted until they are freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        count_in(self)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor until this Python object of it has gone."""
        with self._lock:
            self._tensors = [one for one in self._tensors if one() is not None]
            self._tensors.append(weakref.ref(tensor))

    def device_bytes(self) -> int:
        """See `DeviceHolder`."""
        with self._lock:
            found = [one() for one in self._tensors]
        return bytes_of(one for one in found if one is not None)
