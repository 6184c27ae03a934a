"""Safe replacements for the numpy functions in pickles that torch loads with ``weights_only``.

A random state has numpy arrays, so files with one call numpy's reconstructing functions. Those trust the pickle, even
for the memory layout. The replacements have the same names and arguments. They accept only numbers of a plain dtype,
with bytes of the right length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import FormatError

__all__ = ["ALLOWED", "PickledArray", "global_name"]

_KINDS: Final = "biufc"
_ORDERS: Final = ("<", ">", "|", "=")
_DIMENSIONS: Final = 32


class PickledArray(np.ndarray[Any, Any]):
    """An array from a pickle. ``view(np.ndarray)`` makes an ordinary array."""

    def __setstate__(self, state: Any) -> None:
        """Accept (version, shape, dtype, whether in Fortran order, bytes). Raises `FormatError` for anything else."""
        if not (isinstance(state, tuple) and len(state) == 5):
            raise FormatError("a pickled array of unknown form")
        _version, shape, dtype, fortran, data = state
        if not isinstance(shape, tuple) or len(shape) > _DIMENSIONS or not all(map(_is_length, shape)):
            raise FormatError(f"a pickled array has an invalid shape: {shape!r:.80}")
        found = _plain(dtype)
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * found.itemsize:
            raise FormatError(f"a pickled array of {found} and shape {shape!r:.80} has a wrong number of bytes")
        # numpy's stub requires a numpy.bool, which numpy itself does not accept here.
        super().__setstate__((1, shape, found, bool(fortran), data))  # type: ignore[arg-type]


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


class _PickledDtype:
    """Represents a numpy dtype until its byte order is known."""

    def __init__(self, code: Any) -> None:
        if not isinstance(code, str) or len(code) > 4:
            raise FormatError(f"a pickled dtype is invalid: {code!r:.80}")
        try:
            self.dtype: np.dtype[Any] = np.dtype(code)
        except TypeError as error:
            raise FormatError(f"a pickled dtype is invalid: {code!r:.80}") from error

    def __setstate__(self, state: Any) -> None:
        """Accept (version, byte order, None, None, None, ...). Structured dtypes have other values and are refused."""
        if not (isinstance(state, tuple) and state[2:5] == (None,) * 3 and state[1] in _ORDERS):
            raise FormatError("a pickled dtype of unknown form")
        self.dtype = self.dtype.newbyteorder(state[1])


def _plain(dtype: Any) -> np.dtype[Any]:
    """The dtype of a `_PickledDtype`, or a real dtype if the caller's process allows numpy's own functions."""
    found = dtype.dtype if isinstance(dtype, _PickledDtype) else dtype
    if not isinstance(found, np.dtype) or found.kind not in _KINDS:
        raise FormatError(f"a pickled array of {found!r:.80}: only numbers are taken from a pickle")
    return found


def _dtype(code: Any, *_how: Any) -> _PickledDtype:
    return _PickledDtype(code)


def _reconstruct(*_arguments: Any) -> PickledArray:
    return PickledArray(0, np.uint8)


def _scalar(dtype: Any, data: Any = b"") -> np.generic:
    found = _plain(dtype)
    if not isinstance(data, bytes) or len(data) != found.itemsize:
        raise FormatError(f"a pickled scalar of {found} has a wrong number of bytes: {data!r:.80}")
    array: npt.NDArray[Any] = np.frombuffer(data, found).astype(found.newbyteorder("="))
    value: np.generic = array[0]
    return value


def _no_bytes(*arguments: Any) -> bytes:
    """The call ``bytes()``, with which protocol 2 writes ``b""``, the bytes of an empty array."""
    if arguments:
        raise FormatError("a pickled call of bytes() with arguments")
    return b""


_Allowed: TypeAlias = tuple[Callable[..., Any], str]

ALLOWED: Final[list[_Allowed | Any]] = [
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_dtype, "numpy.dtype"),
    (PickledArray, "numpy.ndarray"),
    (_no_bytes, "builtins.bytes"),
    # Also under their own names: torch sets the state of an object only if its class is allowed, and the process may
    # allow numpy's class under the name above.
    PickledArray,
    _PickledDtype,
]
"""The replacements for ``torch.serialization.safe_globals``, with their names in numpy 1 and numpy 2."""


def global_name(allowed: Any) -> str:
    """The name by which torch's unpickler finds an allowed global."""
    return str(allowed[1]) if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
