"""What the tests of this room reach inside the kernels for; see each function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ckptstore.formats.kernel_choice import Hot

__all__ = ["forget", "kernels", "replace", "trust"]


def kernels() -> dict[str, Hot[..., Any]]:
    """Every kernel with a compiled form that was imported, by name."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ckptstore.formats.")]
    found = [one for module in modules for one in vars(module).values() if isinstance(one, Hot)]
    return {one.reference.__name__: one for one in found}


def replace(kernel: Hot[..., Any], form: Callable[..., Any]) -> None:
    """Have `form` in place of what numba compiled. Nothing public breaks a compiler."""
    kernel._fast = form


def trust() -> None:
    """As if each kernel had been right for as long as it takes until its calls are compared no more."""
    for kernel in kernels().values():
        kernel._calls.update(dict.fromkeys(kernel._calls, 1 << 20))


def forget() -> None:
    """As in a process that begins: no kernel was called, and none is replaced."""
    for kernel in kernels().values():
        kernel._calls.clear()
        kernel._fast = None
