"""Element types: the logical name, how a segment stores it, and the numpy type.

A tensor has a *logical* dtype and shape, which are those of the saved tensor, and a *stored* dtype and shape, which are
in the segment's safetensors header, so that every safetensors reader can open it:

- Most dtypes are stored unchanged.
- Complex numbers are stored as reals with a trailing dimension of 2 (real, imaginary). safetensors has no C32 and no
  C128, and all widths should be treated alike.
- ``F8_E8M0`` (block scales) and ``F4_E2M1_X2`` (two 4-bit values in a byte, torch's ``float4_e2m1fn_x2``) are stored
  as U8: readers older than safetensors 0.6 do not know the first, and the F4 of safetensors counts half bytes.

Both images have the same bytes: a dtype never changes the stored bytes, only their name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ckptstore.errors import FormatError, UnsupportedStateError

__all__ = ["DTYPES", "DType", "from_numpy", "get", "is_integer", "nbytes", "storage_shape"]

_ML: Final = "ml_dtypes."
_ARRAY_TYPES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "BOOL": "?",
        "U8": "|u1",
        "I8": "|i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "BF16": f"{_ML}bfloat16",
        "F32": "<f4",
        "F64": "<f8",
        "F8_E4M3": f"{_ML}float8_e4m3fn",
        "F8_E5M2": f"{_ML}float8_e5m2",
        "F8_E4M3FNUZ": f"{_ML}float8_e4m3fnuz",
        "F8_E5M2FNUZ": f"{_ML}float8_e5m2fnuz",
        "F8_E8M0": f"{_ML}float8_e8m0fnu",
        "F4_E2M1_X2": "|u1",
        "C32": [("real", "<f2"), ("imag", "<f2")],
        "C64": "<c8",
        "C128": "<c16",
    }
)
"""By logical name. ml_dtypes is imported when an array has one of its types: the first save of a process need not do
that."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: logical name in the metadata (``"F32"``, ``"BF16"``, ``"C64"``).
        storage: dtype code in the segment's safetensors header.
        itemsize: bytes per logical element (8 for C64, although it is stored as two F32).
        trailing: dimensions of the stored shape behind the logical ones: ``(2,)`` for complex, else ``()``.
    """

    name: str
    storage: str
    itemsize: int
    trailing: tuple[int, ...] = ()

    @property
    def numpy(self) -> np.dtype[Any]:
        """The little-endian numpy dtype of one logical element; ``numpy.itemsize == itemsize``.

        numpy has no type for C32, so it is the pair ``[("real", "<f2"), ("imag", "<f2")]``; F4_E2M1_X2 is plain uint8.
        """
        return _numpy(self.name)


@cache
def _numpy(name: str) -> np.dtype[Any]:
    kind = _ARRAY_TYPES[name]
    if _is_of_ml_dtypes(name):
        import ml_dtypes

        kind = getattr(ml_dtypes, kind.removeprefix(_ML))
    found: np.dtype[Any] = np.dtype(kind)
    return found


def _is_of_ml_dtypes(name: str) -> bool:
    kind = _ARRAY_TYPES[name]
    return isinstance(kind, str) and kind.startswith(_ML)


def _itemsize(name: str) -> int:
    if _is_of_ml_dtypes(name):
        return 2 if name == "BF16" else 1
    kind: np.dtype[Any] = np.dtype(_ARRAY_TYPES[name])
    return kind.itemsize


def _table() -> dict[str, DType]:
    other: dict[str, tuple[str, tuple[int, ...]]] = {
        "F8_E8M0": ("U8", ()),
        "F4_E2M1_X2": ("U8", ()),
        "C32": ("F16", (2,)),
        "C64": ("F32", (2,)),
        "C128": ("F64", (2,)),
    }
    return {
        name: DType(name, storage, _itemsize(name), more)
        for name in _ARRAY_TYPES
        for storage, more in [other.get(name, (name, ()))]
    }


_BY_NAME = _table()
DTYPES: Mapping[str, DType] = MappingProxyType(_BY_NAME)
"""Every dtype of the format, by logical name."""


@cache
def _by_numpy(*, all_of_them: bool) -> Mapping[np.dtype[Any], DType]:
    names = [name for name in DTYPES if name != "F4_E2M1_X2"]  # uint8 means U8
    names = [name for name in names if all_of_them or not _is_of_ml_dtypes(name)]
    return {DTYPES[name].numpy: DTYPES[name] for name in names}


def get(name: str) -> DType:
    """Return the dtype of a logical name.

    Raises:
        FormatError: unknown dtype (a newer format, or damage); `name` may be any JSON value.
    """
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):  # a JSON value may not be hashable
        raise FormatError(f"unknown dtype {name!r:.80}") from None


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return our dtype for a numpy dtype of any byte order.

    Raises:
        UnsupportedStateError: objects, strings, dates, long doubles, records, and ml_dtypes' sub-byte types.
    """
    known = _by_numpy(all_of_them="ml_dtypes" in sys.modules)  # without it, no array has one of its types
    found = known.get(dtype)
    if found is None:
        found = known.get(dtype.newbyteorder("<"))
    if found is None:
        if dtype.names:
            remedy = "store each of its fields, {name: x[name] for name in x.dtype.names}"
        else:
            remedy = (
                "store its tolist()" if dtype.hasobject else "store it as another, astype(numpy.float64) for example"
            )
        raise UnsupportedStateError(f"numpy dtype {dtype} cannot be stored: {remedy}")
    return found


def is_integer(dtype: DType) -> bool:
    """Tell whether the values are integers (or booleans), so that their extremes are exact."""
    return dtype.name != "F4_E2M1_X2" and dtype.numpy.kind in "iub"


def storage_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the segment's safetensors header of a tensor of logical `shape`."""
    return (*shape, *dtype.trailing)


def nbytes(dtype: DType, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of logical `shape`; 0-d tensors have one element."""
    return math.prod(shape) * dtype.itemsize
