"""The encoding ``predicted``: a step's new state, stored without its gradient (SPEC sections 5.5.3 and 5.5.4).

The new first moment determines the gradient up to rounding. So, given the old state, it has all the new information. It
is stored as an integer difference to the old one. The second moment is predicted from the inferred gradient; its
residual takes 0.3 bits per number. The weight is predicted from the new moments; all but 0.1 % of weights are exact.

A payload encodes a *chunk* of the parameter: at most 4 Mi numbers of every slot. For each block (256 Ki numbers) it has
one residual (``residuals``) per slot, in the order ``rule.order``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats.codecs import CHUNK, FAST
from ckptstore.formats.codecs.block_loops import as_bytes
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.kernel_choice import hot, steady
from ckptstore.formats.optim import residuals
from ckptstore.formats.optim.arithmetic import Floats, exactly, floats, tiles
from ckptstore.formats.optim.step_settings import Rule, copy_bits
from ckptstore.formats.optim.step_tiles import BLOCK_NUMBERS, Array, slots_of

CHUNK_NUMBERS = CHUNK // 4


def bound(rule: Rule, count: int) -> int:
    """The bytes of space that ``encode`` needs for a chunk of ``count`` numbers."""
    blocks = -(-count // BLOCK_NUMBERS)
    return len(rule.slots) * (4 * count + blocks * residuals.OVERHEAD) + 64


@steady
def encode(
    rule: Rule, old: Sequence[Array], new: Sequence[Array], *, out: Bytes | None = None, level: int = FAST
) -> Bytes:
    """Encode the step from ``old`` to ``new``. Returns the payload.

    Args:
        rule: the step's arithmetic. A wrong rule makes the payload larger, but the restored bits are correct.
        old, new: fp32 arrays, one for each of ``rule.slots``, at most ``CHUNK_NUMBERS`` numbers each.
        out: memory for the payload, at least ``bound`` bytes. Reusing it avoids page faults.
        level: as in ``codecs.encode``.

    Raises:
        ValueError: the arrays have the wrong sizes or dtypes.
    """
    before, after = slots_of(rule, old), slots_of(rule, new)
    count = chunk_of(before, after)
    target = space(out, bound(rule, count))
    at = 0
    with exactly():
        for start in range(0, count, BLOCK_NUMBERS):
            block = slice(start, start + BLOCK_NUMBERS)
            was, becomes = [part[block] for part in before], [part[block] for part in after]
            room = target[at : at + len(was) * (was[0].nbytes + residuals.OVERHEAD)]
            at += len(encoded_block(rule, was, becomes, level, room))
    return target[:at]


@hot("ckptstore.formats.optim.compiled_steps", reads=["old", "new"], destroys=["out"])
def encoded_block(rule: Rule, old: list[Floats], new: list[Floats], level: int, out: Bytes) -> Bytes:
    """Write one block. Returns the part of ``out`` that it takes."""
    return out[: write_slots(rule, rule.order, old, new, out, 0, level)]


def write_slots(
    rule: Rule,
    slots: Sequence[int],
    old: Sequence[Floats],
    new: Sequence[Floats],
    out: Bytes,
    at: int,
    level: int,
) -> int:
    """Write the residuals of some of a block's slots to ``out[at:]``. Returns their end."""
    guess = floats("guess", len(old[0]))
    for slot in slots:
        at = residuals.write_residual(new[slot], _predict(rule, slot, old, new, guess), out, at, level)
    return at


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
    with exactly():
        for block in blocks_of(parts):
            read_block(rule, cursor, block)
    finished(cursor)


def read_block(rule: Rule, cursor: Cursor, state: Sequence[Floats]) -> None:
    """Decode one block: replace the old values in `state` by the new ones."""
    cursor.position = decoded_block(rule, cursor.data, cursor.position, list(state))


@hot("ckptstore.formats.optim.compiled_steps", reads=["data"])
def decoded_block(rule: Rule, data: Bytes, at: int, state: list[Floats]) -> int:
    """Decode the block at ``data[at:]`` in place. Returns the position behind it."""
    cursor, count = Cursor(data), len(state[0])
    cursor.position = at
    after = [floats(f"after{slot}", count) for slot in range(len(state))]
    read_slots(rule, rule.order, cursor, state, after)
    for part, values in zip(state, after, strict=True):
        copy_bits(values, part)
    return cursor.position


def read_slots(rule: Rule, slots: Sequence[int], cursor: Cursor, old: Sequence[Floats], new: Sequence[Floats]) -> None:
    """Read some of a block's slots into ``new``, which has those that come before them."""
    for slot in slots:
        residuals.read_residual(cursor, _predict(rule, slot, old, new, new[slot]), new[slot])


def _predict(rule: Rule, slot: int, old: Sequence[Floats], new: Sequence[Floats], out: Floats) -> Floats:
    """Predict one block of a slot. Returns ``out``, or the old slot itself if `Rule.kept` has the slot."""
    if slot in rule.kept:
        return old[slot]
    for tile in tiles(len(out)):
        rule.predict(slot, [part[tile] for part in old], [part[tile] for part in new], out[tile])
    return out


# -------------------------------------------------------------------------------- shared with the other encodings


def chunk_of(before: Sequence[Floats], after: Sequence[Floats]) -> int:
    """The number of elements of a chunk. Raises ``ValueError`` if the states differ in size or are too large."""
    count = len(before[0])
    if len(after[0]) != count:
        raise ValueError(f"the old state has {count} numbers, the new one {len(after[0])}; they must be equal")
    if count > CHUNK_NUMBERS:
        raise ValueError(f"a chunk has at most {CHUNK_NUMBERS} numbers, not {count}")
    return count


def space(out: Bytes | None, size: int) -> Bytes:
    """Return ``out``, or new memory for a payload. Raises ``ValueError`` if ``out`` is too small."""
    if out is None:
        return np.empty(size, np.uint8)
    if len(out) < size:
        raise ValueError(f"out has {len(out)} bytes, but the payload needs {size}")
    return out


def blocks_of(parts: Sequence[Floats]) -> list[list[Floats]]:
    """Cut a chunk's slots into blocks. Raises ``FormatError`` if the chunk is too large."""
    count = len(parts[0])
    if count > CHUNK_NUMBERS:
        raise FormatError(f"a chunk of {count} numbers; at most {CHUNK_NUMBERS} are allowed")
    starts = range(0, count, BLOCK_NUMBERS)
    return [[part[start : start + BLOCK_NUMBERS] for part in parts] for start in starts]


def finished(cursor: Cursor) -> None:
    """Raise ``CorruptSegmentError`` if bytes follow the last block."""
    if cursor.left:
        raise CorruptSegmentError(f"{cursor.left} bytes follow the last block of an optimizer step's payload")
