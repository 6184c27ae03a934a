"""Memory of the simulated devices, and host memory that they copy to and from without blocking the host.

A device's memory is host memory behind a tensor that says ``cuda:0``: torch takes ownership of it from a DLPack
capsule, so the tensor is a plain `torch.Tensor`, not a subclass. When the last tensor over it is gone, torch calls
back. On a real device the next allocation on the same stream may get the memory then. Here a job on that stream
overwrites it (`POISON`).
"""

from __future__ import annotations

import atexit
import ctypes
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tools.device.queues import Position, Queue
from tools.device.races import Accesses

__all__ = [
    "POISON",
    "Block",
    "HostRanges",
    "Span",
    "aliased",
    "allocated",
    "block_of",
    "freed",
    "host_span",
    "lent",
    "settled",
]

POISON: Final = 0xA5
"""The content of memory that is freed, or allocated and not written yet."""
ALIGNMENT: Final = 512
_CUDA: Final = 2  # kDLCUDA
_UNSIGNED: Final = 1  # kDLUInt
_ON_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(eq=False, slots=True)
class Block:
    """One allocation.

    Attributes:
        device: its number.
        nbytes: the requested size in bytes.
        memory: the bytes.
        host: the same as a CPU tensor.
        stream: on which it was allocated.
        used: the positions of other streams when `record_stream` named them.
        where: who allocated it, in ckptstore; None: somebody else.
        poisoned: it was freed, and overwritten.
        accesses: the jobs that touch it.
    """

    device: int
    nbytes: int
    memory: npt.NDArray[np.uint8]
    host: torch.Tensor
    stream: Queue
    where: str | None
    used: set[Queue] = field(default_factory=set)
    poisoned: bool = False
    accesses: Accesses = field(default_factory=Accesses)


_live: dict[int, tuple[_Managed, Block, Any]] = {}  # by the address that torch passes to the callback
_by_memory: dict[int, Block] = {}
_gone: deque[int] = deque()
_kept: list[Any] = []
"""What tensors of `lent` may read, as long as the process lives."""


@_Deleter
def _forget(managed: Any) -> None:
    _gone.append(ctypes.addressof(managed.contents))  # called in any thread at any time, so it does nothing else


@atexit.register
def _leave() -> None:
    # Tensors may outlive the interpreter: torch must not call back then, and the structure that it reads must stay.
    for managed, _, _ in _live.values():
        managed.deleter = _Deleter()
    for kept in (_live, _forget):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def allocated(device: int, nbytes: int, stream: Queue, where: str | None) -> tuple[Block, torch.Tensor]:
    """Allocate memory -> the block and a tensor over it, uint8, 1-D, that says ``cuda:device``."""
    raw = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    memory = raw[skip : skip + nbytes] if nbytes else raw[skip : skip + 1]
    block = Block(device, nbytes, memory, torch.from_numpy(memory), stream, where)
    shape = (ctypes.c_int64 * 2)(nbytes, 1)
    managed = _Managed()
    managed.tensor = _Tensor(
        memory.ctypes.data, _Device(_CUDA, device), 1, _Type(_UNSIGNED, 8, 1), shape,
        ctypes.cast(ctypes.byref(shape, 8), ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed.deleter = _forget
    address = ctypes.addressof(managed)
    _live[address] = managed, block, shape
    _by_memory[memory.ctypes.data] = block
    return block, torch.from_dlpack(_capsule(address, b"dltensor", None))


def lent(data: npt.NDArray[np.uint8], kind: int) -> torch.Tensor:
    """A tensor over memory of the host, uint8, 1-D, that says it is on device 0 of a kind (a number of DLPack's)."""
    shape = (ctypes.c_int64 * 2)(len(data), 1)
    managed = _Managed()
    managed.tensor = _Tensor(
        data.ctypes.data, _Device(kind, 0), 1, _Type(_UNSIGNED, 8, 1), shape,
        ctypes.cast(ctypes.byref(shape, 8), ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed.deleter = _Deleter()
    _kept.append((data, shape, managed))
    return torch.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


def freed() -> list[Block]:
    """The blocks whose last tensor has gone since the last call."""
    found = []
    while _gone:
        _, block, _ = _live.pop(_gone.popleft())
        if _by_memory.get(block.memory.ctypes.data) is block:
            del _by_memory[block.memory.ctypes.data]
        found.append(block)
    return found


def block_of(tensor: torch.Tensor) -> Block:
    """The memory of a tensor of a simulated device."""
    return _by_memory[tensor.untyped_storage().data_ptr()]


def aliased(
    tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    """A tensor of any shape over the memory of `tensor`; autograd does not treat it as a view."""
    typed = torch.ops.aten.view.dtype.redispatch(_ON_HOST, tensor, dtype) if tensor.dtype != dtype else tensor
    return torch.ops.aten.as_strided.default.redispatch(_ON_HOST, typed, size, stride, offset)


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor of a device that does not keep its memory alive."""

    block: Block
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        """The memory that a tensor refers to now."""
        form = tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
        return cls(block_of(tensor), *form, tensor.is_conj(), tensor.is_neg())

    @property
    def host(self) -> torch.Tensor:
        """The same memory as a CPU tensor."""
        made = torch.empty(0, dtype=self.dtype)
        made.set_(self.block.host.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload]
        made = made.conj() if self.conjugated else made
        return torch._neg_view(made) if self.negated else made

    @property
    def reach(self) -> tuple[int, int]:
        """Its first byte and its end within the block."""
        if 0 in self.size:
            return 0, 0
        last = sum((many - 1) * step for many, step in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return int(np.prod(self.size, dtype=np.int64)) * self.dtype.itemsize


def host_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length of a CPU tensor's memory; for a strided tensor including the gaps."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), reach * tensor.element_size()


@dataclass
class HostRanges:
    """Host memory that is registered with the devices (page-locked)."""

    starts: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, start: int, nbytes: int) -> bool:
        """Register a range -> False: a part of it is registered already."""
        at = bisect_right(self.starts, start)
        if at and self.ends[self.starts[at - 1]] > start:
            return False
        if at < len(self.starts) and self.starts[at] < start + nbytes:
            return False
        self.starts.insert(at, start)
        self.ends[start] = start + nbytes
        return True

    def remove(self, start: int) -> bool:
        """Unregister a range -> False: no registration begins there."""
        if start not in self.ends:
            return False
        self.starts.remove(start)
        del self.ends[start]
        return True

    def holds(self, start: int, nbytes: int) -> bool:
        """Whether all of a range is registered. Adjacent ranges count as one."""
        end = start + nbytes
        while True:
            at = bisect_right(self.starts, start)
            if not at or self.ends[self.starts[at - 1]] <= start:
                return False
            start = self.ends[self.starts[at - 1]]
            if start >= end:
                return True


def settled(block: Block) -> tuple[Position, ...]:
    """The positions that must be done before freed memory is used again: its own stream's, and those of
    `record_stream`."""
    return tuple(queue.end for queue in {block.stream, *block.used})
