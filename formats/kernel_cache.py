"""Machine code that numba keeps on disk, checked before it runs.

numba writes it without a sync and without a checksum. After a power cut a file may be empty, cut short, or have pages
of zeros: unpickling it raises anything (``EOFError``, ``UnpicklingError``, ``ModuleNotFoundError``), or it loads and
the process dies in it. So each function's files get a list of their hashes beside them (``….sums``). Files without
a list, or with another hash, are deleted, and the function is compiled anew.
"""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import xxhash

__all__ = ["machine_code"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SUFFIXES: Final = (".nbi", ".nbc")
_LIMIT: Final = 1 << 20
"""Bytes of a list of hashes."""


def machine_code(function: Callable[_P, _R], signature: tuple[Any, ...], options: dict[str, Any]) -> Callable[_P, _R]:
    """The function, compiled by numba for one signature, or fetched from its cache.

    Args:
        signature: numba's types of the arguments.
        options: of ``numba.jit``.

    Raises:
        whatever numba raises for a function that it cannot compile.
    """
    import numba

    files = _Files.of(function)
    if files is not None:
        files.drop_torn()
        for _ in range(2):
            try:
                compiled: Callable[_P, _R] = numba.jit(signature, cache=True, **options)(function)
            except (OSError, RuntimeError):
                break  # the folder cannot be written after all, or the disk is full
            except Exception:  # noqa: BLE001 - whatever unpickling raises for a file that is not what numba wrote
                files.drop()
            else:
                files.note()
                return compiled
    found: Callable[_P, _R] = numba.jit(signature, **options)(function)
    return found


class _Files:
    """The files of one function in numba's cache, and the list of their hashes.

    numba names them ``MODULE.FUNCTION-LINE.pyXY.nbi`` and ``….N.nbc``: one of the latter for each signature.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self._folder = folder
        self._base = base
        self._sums = folder / f"{base}.sums"

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Files | None:
        """None: numba finds no folder that it can write, and keeps nothing."""
        from numba.core.caching import FunctionCache

        try:
            folder = Path(FunctionCache(function).cache_path)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - RuntimeError: no locator; OSError: the folder cannot be made
            return None
        code = function.__code__
        name = function.__qualname__.replace("<", "").replace(">", "")
        version = f"py{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
        return cls(folder, f"{Path(code.co_filename).stem}.{name}-{code.co_firstlineno}.{version}")

    def _found(self) -> dict[str, str]:
        """Name -> hash."""
        found: dict[str, str] = {}
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.name.startswith(f"{self._base}.") and path.suffix in _SUFFIXES:
                    with contextlib.suppress(OSError):
                        found[path.name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
        return found

    def _listed(self) -> dict[str, str]:
        try:
            with self._sums.open("rb") as file:
                listed = json.loads(file.read(_LIMIT))
        except (OSError, ValueError):
            return {}
        return listed if isinstance(listed, dict) else {}

    def drop_torn(self) -> None:
        """Delete all of it if one file is not what was written."""
        # Prevents: running machine code of which a power cut has left a part.
        if self._found() != self._listed():
            self.drop()

    def drop(self) -> None:
        """Delete all of it."""
        for name in (*self._found(), self._sums.name):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def note(self) -> None:
        """Write the list, unless it is what it would be."""
        found = self._found()
        if found == self._listed():
            return
        temporary = self._folder / f"{self._sums.name}.{uuid.uuid4().hex[:16]}.tmp"
        try:
            temporary.write_text(json.dumps(found), "utf-8")
            temporary.replace(self._sums)
        except OSError:  # without a list the next process compiles anew
            with contextlib.suppress(OSError):
                temporary.unlink()
