"""numpy arrays and scalars in the pickles that torch loads with ``weights_only``: their bytes, checked here.

A random state holds numpy arrays, so files with one need numpy's own reconstructing functions. Those trust what a
pickle tells them, down to the memory layout. The stand-ins here take the same names and arguments and accept numbers
of a plain dtype in bytes of the right length, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import FormatError

__all__ = ["ALLOWED", "PickledArray", "named"]

_KINDS: Final = "biufc"
_ORDERS: Final = ("<", ">", "|", "=")
_DIMENSIONS: Final = 32


class PickledArray(np.ndarray[Any, Any]):
    """An array as the pickle gives it; ``view(np.ndarray)`` is the ordinary one."""

    def __setstate__(self, state: Any) -> None:
        """Take (version, shape, dtype, whether in Fortran order, bytes). Raises `FormatError` for anything else."""
        if not (isinstance(state, tuple) and len(state) == 5):
            raise FormatError("a pickled array of unknown form")
        _version, shape, dtype, fortran, data = state
        if not isinstance(shape, tuple) or len(shape) > _DIMENSIONS or not all(map(_is_length, shape)):
            raise FormatError(f"a pickled array of shape {shape!r:.80}")
        found = _plain(dtype)
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * found.itemsize:
            raise FormatError(f"a pickled array of {found} and shape {shape!r:.80} has other bytes")
        # numpy's own stub wants a numpy.bool, which numpy itself does not take here.
        super().__setstate__((1, shape, found, bool(fortran), data))  # type: ignore[arg-type]


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


class _PickledDtype:
    """Stands for a numpy dtype until its byte order is known."""

    def __init__(self, code: Any) -> None:
        if not isinstance(code, str) or len(code) > 4:
            raise FormatError(f"a pickled dtype {code!r:.80}")
        try:
            self.dtype: np.dtype[Any] = np.dtype(code)
        except TypeError as error:
            raise FormatError(f"a pickled dtype {code!r:.80}") from error

    def __setstate__(self, state: Any) -> None:
        """Take (version, byte order, then what only dtypes with parts have, which is refused)."""
        if not (isinstance(state, tuple) and state[2:5] == (None,) * 3 and state[1] in _ORDERS):
            raise FormatError("a pickled dtype of unknown form")
        self.dtype = self.dtype.newbyteorder(state[1])


def _plain(dtype: Any) -> np.dtype[Any]:
    """The dtype that a stand-in says; a real one where the caller's process allows numpy's own."""
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
        raise FormatError(f"a pickled scalar of {found} has {data!r:.80} as its bytes")
    array: npt.NDArray[Any] = np.frombuffer(data, found).astype(found.newbyteorder("="))
    value: np.generic = array[0]
    return value


def _no_bytes(*arguments: Any) -> bytes:
    """How protocol 2 writes ``b""``, and so the bytes of an empty array."""
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
    # Under names of their own, too: what they make may be filled in even where the caller's process allows numpy's.
    PickledArray,
    _PickledDtype,
]
"""For ``torch.serialization.safe_globals``: what numpy 1 and numpy 2 call these."""


def named(allowed: Any) -> str:
    """The name under which torch's unpickler knows something that is allowed."""
    return str(allowed[1]) if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
