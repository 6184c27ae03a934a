"""How kernels of a simulated device round: unlike torch's on the CPU, for `tools.device.simulated`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

__all__ = ["CONTRACTED", "UNKNOWN", "Roundings"]

Roundings: TypeAlias = Mapping[str, Callable[..., Any]]
"""By the name of torch's operation (``aten::add_``) a kernel on the CPU: it is called with the operation and its
arguments."""


def _last_bit(op: Any, *args: Any, **named: Any) -> Any:
    """Compute an operation that writes its first argument, and flip the last bit of each fp32 number of the result."""
    found = op(*args, **named)
    for one in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
        if one.dtype == torch.float32:
            one.view(torch.int32).bitwise_xor_(1)
    return found


UNKNOWN: Final[Roundings] = dict.fromkeys(("aten::addcdiv_", "aten::_foreach_addcdiv_"), _last_bit)
"""Rounds Adam's last operation in a way of its own."""


def _fma(product: tuple[Any, Any], addend: Any) -> Any:
    """``a * b + c`` of fp32 numbers, rounded once: the product is exact in fp64, the sum is rounded to odd there."""
    exact = np.asarray(product[0], np.float64) * np.asarray(product[1], np.float64)
    third = np.asarray(addend, np.float64)
    with np.errstate(all="ignore"):
        total = exact + third
        virtual = total - exact
        error = (exact - (total - virtual)) + (third - virtual)
        even = (total.view(np.int64) & 1) == 0
        moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where((error != 0) & np.isfinite(error) & even, moved, total).astype(np.float32)


def _each(op: Any, args: tuple[Any, ...], named: Any, compute: Callable[..., Any]) -> Any:
    """Compute an operation of torch, or one over lists: of fp32 numbers with numpy, into its first argument or not."""
    lists = "_foreach_" in op._schema.name
    first = args[0] if lists else [args[0]]
    if any(one.dtype != torch.float32 for one in first):
        return op(*args, **named)
    out = named.pop("out", None)
    found = []
    for place, one in enumerate(first):
        others = [other[place] if lists and isinstance(other, list | tuple) else other for other in args[1:]]
        numbers = [other.numpy() if isinstance(other, torch.Tensor) else np.float32(other) for other in others]
        result = torch.from_numpy(np.asarray(compute(one.numpy(), *numbers, **named), np.float32))
        into = one if op._schema.name.endswith("_") else out
        found.append(result if into is None else into.copy_(result))
    return found if lists else found[0]


def _lerp(op: Any, *args: Any, **named: Any) -> Any:
    def compute(start: Any, end: Any, weight: Any) -> Any:
        if weight < 0.5:
            return _fma((weight, end - start), start)
        return _fma((end - start, weight - np.float32(1)), end)

    return _each(op, args, named, compute)


def _addcmul(op: Any, *args: Any, **named: Any) -> Any:
    def compute(one: Any, a: Any, b: Any, value: Any = 1.0) -> Any:
        return _fma((np.float32(value), a * b), one)

    return _each(op, args, named, compute)


def _addcdiv(op: Any, *args: Any, **named: Any) -> Any:
    def compute(one: Any, a: Any, b: Any, value: Any = 1.0) -> Any:
        with np.errstate(all="ignore"):
            return _fma((np.float32(value), a / b), one)

    return _each(op, args, named, compute)


def _add(op: Any, *args: Any, **named: Any) -> Any:
    def compute(one: Any, other: Any, alpha: Any = 1.0) -> Any:
        return _fma((np.float32(alpha), other), one)

    return _each(op, args, named, compute)


def _sqrt(op: Any, *args: Any, **named: Any) -> Any:
    return _each(op, args, named, np.sqrt)


CONTRACTED: Final[Roundings] = {
    f"aten::{prefix}{name}{place}": kernel
    for name, kernel in (("lerp", _lerp), ("addcmul", _addcmul), ("addcdiv", _addcdiv), ("add", _add), ("sqrt", _sqrt))
    for prefix in ("", "_foreach_")
    for place in ("", "_")
}
"""Contracts each product that is added to something, in the order of the source of torch's CUDA kernels
(``a + alpha * (b * c)``), and has square roots that are rounded correctly."""
