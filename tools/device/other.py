"""Tensors on a kind of device that is not CUDA: over memory of the host, and every operation is computed at once.

torch has a spare kind of device for packages that it does not know (``privateuseone``), and lets Python make tensors,
kernels and a guard for it. The guard of the simulated device serves here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from tools.device import guard, memory

__all__ = ["another_device", "tensor_there"]

_KIND: Final = 12  # kDLExtDev
_ON_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@contextlib.contextmanager
def another_device() -> Iterator[None]:
    """Let torch compute with these tensors, within `tools.device.simulated`. They must not be used afterwards."""
    module: Any = types.ModuleType("torch.privateuseone")
    module.is_available = module.is_initialized = lambda: True
    module.current_device, module.device_count = lambda: 0, lambda: 1
    fallback, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda op, *args, **named: op.redispatch(_ON_HOST, *args, **named), "PrivateUse1")
    library.impl("_copy_from", _copied, "PrivateUse1")
    try:
        with (
            guard.spare(),
            mock.patch.dict(sys.modules, {module.__name__: module}),
            mock.patch.object(torch, "privateuseone", module, create=True),
        ):
            yield
    finally:
        library._destroy()
        fallback._destroy()


def tensor_there(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A one-dimensional tensor of that device over memory of the host."""
    return memory.lent(data, _KIND)


def _copied(source: torch.Tensor, into: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    del non_blocking
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    return into
