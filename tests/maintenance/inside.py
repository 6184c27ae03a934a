"""Private parts of the kernels that the tests of this room use; each function states why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ckptstore.formats.kernel_choice import Hot

__all__ = ["forget", "kernels", "replace", "trust"]


def kernels() -> dict[str, Hot[..., Any]]:
    """Every imported kernel with a compiled form, by name."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ckptstore.formats.")]
    found = [one for module in modules for one in vars(module).values() if isinstance(one, Hot)]
    return {one.reference.__name__: one for one in found}


def replace(kernel: Hot[..., Any], form: Callable[..., Any]) -> None:
    """Replace the compiled form by `form`. No public function breaks a compiler."""
    kernel._fast = form


def trust() -> None:
    """Act as if each kernel had been right long enough that its calls are no longer compared."""
    for kernel in kernels().values():
        kernel._calls.update(dict.fromkeys(kernel._calls, 1 << 20))


def forget() -> None:
    """Reset to the state of a new process: no kernel was called, and none is replaced."""
    for kernel in kernels().values():
        kernel._calls.clear()
        kernel._fast = None
