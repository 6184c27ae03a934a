"""Private parts of the backends that the tests of this room use; each function states why."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ckptstore.backends.local_disk import posix
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.spare_files import SpareFiles

__all__ = ["forget_own_names", "libc_calls", "node_of"]


def libc_calls(patch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Record the calls of libc through ctypes, and make them -> name and arguments: `posix._call`.

    Pointers are given as numbers. Calls of a C library leave no trace that Python could read.
    """
    calls: list[tuple[str, tuple[Any, ...]]] = []
    real = posix._call

    def call(name: str, *arguments: Any) -> None:
        simple = ctypes.c_void_p, ctypes.c_size_t
        calls.append((name, tuple(one.value if isinstance(one, simple) else one for one in arguments)))
        real(name, *arguments)

    patch.setattr(posix, "_call", call)
    return calls


def node_of(backend: LocalBackend, key: str) -> int:
    """The number of the file of `key`: `LocalBackend._posix`.

    The interface of backends knows keys, not files; and the file may be in the memory of a `RamPosix`, where no other
    call finds it.
    """
    return backend._posix.stat(f"{backend.root}/{key}").st_ino


def forget_own_names(patch: pytest.MonkeyPatch) -> None:
    """A negative control, without the check that protects segments from overwriting: `SpareFiles._require_own_name`."""
    patch.setattr(SpareFiles, "_require_own_name", lambda *_: None)
