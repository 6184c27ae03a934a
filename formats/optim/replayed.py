"""The encoding ``replayed``: a step's gradient. The decoder repeats the optimizer step (SPEC section 5.5.4).

A payload encodes a chunk: at most 4 Mi numbers. Its first byte is the gradient's form (``gradients.FORMS``), plus 128
if residuals follow. For each block (256 Ki numbers) it has the gradient, and a residual for each of ``rule.slots``. The
residuals correct the numbers that training's kernel rounded differently: none, or 0.1 % of the weights.

``sparse`` is the same with a ``SparseGradient``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs import FAST
from ckptstore.formats.codecs.block_loops import as_bytes
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.kernel_choice import hot, steady
from ckptstore.formats.optim import residuals
from ckptstore.formats.optim.arithmetic import Floats, exactly, floats
from ckptstore.formats.optim.gradients import FORMS, Gradient, GradientForm, form_of, read_gradient, write_gradient
from ckptstore.formats.optim.predicted import blocks_of, chunk_of, finished, space
from ckptstore.formats.optim.predicted import bound as _bound_of_state
from ckptstore.formats.optim.step_settings import Rule, copy_bits
from ckptstore.formats.optim.step_tiles import BLOCK_NUMBERS, Array, slots_of, take_step

_RESIDUALS = 128


def bound(rule: Rule, count: int) -> int:
    """The bytes of space that ``encode`` needs for a chunk of ``count`` numbers."""
    return _bound_of_state(rule, count) + 8 * count + -(-count // BLOCK_NUMBERS) * residuals.OVERHEAD


@steady
def encode(
    rule: Rule,
    old: Sequence[Array],
    new: Sequence[Array] | None,
    gradient: Gradient,
    *,
    out: Bytes | None = None,
    level: int = FAST,
) -> Bytes:
    """Encode the step from ``old`` to ``new`` by its ``gradient``. Returns the payload.

    Args:
        rule: the step's arithmetic. A wrong rule makes the payload larger, but the restored bits are correct.
        old, new: fp32 arrays, one for each of ``rule.slots``, at most ``CHUNK_NUMBERS`` numbers each. If ``new`` is
            None, there are no residuals, and only the size of ``old`` is used: a digest must tell whether the replayed
            state equals the trained one.
        gradient: the gradient before the loss scale was undone and before clipping; dense (fp32, bf16, fp16) or sparse.
        out: memory for the payload, at least ``bound`` bytes. Reusing it avoids page faults.
        level: as in ``codecs.encode``.

    Raises:
        ValueError: the arrays have the wrong sizes or dtypes.
    """
    before = slots_of(rule, old)
    after = None if new is None else slots_of(rule, new)
    count = chunk_of(before, before if after is None else after)
    if gradient.size != count or (isinstance(gradient, np.ndarray) and not _is_flat(gradient)):
        raise ValueError(
            f"the gradient has {gradient.size} numbers; it must be a flat, contiguous array of {count}, as the chunk"
        )
    target = space(out, bound(rule, count))
    target[0] = first_byte(gradient, after is not None)
    at = 1
    with exactly():
        for start in range(0, count, BLOCK_NUMBERS):
            stop = min(start + BLOCK_NUMBERS, count)
            at = write_gradient(gradient, start, stop, target, at, level)
            if after is None:
                continue
            was, becomes = ([part[start:stop] for part in state] for state in (before, after))
            part = gradient[start:stop] if isinstance(gradient, np.ndarray) else gradient.part(start, stop).dense()
            at = write_residuals(rule, was, becomes, part, target, at, level)
    return target[:at]


def first_byte(gradient: Gradient, exceptions: bool) -> int:
    """A payload's first byte: the gradient's form, and whether residuals follow."""
    return FORMS.index(form_of(gradient)) + (_RESIDUALS if exceptions else 0)


def write_residuals(
    rule: Rule, old: list[Floats], new: list[Floats], gradient: Array, out: Bytes, at: int, level: int
) -> int:
    """Write the residuals of a block to ``out[at:]``, after a replay of its gradient. Returns their end."""
    room = out[at : at + len(old) * (old[0].nbytes + residuals.OVERHEAD)]
    return at + len(encoded_residuals(rule, old, new, gradient, level, room))


def decode(rule: Rule, payload: Buffer, state: Sequence[Array]) -> None:
    """Turn the old state into the new one, in place.

    Raises:
        CorruptSegmentError: the payload is not valid for this rule and number of elements. ``state`` is then partly
            changed, and must not be used.
        FormatError: the state has more than ``CHUNK_NUMBERS`` numbers.
        ValueError: the arrays have the wrong sizes or dtypes.
    """
    parts = slots_of(rule, state)
    cursor = Cursor(as_bytes(payload))
    form, exceptions = read_form(cursor)
    with exactly():
        for block in blocks_of(parts):
            read_block(rule, form, exceptions, cursor, block)
    finished(cursor)


def read_form(cursor: Cursor) -> tuple[GradientForm, bool]:
    """Read a payload's first byte: the gradient's form, and whether residuals follow.

    Raises:
        CorruptSegmentError: the form is unknown.
    """
    first = cursor.byte()
    number = first % _RESIDUALS
    if number >= len(FORMS):
        raise CorruptSegmentError(f"unknown form {number} of a gradient")
    return FORMS[number], first >= _RESIDUALS


def read_block(rule: Rule, form: GradientForm, exceptions: bool, cursor: Cursor, state: Sequence[Floats]) -> None:
    """Decode one block in place."""
    finish_block(rule, read_gradient(form, cursor, len(state[0])), exceptions, cursor, state)


def finish_block(rule: Rule, gradient: Array, exceptions: bool, cursor: Cursor, state: Sequence[Floats]) -> None:
    """Replay a block's gradient, and read the residuals, if there are any."""
    take_step(rule, list(state), gradient)
    if exceptions:
        for values in state:
            residuals.read_residual(cursor, values, values)


@hot("ckptstore.formats.optim.compiled_steps", reads=["old", "new", "gradient"], destroys=["out"])
def encoded_residuals(
    rule: Rule, old: list[Floats], new: list[Floats], gradient: Array, level: int, out: Bytes
) -> Bytes:
    """Write the residuals of one block. Returns the part of ``out`` that they take."""
    guess = [floats(f"after{slot}", len(gradient)) for slot in range(len(old))]
    for part, values in zip(old, guess, strict=True):
        copy_bits(part, values)
    take_step.reference(rule, guess, gradient)
    at = 0
    for true, values in zip(new, guess, strict=True):
        at = residuals.write_residual(true, values, out, at, level)
    return out[:at]


def _is_flat(gradient: Array) -> bool:
    return gradient.ndim == 1 and bool(gradient.flags.c_contiguous)
