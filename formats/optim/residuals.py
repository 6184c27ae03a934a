"""What a prediction missed: the words that make it right, in as few bytes as there is to say.

A *residual* is the difference of one block of one tensor to its prediction, as the codec ``sub`` writes it: one byte
where every word was predicted, positions and differences where few were missed, narrow words where all are close.
Whatever was predicted, adding it gives the true bits.
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
"""The most bytes by which a block of anything may exceed its words, space for unfinished forms included."""
_FEW = 64  # one in so many
_HEAD = 2048
_DIFFERENCE = Sub(4)
_STEPS = Planes(1)
_NOTHING = np.empty(0, np.uint8)
_counts = struct.Struct("<II")


def write_residual(true: Floats, predicted: Floats, out: Bytes, at: int, level: int) -> int:
    """Write the residual of one block to ``out[at:]``; returns its end.

    Most are of moments that a replay makes exactly: looking first takes a tenth of the time of coding nothing. Where
    few are missed, most of the bytes say where, and to pack those well costs next to nothing.
    """
    wanted, found = patterns_of(true), patterns_of(predicted)
    if _FEW * missed(wanted[:_HEAD], found[:_HEAD]) < _HEAD:  # else the whole is not worth a look
        count = missed(wanted, found)
        if not count:
            out[at] = ZERO_GROUP
            return at + 1
        if _FEW * count < len(true):
            level = max(level, THRIFTY)
    return _DIFFERENCE.write(as_bytes(true), as_bytes(predicted), out, at, level)


@hot("ckptstore.formats.optim.compiled_steps")
def missed(true: Patterns, predicted: Patterns) -> int:
    """How many words differ."""
    return int(np.count_nonzero(true != predicted))


def read_residual(cursor: Cursor, predicted: Floats, out: Floats) -> None:
    """Add the residual at ``cursor`` to one block; ``out`` may be ``predicted``.

    Raises ``CorruptSegmentError`` where it is not well-formed.
    """
    _DIFFERENCE.read(cursor, as_bytes(predicted), as_bytes(out))


def write_positions(where: npt.NDArray[np.integer[Any]], out: Bytes, at: int, level: int) -> int:
    """Write positions, which ascend, to ``out[at:]``; returns the end.

    u32 number of steps, u32 number of positions, the steps (``kernels.steps``) as the codec ``planes`` writes bytes.
    """
    steps = kernels.steps_to(where)
    _counts.pack_into(out.data, at, len(steps), len(where))
    return _STEPS.write(steps, _NOTHING, out, at + 8, level)


def read_positions(cursor: Cursor, count: int) -> npt.NDArray[np.intp]:
    """Positions among ``count`` words: ascending, and in range. Raises ``CorruptSegmentError``."""
    step_count, set_count = _counts.unpack(cursor.take(8).data)
    if set_count > count or step_count > set_count + count // 255:
        raise CorruptSegmentError(f"{set_count} positions in {step_count} steps among {count} words")
    steps = np.empty(step_count, np.uint8)
    _STEPS.read(cursor, _NOTHING, steps)
    where = kernels.positions_of_steps(steps)
    if len(where) != set_count or (set_count and int(where[-1]) >= count):
        raise CorruptSegmentError(f"the steps to {set_count} positions among {count} words do not fit")
    return where
