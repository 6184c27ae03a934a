"""Converts stored bytes to numbers for statistics and differences. Restoring never uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.formats.dtypes import DType

__all__ = ["BLOCK_VALUES", "blocks", "doubles", "scalars"]

BLOCK_VALUES: Final = 1 << 18
"""Elements processed together: their doubles (2 MiB) fit into a core's cache."""

_REALS = {"C32": "<f2", "C64": "<f4", "C128": "<f8"}
# E2M1: one sign, two exponent and one mantissa bit. The low half of a byte is the first of its two values.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def blocks(dtype: DType, data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """Split a tensor's bytes into parts of at most `BLOCK_VALUES` whole elements."""
    length = BLOCK_VALUES * dtype.itemsize
    for start in range(0, len(data), length):
        yield data[start : start + length]


def scalars(dtype: DType, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the numbers in `data` (1-D, whole elements) as an array that numpy computes with.

    A complex number counts as two, its real and its imaginary part, and so does a byte of ``F4_E2M1_X2``. Booleans are
    0 and 1 (any other byte counts as 1).
    """
    if dtype.name in _REALS:
        return data.view(_REALS[dtype.name])
    if dtype.name == "F4_E2M1_X2":
        return np.asarray(_E2M1[np.stack([data & 15, data >> 4], axis=1)].reshape(-1))
    if dtype.name == "BOOL":
        return np.asarray(data != 0).view(np.uint8)
    return data.view(dtype.numpy)


def doubles(dtype: DType, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return `scalars` as float64: exact for all dtypes except 64-bit integers beyond 2^53."""
    with np.errstate(invalid="ignore"):  # here a signalling NaN is a NaN like any other
        return scalars(dtype, data).astype(np.float64)
