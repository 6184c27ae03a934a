"""Gradients as bytes: dense or sparse, fp32, bf16 or fp16, as training held them before scaling.

One *gradient block* codes the gradient of one block of numbers (256 Ki)::

    dense    the numbers, as the codec ``planes`` with ``rotate`` writes them
    sparse   positions (``residuals.write_positions``), then the values there in the same way; other numbers are +0

Which of the forms it is, the payload's first byte says (``FORMS``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats.codecs import Planes, as_bytes, kernels
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.optim.arithmetic import FLOAT, PATTERN, Floats
from ckptstore.formats.optim.residuals import read_positions, write_positions
from ckptstore.formats.optim.step_tiles import Array, patterns_of, widen

KINDS = ("F32", "BF16", "F16")
_PLANES = {word: Planes(word, "rotate") for word in (2, 4)}
_NOTHING = np.empty(0, np.uint8)
_ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A gradient that is zero but for the entries that top-k compression kept, as the optimizer applied it.

    Attributes:
        indices: where, within the chunk: integers, ascending, none twice.
        values: the gradient there: fp32 (or uint32 patterns), fp16, or bf16 (ml_dtypes' or uint16 patterns).
        size: numbers of the chunk.
    """

    indices: npt.NDArray[np.integer[Any]]
    values: Array
    size: int

    def __post_init__(self) -> None:
        kind_of(self.values)
        count = len(self.indices)
        if self.indices.ndim != 1 or self.indices.dtype.kind not in "iu" or self.values.shape != (count,):
            raise ValueError(f"{self.indices.shape} indices of {self.indices.dtype}, {self.values.shape} values")
        if count and (int(self.indices[0]) < 0 or int(self.indices[-1]) >= self.size):
            raise ValueError(f"indices from {self.indices[0]} to {self.indices[-1]} in a chunk of {self.size}")
        if not bool((self.indices[1:] > self.indices[:-1]).all()):
            raise ValueError("the indices of a sparse gradient ascend, and none occurs twice")

    def part(self, start: int, stop: int) -> SparseGradient:
        """The gradient of numbers ``start`` to ``stop`` alone."""
        first, last = np.searchsorted(self.indices, (start, stop))
        indices = self.indices[first:last].astype(np.int64) - start
        return SparseGradient(indices, self.values[first:last], min(stop, self.size) - start)

    def dense(self) -> Floats:
        """The gradient as an fp32 array."""
        out = np.empty(self.size, FLOAT)
        self.expand(out)
        return out

    def expand(self, out: Floats) -> None:
        """Make ``out``, of ``size`` fp32 numbers, the gradient."""
        values = np.empty(len(self.values), FLOAT)
        widen(self.values, values)
        patterns_of(out).fill(0)
        patterns_of(out)[self.indices] = patterns_of(values)


Gradient: TypeAlias = "Array | SparseGradient"


@dataclass(frozen=True, slots=True)
class Form:
    """What a gradient's blocks hold: numbers of which kind, and whether of all positions."""

    kind: str
    sparse: bool

    @property
    def word(self) -> int:
        """Bytes of one number."""
        return _ITEMSIZES[self.kind]


FORMS = tuple(Form(kind, sparse) for sparse in (False, True) for kind in KINDS)
"""The forms, by number."""


def kind_of(values: Array) -> str:
    """``F32``, ``BF16`` or ``F16``: what kind of gradient an array holds. Raises ``ValueError``."""
    if values.dtype in (FLOAT, PATTERN):
        return "F32"
    if values.dtype == np.float16:
        return "F16"
    if values.dtype.name in ("bfloat16", "uint16"):
        return "BF16"
    raise ValueError(f"gradients are fp32, fp16 or bf16, not {values.dtype}")


def form_of(gradient: Gradient) -> Form:
    """The form in which a gradient is stored: as it is. Raises ``ValueError``."""
    if isinstance(gradient, SparseGradient):
        return Form(kind_of(gradient.values), True)
    return Form(kind_of(gradient), False)


def write_gradient(gradient: Gradient, start: int, stop: int, out: Bytes, at: int, level: int) -> int:
    """Write the block of numbers ``start`` to ``stop`` to ``out[at:]``; returns its end."""
    if isinstance(gradient, SparseGradient):
        part = gradient.part(start, stop)
        at = write_positions(part.indices, out, at, level)
        return _write_values(part.values, out, at, level) if len(part.values) else at
    return _write_values(gradient[start:stop], out, at, level)


def _write_values(values: Array, out: Bytes, at: int, level: int) -> int:
    return _PLANES[values.itemsize].write(as_bytes(values), _NOTHING, out, at, level)


def read_gradient(form: Form, cursor: Cursor, out: Floats) -> None:
    """Read one block as fp32. Raises ``CorruptSegmentError`` where it is not well-formed."""
    if not form.sparse:
        _read_values(form, cursor, out)
        return
    where = read_positions(cursor, len(out))
    values = np.empty(len(where), FLOAT)
    if len(where):
        _read_values(form, cursor, values)
    patterns_of(out).fill(0)
    patterns_of(out)[where] = patterns_of(values)


def _read_values(form: Form, cursor: Cursor, out: Floats) -> None:
    if form.word == 4:
        _PLANES[4].read(cursor, _NOTHING, as_bytes(out))
        return
    values = kernels.scratch("optim halves", len(out), 2)
    _PLANES[2].read(cursor, _NOTHING, as_bytes(values))
    widen(values.view(np.float16) if form.kind == "F16" else values, out)
