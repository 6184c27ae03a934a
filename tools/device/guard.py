"""Makes a torch without CUDA accept tensors of a CUDA device.

It changes two tables of torch, and restores them afterwards:

- Torch asks a "device guard" for the current device of a type, and refuses a type that has none. It lets Python
  register one for its spare device type; the same object works for CUDA. Torch keeps guards in a table of pointers.
- Autograd asks the hooks for CUDA whether CUDA is there. They are an object with virtual functions; it gets a copy of
  its table in which a few functions differ.

Both are found by the names that torch's libraries export, and a virtual function's place by torch's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["installed", "removed", "spare", "why_not"]

_TYPES: Final = 22
_CUDA: Final = 1
_SPARE: Final = 20
_TORCH: Final = Path(torch.__file__).parent
_HEADERS: Final = _TORCH / "include" / "ATen" / "detail"
_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
_BEFORE: Final = 2  # the address point of a table of virtual functions is two words after its start


def why_not() -> str | None:
    """Why this torch cannot simulate a device; None: it can."""
    if torch.cuda.is_available() or torch.backends.cuda.is_built():
        return "this torch has CUDA: a device is only simulated with one that has not"
    if not hasattr(torch._C, "_acc") or not hasattr(torch._C._acc, "DeviceGuard"):
        return f"torch {torch.__version__} takes no device guard from Python"
    if not (_HEADERS / "CUDAHooksInterface.h").exists():
        return f"torch {torch.__version__} came without its headers"
    return None


def installed() -> None:
    """Make torch accept CUDA tensors. Raises `RuntimeError` if torch still refuses; the tables are then restored."""
    _guards()[_CUDA] = _guard()[1]
    vtable = _hooks_with_cuda()
    _hooks()[0] = ctypes.addressof(vtable) + _BEFORE * _WORD
    found = torch._C._accelerator_getAccelerator()
    if found is None or found.type != "cuda":
        removed()
        raise RuntimeError(f"torch {torch.__version__} has its virtual functions in another order than its headers")


def removed() -> None:
    """Restore torch's tables."""
    _hooks()[0] = _hooks_of_torch()
    _guards()[_CUDA] = None


@contextlib.contextmanager
def spare() -> Iterator[None]:
    """Let the same guard serve torch's spare device type within this ``with``, while it serves CUDA."""
    table = _guards()
    table[_SPARE] = _guard()[1]
    try:
        yield
    finally:
        table[_SPARE] = None


@cache
def _guards() -> Any:
    library = ctypes.CDLL(str(_TORCH / "lib" / "libc10.so"))
    return (ctypes.c_void_p * _TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


@cache
def _guard() -> tuple[Any, int]:
    """The guard and its address. Made once: nothing shows when torch stops using it."""

    class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined,unused-ignore]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard, table = Guard(), _guards()
    before = table[_SPARE]
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    address, table[_SPARE] = table[_SPARE], before
    return guard, address


@cache
def _hooks() -> Any:
    """The first word of torch's hooks for CUDA: the address of their virtual functions."""
    find = ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cpu.so"))["_ZN2at6detail12getCUDAHooksEv"]
    find.restype = ctypes.c_void_p
    _hooks_of_torch()
    return (ctypes.c_void_p * 1).from_address(find())


@cache
def _hooks_of_torch() -> int:
    find = ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cpu.so"))["_ZN2at6detail12getCUDAHooksEv"]
    find.restype = ctypes.c_void_p
    return int(ctypes.c_void_p.from_address(find()).value or 0)


@cache
def _hooks_with_cuda() -> Any:
    names = _virtual_functions()
    own = (ctypes.c_void_p * (len(names) + _BEFORE)).from_address(_hooks_of_torch() - _BEFORE * _WORD)
    made = type(own)(*own)
    for name, answer in _ANSWERS.items():
        made[_BEFORE + names.index(name)] = ctypes.cast(answer, ctypes.c_void_p)
    return made


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
def _has_cuda(_: int) -> bool:
    return True


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)
def _has_context(_: int, __: int) -> bool:
    return False  # otherwise autograd would set the streams of each device


@ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
def _device_count(_: int) -> int:
    return 1


_ANSWERS: Final[dict[str, Any]] = {
    "isBuilt": _has_cuda,
    "isAvailable": _has_cuda,
    "hasCUDA": _has_cuda,
    "hasPrimaryContext": _has_context,
    "deviceCount": _device_count,
}


def _virtual_functions() -> list[str]:
    """The names of the virtual functions, in the order of the table."""
    names: list[str] = []
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        for name in re.findall(r"^\s*virtual [^;{(]*?(~?\w+)\s*\(", (_HEADERS / header).read_text(), re.MULTILINE):
            if name.startswith("~"):
                names += [] if names else ["~", "~ and delete"]
            elif name not in names:
                names.append(name)
    return names
