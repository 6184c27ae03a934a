"""Check the machine code in numba's disk cache before it runs.

numba writes these files without a sync and without a checksum. After a power cut a file may be empty, truncated, or
contain pages of zeros. Unpickling it then raises anything (``EOFError``, ``UnpicklingError``, ``ModuleNotFoundError``),
or it loads and the process crashes in it. Therefore a list of file hashes (``….sums``) is stored beside the files of
each function. Files without a list, or with another hash, are deleted, and the function is compiled again.
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
"""Maximum bytes of a list of hashes."""


def machine_code(function: Callable[_P, _R], signature: tuple[Any, ...], options: dict[str, Any]) -> Callable[_P, _R]:
    """Return the function compiled by numba for one signature, from its cache if possible.

    Args:
        function: the function to compile.
        signature: numba's types of the arguments.
        options: options of ``numba.jit``.

    Raises:
        Whatever numba raises for a function that it cannot compile.
    """
    import numba

    files = _Files.of(function)
    if files is not None:
        files.drop_torn()
        for _ in range(2):
            try:
                compiled: Callable[_P, _R] = numba.jit(signature, cache=True, **options)(function)
            except (OSError, RuntimeError):
                break  # the folder turned out not to be writable, or the disk is full
            except Exception:  # noqa: BLE001 - unpickling a damaged file may raise anything
                files.drop()
            else:
                files.note()
                return compiled
    found: Callable[_P, _R] = numba.jit(signature, **options)(function)
    return found


class _Files:
    """The files of one function in numba's cache, and the list of their hashes.

    numba names them ``MODULE.FUNCTION-LINE.pyXY.nbi`` and ``….N.nbc``; there is one of the latter for each signature.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self._folder = folder
        self._base = base
        self._sums = folder / f"{base}.sums"

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Files | None:
        """Return the files of `function`; None: numba can write to no folder, and caches nothing."""
        from numba.core.caching import FunctionCache

        try:
            folder = Path(FunctionCache(function).cache_path)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - RuntimeError: no locator; OSError: the folder cannot be created
            return None
        code = function.__code__
        name = function.__qualname__.replace("<", "").replace(">", "")
        version = f"py{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
        return cls(folder, f"{Path(code.co_filename).stem}.{name}-{code.co_firstlineno}.{version}")

    def _found(self) -> dict[str, str]:
        """Return name -> hash of the files that exist."""
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
        """Delete all files if one of them differs from the list."""
        # Prevents: running machine code that a power cut has left incomplete.
        if self._found() != self._listed():
            self.drop()

    def drop(self) -> None:
        """Delete all files and the list."""
        for name in (*self._found(), self._sums.name):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def note(self) -> None:
        """Write the list of hashes if it has changed."""
        found = self._found()
        if found == self._listed():
            return
        temporary = self._folder / f"{self._sums.name}.{uuid.uuid4().hex[:16]}.tmp"
        try:
            temporary.write_text(json.dumps(found), "utf-8")
            temporary.replace(self._sums)
        except OSError:  # without a list the next process compiles again
            with contextlib.suppress(OSError):
                temporary.unlink()
