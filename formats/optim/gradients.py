"""Encode gradients losslessly: dense or sparse, fp32, bf16 or fp16, as they were before scaling (SPEC section 5.5.4).

One *gradient block* encodes the gradient of one block of numbers (256 Ki)::

    dense    the numbers, as the codec ``planes`` with ``rotate`` writes them
    sparse   positions (``residuals.write_positions``), then their values as above; all other numbers are +0

The first byte of the payload gives the form (``FORMS``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats import dtypes
from ckptstore.formats.codecs import Planes, as_bytes, kernels
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.optim.arithmetic import FLOAT, PATTERN, Floats, floats
from ckptstore.formats.optim.residuals import read_positions, write_positions
from ckptstore.formats.optim.step_tiles import Array, patterns_of, widen

KINDS = ("F32", "BF16", "F16")
_PLANES = {word: Planes(word, "rotate") for word in (2, 4)}
_NOTHING = np.empty(0, np.uint8)
_ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2}


ITEMSIZES: Final[Mapping[str, int]] = MappingProxyType({**_ITEMSIZES, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1})
"""Bytes of a number of a gradient in memory, by logical dtype. Those of one byte are stored as bf16, without loss."""
_VIEWS: Final = {"F32": "<u4", "BF16": "<u2", "F16": "<f2"}


def numbers_of_image(dtype: str, image: Bytes) -> Array:
    """The numbers of a gradient whose bytes are in memory, in a form that is stored: fp32, fp16, or patterns.

    Args:
        dtype: one of `ITEMSIZES`.
    """
    if dtype in _VIEWS:
        return image.view(_VIEWS[dtype])
    found: Array = _as_bf16(dtype)[image]
    return found


@lru_cache(maxsize=4)
def _as_bf16(dtype: str) -> npt.NDArray[np.uint16]:
    """The bf16 pattern of each number of one byte."""
    numbers = np.arange(256, dtype=np.uint8).view(dtypes.get(dtype).numpy).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2")


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A gradient of which top-k compression kept some entries and set the others to zero, as the optimizer used it.

    Attributes:
        indices: positions of the entries in the chunk: integers, strictly ascending.
        values: the gradient there: fp32 (or uint32 patterns), fp16, or bf16 (ml_dtypes' or uint16 patterns).
        size: numbers in the chunk.
    """

    indices: npt.NDArray[np.integer[Any]]
    values: Array
    size: int

    def __post_init__(self) -> None:
        kind_of(self.values)
        count = len(self.indices)
        if self.indices.ndim != 1 or self.indices.dtype.kind not in "iu" or self.values.shape != (count,):
            raise ValueError(
                f"a sparse gradient has {self.indices.dtype} indices of shape {self.indices.shape} and values of shape "
                f"{self.values.shape}; pass integers and values of the same length, one-dimensional"
            )
        if count and (int(self.indices[0]) < 0 or int(self.indices[-1]) >= self.size):
            raise ValueError(
                f"a sparse gradient has indices from {self.indices[0]} to {self.indices[-1]}, "
                f"outside a chunk of {self.size}"
            )
        if not bool((self.indices[1:] > self.indices[:-1]).all()):
            raise ValueError("the indices of a sparse gradient must be strictly ascending")

    def part(self, start: int, stop: int) -> SparseGradient:
        """The gradient of the numbers from ``start`` to ``stop``."""
        first, last = np.searchsorted(self.indices, (start, stop))
        indices = self.indices[first:last].astype(np.int64) - start
        return SparseGradient(indices, self.values[first:last], min(stop, self.size) - start)

    def dense(self) -> Floats:
        """The gradient as an fp32 array."""
        out = np.empty(self.size, FLOAT)
        self.expand(out)
        return out

    def expand(self, out: Floats) -> None:
        """Write the dense gradient into ``out``, of ``size`` fp32 numbers."""
        values = np.empty(len(self.values), FLOAT)
        widen(self.values, values)
        patterns_of(out).fill(0)
        patterns_of(out)[self.indices] = patterns_of(values)


Gradient: TypeAlias = "Array | SparseGradient"


@dataclass(frozen=True, slots=True)
class GradientForm:
    """The form of a gradient's blocks: the dtype of the numbers, and whether they are sparse."""

    kind: str
    sparse: bool

    @property
    def word(self) -> int:
        """Bytes of one number."""
        return _ITEMSIZES[self.kind]


FORMS = tuple(GradientForm(kind, sparse) for sparse in (False, True) for kind in KINDS)
"""The forms, by the number that payloads store."""


def kind_of(values: Array) -> str:
    """The dtype of a gradient array: ``F32``, ``BF16`` or ``F16``. Raises ``ValueError`` for others."""
    if values.dtype in (FLOAT, PATTERN):
        return "F32"
    if values.dtype == np.float16:
        return "F16"
    if values.dtype.name in ("bfloat16", "uint16"):
        return "BF16"
    raise ValueError(f"gradients must be fp32, fp16 or bf16, not {values.dtype}")


def form_of(gradient: Gradient) -> GradientForm:
    """The form in which a gradient is stored, without conversion. Raises ``ValueError`` for other dtypes."""
    if isinstance(gradient, SparseGradient):
        return GradientForm(kind_of(gradient.values), True)
    return GradientForm(kind_of(gradient), False)


def write_gradient(gradient: Gradient, start: int, stop: int, out: Bytes, at: int, level: int) -> int:
    """Write the block of numbers from ``start`` to ``stop`` to ``out[at:]``. Returns its end."""
    if isinstance(gradient, SparseGradient):
        part = gradient.part(start, stop)
        at = write_positions(part.indices, out, at, level)
        return _write_values(part.values, out, at, level) if len(part.values) else at
    return _write_values(gradient[start:stop], out, at, level)


def _write_values(values: Array, out: Bytes, at: int, level: int) -> int:
    return _PLANES[values.itemsize].write(as_bytes(values), _NOTHING, out, at, level)


def read_gradient(form: GradientForm, cursor: Cursor, count: int) -> Array:
    """Read one block of ``count`` numbers: fp32, or as it is stored. Raises ``CorruptSegmentError`` if it is invalid.

    The next call overwrites the array.
    """
    if not form.sparse:
        return _read_values(form, cursor, count)
    where = read_positions(cursor, count)
    out = floats("sparse", count)
    patterns_of(out).fill(0)
    if len(where):
        values = np.empty(len(where), FLOAT)
        widen(_read_values(form, cursor, len(where)), values)
        patterns_of(out)[where] = patterns_of(values)
    return out


def _read_values(form: GradientForm, cursor: Cursor, count: int) -> Array:
    values = kernels.scratch("optim stored", count, form.word)
    _PLANES[form.word].read(cursor, _NOTHING, as_bytes(values))
    return values.view(np.float16) if form.kind == "F16" else values
