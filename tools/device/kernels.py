"""Runs torch operations on tensors of a simulated device: each is queued, and computed on the CPU when it runs.

Torch's own dispatcher calls these kernels, in any thread: they are registered for CUDA, where a torch without CUDA has
none. Tensors are plain `torch.Tensor`, so autograd, optimizers and `torch.nn` are torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from tools.device import memory
from tools.device.machine import Machine
from tools.device.memory import Span
from tools.device.roundings import Roundings

__all__ = ["Kernels"]

aten = torch.ops.aten
_ON_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_WITHOUT_WAIT: Final = {"aten::_fused_sdp_choice": 0}
"""Operations that only ask about formats, and their answers."""
_DRAWING: Final = torch.Tag.nondeterministic_seeded


class Kernels:
    """The kernels of a machine, from `install` to `remove`."""

    def __init__(self, machine: Machine, roundings: Roundings) -> None:
        """
        Args:
            roundings: operations that are computed otherwise than by torch.
        """
        self._machine = machine
        self._roundings = roundings
        self._fallback: Any = None
        self._library: Any = None

    def install(self) -> None:
        """Register the kernels."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that composite kernels are overridden, which is intended
            self._install()

    def _install(self) -> None:
        self._fallback = torch.library.Library("_", "IMPL")
        self._fallback.fallback(self._any, "CUDA")
        self._library = torch.library.Library("aten", "IMPL")
        special: dict[str, Callable[..., Any]] = {
            "copy_": self._copy,
            "empty.memory_format": self._empty,
            "empty_strided": self._empty_strided,
            "resize_": self._resize,
            "set_.source_Storage_storage_offset": self._set,
            "set_.source_Storage": self._set_storage,
            "set_.source_Tensor": self._set_tensor,
            "set_": self._set_nothing,
            "_local_scalar_dense": self._item,
            "native_dropout": self._dropout,
        }
        for name, kernel in special.items():
            self._library.impl(name, kernel, "CUDA")
        # Torch would split each list and launch a kernel for each tensor; a device has one kernel for the list.
        for name in _foreach_operators():
            self._library.impl(name, self._bound(name), "CUDA")

    def remove(self) -> None:
        """Unregister the kernels."""
        for library in (self._library, self._fallback):
            if library is not None:
                library._destroy()

    def _bound(self, name: str) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return self._any(op, *args, **kwargs)

        return kernel

    # -- any operation

    def _any(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        schema = op._schema
        if schema.name in _WITHOUT_WAIT:
            return _WITHOUT_WAIT[schema.name]
        if _is_view(schema):
            return op.redispatch(_ON_HOST, *args, **kwargs)
        args = _with_tensors(schema, args)
        device = self._device_of(args, kwargs)
        if any(not _gives_tensors(one.type) for one in schema.returns):
            return self._now(op, device, args, kwargs)
        written = _written(schema, args, kwargs)
        drawn = self._seeded(op, kwargs, device)
        if len(written) == len(schema.returns) or not schema.returns:
            self._sized(op, args, kwargs, written)
            call = self._call(op, args, kwargs, drawn)
            changed = self._spans([one for _, one in written], {})
            self._machine.launch(device, call, self._spans(args, kwargs), changed)
            return _returned([one for _, one in written], schema)
        shapes = _shapes(op, args, kwargs)
        if shapes is None:
            return self._uploaded(op, device, args, kwargs, drawn)
        made = tree_map(
            lambda one: (
                self._machine.allocate(device, one.dtype, tuple(one.size()), one.stride())
                if isinstance(one, torch.Tensor)
                else one
            ),
            shapes,
        )
        outputs = [Span.of(one) for one in _tensors(made)]
        call = self._call(op, args, kwargs, drawn)

        def run() -> None:
            for span, result in zip(outputs, _tensors(call()), strict=True):
                span.host.copy_(result)

        self._machine.launch(device, run, self._spans(args, kwargs), outputs)
        return made

    def _now(self, op: Any, device: int, args: Any, kwargs: Any) -> Any:
        """Run an operation that returns a number to the host: the host waits."""
        call = self._call(op, args, kwargs, None)
        found: list[Any] = []
        self._machine.launch(device, lambda: found.append(call()), self._spans(args, kwargs))
        self._machine.wait(op._schema.name, self._machine.current(device).queue.end)
        return found[0]

    def _uploaded(self, op: Any, device: int, args: Any, kwargs: Any, drawn: int | None) -> Any:
        """Run an operation whose result size depends on the data: the host waits for it, as with CUDA."""
        call = self._call(op, args, kwargs, drawn)
        found: list[Any] = []
        self._machine.launch(device, lambda: found.append(call()), self._spans(args, kwargs))
        self._machine.wait(op._schema.name, self._machine.current(device).queue.end)

        def stored(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            made = self._machine.allocate(device, one.dtype, tuple(one.size()), one.stride())
            Span.of(made).host.copy_(one)
            return made

        return tree_map(stored, found[0])

    def _device_of(self, args: Any, kwargs: Any) -> int:
        found = {one.device.index for one in _tensors((args, kwargs)) if one.is_cuda}
        if len(found) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:{sorted(found)}")
        return found.pop() if found else self._machine.index(kwargs.get("device"))

    def _spans(self, args: Any, kwargs: Any) -> list[Span]:
        return [Span.of(one) for one in _tensors((args, kwargs)) if one.is_cuda]

    def _call(self, op: Any, args: Any, kwargs: Any, drawn: int | None) -> Callable[[], Any]:
        """Compute the operation on the CPU, with the present data of its arguments."""
        indexing = op._schema.name.startswith(("aten::index", "aten::_index", "aten::_unsafe_index"))

        def later(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            if one.is_cuda:
                return Span.of(one)
            if one.dim() and not indexing:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! "
                    f"(in {op})"
                )
            return one.detach().clone()

        held = tree_map(later, (list(args), kwargs))
        rounding = self._roundings.get(op._schema.name)

        def call() -> Any:
            its, named = tree_map(lambda one: one.host if isinstance(one, Span) else one, held)
            if "device" in named:
                named = {**named, "device": torch.device("cpu")}
            if "pin_memory" in named:
                named = {**named, "pin_memory": None}
            if drawn is not None:
                named = {**named, "generator": torch.Generator().manual_seed(drawn)}
            return op(*its, **named) if rounding is None else rounding(op, *its, **named)

        return call

    def _seeded(self, op: Any, kwargs: Any, device: int) -> int | None:
        """The seed of an operation that draws numbers; None: it draws none."""
        if _DRAWING not in op.tags:
            return None
        if all(one.name != "generator" for one in op._schema.arguments):
            raise NotImplementedError(f"{op} draws random numbers, and is not simulated")
        if kwargs.get("generator") is not None:
            raise NotImplementedError(f"{op}: a generator of its own is not simulated")
        return self._machine.random[device].next()

    def _sized(self, op: Any, args: Any, kwargs: Any, written: Sequence[tuple[str, Any]]) -> None:
        """Give an empty ``out=`` the size of the result."""
        outputs = [one for name, one in written if isinstance(one, torch.Tensor) and name not in ("self",)]
        if not outputs or any(one.numel() for one in outputs):
            return
        shapes = _shapes(op, args, kwargs)
        for one, wanted in zip(outputs, _tensors(shapes), strict=False):
            if one.size() != wanted.size():
                self._resize(one, list(wanted.size()))

    # -- memory

    def _empty(
        self, size: Sequence[int], *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
    ) -> torch.Tensor:
        stride = None
        if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
            stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
        return self._machine.allocate(
            self._machine.index(device), dtype or torch.get_default_dtype(), tuple(size), stride
        )

    def _empty_strided(
        self, size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
    ) -> torch.Tensor:
        number = self._machine.index(device)
        return self._machine.allocate(number, dtype or torch.get_default_dtype(), tuple(size), tuple(stride))

    def _resize(self, tensor: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
        if list(tensor.size()) == list(size):
            return tensor
        made = self._machine.allocate(tensor.device.index, tensor.dtype, tuple(size))
        kept = min(tensor.numel(), made.numel())
        if kept:
            self._copy(memory.aliased(made, made.dtype, (kept,), (1,)), memory.aliased(
                tensor, tensor.dtype, (kept,), (1,), tensor.storage_offset()
            ))  # fmt: skip
        return self._set(tensor, made.untyped_storage(), 0, made.size(), made.stride())

    def _set(self, tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
        op = aten.set_.source_Storage_storage_offset
        op.redispatch(_ON_HOST, tensor, storage, offset, list(size), list(stride))
        return tensor

    def _set_storage(self, tensor: torch.Tensor, storage: Any) -> torch.Tensor:
        return self._set(tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])

    def _set_tensor(self, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self._set(tensor, source.untyped_storage(), source.storage_offset(), source.size(), source.stride())

    def _set_nothing(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._machine.allocate(tensor.device.index, tensor.dtype, (0,))
        return self._set(tensor, made.untyped_storage(), 0, (0,), (1,))

    # -- copies

    def _copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if into.is_cuda and source.is_cuda:
            self._copy_on_device(into, source)
        elif source.is_cuda:
            self._copy_to_host(into, source, non_blocking)
        else:
            self._copy_to_device(into, source, non_blocking)
        return into

    def _copy_on_device(self, into: torch.Tensor, source: torch.Tensor) -> None:
        machine, there, here = self._machine, Span.of(into), Span.of(source)
        if into.device != source.device:  # as in torch: on the source's stream, ordered with the other stream
            from_, to = machine.current(source.device), machine.current(into.device)
            from_.wait_stream(to)
        machine.launch(source.device.index, lambda: _copied(there.host, here.host), (here,), (there,))
        if into.device != source.device:
            to.wait_stream(from_)

    def _copy_to_host(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        machine, here = self._machine, Span.of(source)
        there = into.detach()
        registered = machine.is_registered(into)
        machine.transfer(source.device.index, lambda: _copied(there, here.host), here, there, to_host=True)
        if not non_blocking or not registered:
            why = "copy to host" if not non_blocking else "copy to pageable host memory"
            machine.wait(why, machine.current(source.device).queue.end)

    def _copy_to_device(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        machine, there = self._machine, Span.of(into)
        registered = machine.is_registered(source)
        # Unregistered memory is read before the call returns, even if the host does not wait.
        here = source.detach() if registered else source.detach().clone()
        machine.transfer(
            into.device.index, lambda: _copied(there.host, here), there, here if registered else None, to_host=False
        )
        if not non_blocking:
            machine.wait("copy to device", machine.current(into.device).queue.end)

    def _item(self, tensor: torch.Tensor) -> Any:
        machine, here = self._machine, Span.of(tensor)
        found: list[Any] = []
        machine.transfer(tensor.device.index, lambda: found.append(here.host.item()), here, None, to_host=True)
        machine.wait("item", machine.current(tensor.device).queue.end)
        return found[0]

    # -- operations that draw numbers without a generator argument

    def _dropout(self, tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        machine, number, dropping = self._machine, tensor.device.index, train is None or train
        out = machine.allocate(number, tensor.dtype, tuple(tensor.size()))
        mask = machine.allocate(number, torch.bool, tuple(tensor.size()))
        here, there, drawn = Span.of(tensor), Span.of(out), Span.of(mask)
        seed = machine.random[number].next()

        def run() -> None:
            keep = drawn.host.fill_(True)
            if dropping:
                keep.bernoulli_(1 - p, generator=torch.Generator().manual_seed(seed))
            there.host.copy_(here.host * keep * (1 / (1 - p) if dropping and p < 1 else 1.0))

        machine.launch(number, run, (here,), (there, drawn))
        return out, mask


def _copied(there: torch.Tensor, here: torch.Tensor) -> None:
    there.copy_(here)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for part in value for one in _tensors(part)]
    return []


def _is_view(schema: Any) -> bool:
    return bool(schema.returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
    )


def _with_tensors(schema: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments, with a tensor for each number that stands for one: torch gives Python the number."""
    tensor = torch.TensorType.get()
    kinds = [one.type for one in schema.arguments]
    return [
        torch.tensor(one) if isinstance(one, int | float | complex) and kind == tensor else one
        for one, kind in zip(args, kinds, strict=False)
    ]


def _gives_tensors(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _written(schema: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The arguments that the operation writes and returns."""
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    return [
        (one.name, given[one.name])
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write and given.get(one.name) is not None
    ]


def _returned(written: list[Any], schema: Any) -> Any:
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _shapes(op: Any, args: Any, kwargs: Any) -> Any:
    """The results of the operation as meta tensors; None: they depend on the data."""

    def form(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if not one.is_cuda and not one.dim():
            return one
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")

    its, named = tree_map(form, (list(args), dict(kwargs)))
    if "device" in named:
        named["device"] = torch.device("meta")
    named.pop("generator", None)
    try:
        return op(*its, **named)
    except (NotImplementedError, RuntimeError):
        return None


@cache
def _foreach_operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [one.removeprefix("aten::") for one in names if one.startswith("aten::_foreach_")]
