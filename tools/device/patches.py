"""Replaces parts of `torch.cuda`, `torch.accelerator` and `torch.Tensor` while a device is simulated."""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tools.device.machine import Event, Machine, Stream

__all__ = ["patched"]


class _Error(enum.IntEnum):
    success = 0
    invalidValue = 1  # noqa: N815 - CUDA's names
    hostMemoryAlreadyRegistered = 712  # noqa: N815
    hostMemoryNotRegistered = 713  # noqa: N815


class _Runtime:
    """`torch.cuda.cudart()`."""

    cudaError = _Error  # noqa: N815

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cudaHostRegister(self, start: int, nbytes: int, _: int) -> _Error:  # noqa: N802
        if nbytes <= 0 or not start:
            return _Error.invalidValue
        return _Error.success if self._machine.register(start, nbytes) else _Error.hostMemoryAlreadyRegistered

    def cudaHostUnregister(self, start: int) -> _Error:  # noqa: N802
        return _Error.success if self._machine.unregister(start) else _Error.hostMemoryNotRegistered

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return _Error(error).name

    def cudaMemGetInfo(self, _: int) -> tuple[int, int]:  # noqa: N802
        total = 1 << 34
        return total - self._machine.counts.held, total


@contextlib.contextmanager
def patched(machine: Machine) -> Iterator[None]:
    """Replace the attributes, and restore them."""
    stream_class = type("Stream", (Stream,), {"machine": machine})
    event_class = type("Event", (Event,), {"machine": machine})
    runtime = _Runtime(machine)

    def check_error(result: int) -> None:
        if int(result) != _Error.success:
            raise RuntimeError(f"CUDA error: {_Error(int(result)).name}")

    def synchronize(_: Any = None) -> None:
        machine.wait("synchronize")

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = machine.index()
        machine.set_index(machine.index(device))
        try:
            yield
        finally:
            machine.set_index(before)

    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: machine.devices,
        "current_device": machine.index,
        "set_device": machine.set_index,
        "device": on_device,
        "get_device_name": lambda _=None: "a simulated device",
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "current_stream": machine.current,
        "default_stream": machine.default,
        "set_stream": machine.set_current,
        "stream": machine.on,
        "Stream": stream_class,
        "Event": event_class,
        "synchronize": synchronize,
        "cudart": lambda: runtime,
        "check_error": check_error,
        "memory_allocated": lambda _=None: machine.counts.held,
        "max_memory_allocated": lambda _=None: machine.counts.peak,
        "reset_peak_memory_stats": lambda _=None: machine.counts.reset(),
        "mem_get_info": lambda _=None: runtime.cudaMemGetInfo(0),
        "empty_cache": lambda: None,
        "_sleep": lambda _: machine.launch(machine.index(), lambda: None, ()),
        **_generators(machine),
    }
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: machine.devices,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": machine.index,
        "set_device_index": machine.set_index,
        "current_stream": machine.current,
        "set_stream": machine.set_current,
        "synchronize": synchronize,
    }
    changes = [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        *((torch.accelerator, name, value) for name, value in accelerator.items()),
        (torch, "Stream", stream_class),
        (torch, "Event", event_class),
        *((torch.Tensor, name, value) for name, value in _methods(machine).items()),
        *((torch, name, _pinning(machine, getattr(torch, name))) for name in ("empty", "zeros", "empty_like", "ones")),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, value in changes:
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, value))
        yield


def _generators(machine: Machine) -> dict[str, Any]:
    """A device's generator state is a seed and an offset, 16 bytes, as with CUDA."""

    def state(device: Any = "cuda") -> torch.Tensor:
        one = machine.random[machine.index(device)]
        return torch.tensor([one.seed, one.offset], dtype=torch.int64).view(torch.uint8)

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        one = machine.random[machine.index(device)]
        one.seed, one.offset = state.clone().view(torch.int64).tolist()

    def seed_all(seed: int) -> None:
        for one in machine.random:
            one.seed, one.offset = int(seed) % (1 << 62), 0

    def seed_one(seed: int) -> None:
        one = machine.random[machine.index()]
        one.seed, one.offset = int(seed) % (1 << 62), 0

    def set_all(states: Any) -> None:
        for number, one in enumerate(states):
            set_state(one, number)

    return {
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state(number) for number in range(machine.devices)],
        "set_rng_state": set_state,
        "set_rng_state_all": set_all,
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: machine.random[machine.index()].seed,
    }


def _methods(machine: Machine) -> dict[str, Any]:
    deepcopy = torch.Tensor.__deepcopy__
    moved = torch.Tensor.to

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        if self.is_cuda:
            machine.record_stream(self, stream)

    def is_pinned(self: torch.Tensor, *_: Any, **__: Any) -> bool:
        return machine.is_registered(self) if self.device.type == "cpu" else False

    def pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        made = torch.empty_like(self, pin_memory=True)
        return made.copy_(self)

    def copied(self: torch.Tensor, memo: Any) -> torch.Tensor:
        if not self.is_cuda or not self.is_leaf:
            return deepcopy(self, memo)
        if id(self) in memo:
            found: torch.Tensor = memo[id(self)]
            return found
        with torch.no_grad():
            made = self.detach().clone()
        made = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else (
            made.requires_grad_(self.requires_grad)
        )  # fmt: skip
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Without a wait torch returns pinned memory.
        if self.is_cuda and (kwargs.get("non_blocking") or any(one is True for one in args)):
            # A copy from a device is never the same tensor.
            asked = {name: one for name, one in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[:3], **asked)
            if device is not None and device.type == "cpu" and non_blocking:
                made = torch.empty(self.size(), dtype=dtype or self.dtype, pin_memory=True)
                return made.copy_(self, non_blocking=True)
        return moved(self, *args, **kwargs)

    return {
        "record_stream": record_stream,
        "is_pinned": is_pinned,
        "pin_memory": pin_memory,
        "to": to,
        "__deepcopy__": copied,
    }


def _pinning(machine: Machine, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory whose ``pin_memory=True`` returns registered memory."""
    kept: list[torch.Tensor] = []  # as torch keeps pinned memory; elsewhere its addresses would stay registered

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        found = make(*args, **kwargs)
        if pin_memory and found.device.type == "cpu" and found.numel():
            machine.ranges.add(*_storage(found))
            kept.append(found.detach())
        return found

    return made


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
