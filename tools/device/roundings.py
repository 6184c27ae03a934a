"""How kernels of a simulated device round: unlike torch's on the CPU, for `tools.device.simulated`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

__all__ = ["UNKNOWN", "Roundings"]

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
