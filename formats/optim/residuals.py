"""Encode the difference between a block and its prediction, which makes a prediction lossless (SPEC section 5.5.4).

A *residual* is the difference of one block of one tensor to its prediction, as the codec ``sub`` writes it. It takes
one byte if every word was predicted, positions and differences if few words were missed, and narrow words if all are
close. Adding it to the prediction gives the true bits, however good the prediction is.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs import THRIFTY, Planes, Sub, as_bytes, kernels
from ckptstore.formats.codecs.blocks import ZERO_GROUP
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.kernel_choice import hot
from ckptstore.formats.optim.arithmetic import Floats, Patterns
from ckptstore.formats.optim.step_tiles import patterns_of

OVERHEAD = 64
"""Most bytes by which an encoded block may exceed its words, including the space for forms that are given up."""
_FEW = 64  # few words are missed: fewer than one in so many
_HEAD = 2048  # words that are compared first
_DIFFERENCE = Sub(4)
_STEPS = Planes(1)
_NOTHING = np.empty(0, np.uint8)
_counts = struct.Struct("<II")


def write_residual(true: Floats, predicted: Floats, out: Bytes, at: int, level: int) -> int:
    """Write the residual of one block to ``out[at:]``. Returns its end.

    Most residuals are of moments that a replay reproduces exactly. Comparing first takes a tenth of the time of
    encoding zeros. If few words are missed, most of the bytes are positions, and packing those well takes hardly any
    time.
    """
    wanted, found = patterns_of(true), patterns_of(predicted)
    if _FEW * missed(wanted[:_HEAD], found[:_HEAD]) < _HEAD:  # otherwise do not compare the rest
        count = missed(wanted, found)
        if not count:
            out[at] = ZERO_GROUP
            return at + 1
        if _FEW * count < len(true):
            level = max(level, THRIFTY)
    return _DIFFERENCE.write(as_bytes(true), as_bytes(predicted), out, at, level)


@hot()
def missed(true: Patterns, predicted: Patterns) -> int:
    """The number of words that differ."""
    return int(np.count_nonzero(true != predicted))


def read_residual(cursor: Cursor, predicted: Floats, out: Floats) -> None:
    """Add the residual at ``cursor`` to one block. ``out`` may be ``predicted``.

    Raises:
        CorruptSegmentError: the residual is invalid.
    """
    _DIFFERENCE.read(cursor, as_bytes(predicted), as_bytes(out))


def write_positions(where: npt.NDArray[np.integer[Any]], out: Bytes, at: int, level: int) -> int:
    """Write ascending positions to ``out[at:]``. Returns the end.

    The format: u32 number of steps, u32 number of positions, the steps (``kernels.steps``) as the codec ``planes``
    writes bytes.
    """
    steps = kernels.steps_to(where)
    _counts.pack_into(out.data, at, len(steps), len(where))
    return _STEPS.write(steps, _NOTHING, out, at + 8, level)


def read_positions(cursor: Cursor, count: int) -> npt.NDArray[np.intp]:
    """Read positions among ``count`` words, ascending and in range. Raises ``CorruptSegmentError``."""
    step_count, set_count = _counts.unpack(cursor.take(8).data)
    if set_count > count or step_count > set_count + count // 255:
        raise CorruptSegmentError(f"{set_count} positions in {step_count} steps among {count} words")
    steps = np.empty(step_count, np.uint8)
    _STEPS.read(cursor, _NOTHING, steps)
    where = kernels.positions_of_steps(steps)
    if len(where) != set_count or (set_count and int(where[-1]) >= count):
        raise CorruptSegmentError(f"the steps to {set_count} positions among {count} words do not fit")
    return where
