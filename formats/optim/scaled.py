"""The encodings ``predicted/2`` and ``replayed/2``: those without ``/2``, with scales of runs (SPEC section 5.5.4).

They exist for Adam only. What differs is how a block's new information is stored. Under ``predicted/2`` it is the
change of the first moment to what a zero gradient leaves of it, sorted by its expected size; under ``replayed/2`` the
gradient, as a difference to its expected size (`scales`). They take 2 to 4 % fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats.codecs import FAST, Planes, as_bytes, kernels
from ckptstore.formats.codecs.blocks import OVERHEAD, read_group, write_group
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.kernels import PUT, Bytes
from ckptstore.formats.codecs.plane_coder import Cursor
from ckptstore.formats.codecs.xor_sub import runs_of
from ckptstore.formats.kernel_choice import steady
from ckptstore.formats.optim import predicted, replayed, residuals, scales
from ckptstore.formats.optim.adam import AdamRule
from ckptstore.formats.optim.arithmetic import Floats, exactly, floats, single
from ckptstore.formats.optim.gradients import GradientForm, kind_of
from ckptstore.formats.optim.step_settings import Rule, copy_bits
from ckptstore.formats.optim.step_tiles import BLOCK_NUMBERS, Array, patterns_of, slots_of, widen

_SCALES = Planes(1)
_NOTHING = np.empty(0, np.uint8)
_FIRST, _SECOND = 1, 2


def bound(rule: Rule, count: int) -> int:
    """The bytes of space that ``encode`` needs for a chunk of ``count`` numbers."""
    blocks = -(-count // BLOCK_NUMBERS)
    return replayed.bound(rule, count) + -(-count // scales.RUN) + blocks * (2 * OVERHEAD + residuals.OVERHEAD)


def suits(rule: Rule, gradient: object) -> bool:
    """Whether a step has one of these encodings: Adam's, with a dense gradient in fp32 or bf16, or with none."""
    if not isinstance(rule, AdamRule):
        return False
    return gradient is None or (isinstance(gradient, np.ndarray) and kind_of(gradient) != "F16")


@steady
def encode(
    rule: Rule,
    old: Sequence[Array],
    new: Sequence[Array] | None,
    gradient: Array | None,
    *,
    out: Bytes | None = None,
    level: int = FAST,
) -> Bytes:
    """Encode a step: as ``predicted/2`` if ``gradient`` is None, else as ``replayed/2``. Returns the payload.

    The arguments are those of ``predicted.encode`` and ``replayed.encode``.

    Raises:
        ValueError: the arrays have the wrong sizes or dtypes, or the step has no such encoding (``suits``).
    """
    if not suits(rule, gradient) or (gradient is None and new is None):
        raise ValueError(f"this step has no encoding with scales: {rule.params['rule']}")
    adam, before = cast(AdamRule, rule), slots_of(rule, old)
    after = None if new is None else slots_of(rule, new)
    count = predicted.chunk_of(before, before if after is None else after)
    if gradient is not None and (gradient.shape != (count,) or not gradient.flags.c_contiguous):
        raise ValueError(f"the gradient must be a flat, contiguous array of {count} numbers, as the chunk")
    target, at = predicted.space(out, bound(rule, count)), 0
    if gradient is not None:
        target[0], at = replayed.first_byte(gradient, after is not None), 1
    with exactly():
        for start in range(0, count, BLOCK_NUMBERS):
            block = slice(start, min(start + BLOCK_NUMBERS, count))
            was = [part[block] for part in before]
            becomes = [part[block] for part in after or ()]
            if gradient is None:
                at = _write_change(adam, was, becomes[_FIRST], target, at, level)
                at = predicted.write_slots(rule, rule.order[1:], was, becomes, target, at, level)
            else:
                at = _write_gradient(gradient[block], was[_SECOND], target, at, level)
                if after is not None:
                    at = replayed.write_residuals(rule, was, becomes, gradient[block], target, at, level)
    return target[:at]


def decode(rule: Rule, payload: Buffer, state: Sequence[Array], *, replay: bool) -> None:
    """Turn the old state into the new one, in place. ``replay``: the encoding is ``replayed/2``.

    Raises:
        CorruptSegmentError: the payload is not valid for this rule and number of elements. ``state`` is then partly
            changed, and must not be used.
        FormatError: the state has more than ``CHUNK_NUMBERS`` numbers, or the rule is not Adam's.
        ValueError: the arrays have the wrong sizes or dtypes.
    """
    parts, cursor = slots_of(rule, state), Cursor(as_bytes(payload))
    check(rule)
    form, exceptions = read_form(cursor) if replay else (None, False)
    with exactly():
        for block in predicted.blocks_of(parts):
            read_block(rule, form, exceptions, cursor, block)
    predicted.finished(cursor)


def check(rule: Rule) -> None:
    """Raise ``FormatError`` if the rule has no such encodings."""
    if not isinstance(rule, AdamRule):
        raise FormatError(f"encodings with scales are Adam's, not those of {rule.params['rule']}")


def read_form(cursor: Cursor) -> tuple[GradientForm, bool]:
    """See ``replayed.read_form``. Also refuses forms that ``replayed/2`` does not have."""
    form, exceptions = replayed.read_form(cursor)
    if form.sparse or form.kind == "F16":
        raise CorruptSegmentError(f"a gradient of {form.kind} (sparse: {form.sparse}) has no scales")
    return form, exceptions


def read_block(
    rule: Rule, form: GradientForm | None, exceptions: bool, cursor: Cursor, state: Sequence[Floats]
) -> None:
    """Decode one block in place. ``form`` is None for ``predicted/2``."""
    if form is not None:
        gradient = floats("guess", len(state[0]))
        _read_gradient(form, cursor, state[_SECOND], gradient)
        replayed.finish_block(rule, gradient, exceptions, cursor, state)
        return
    after = [floats(f"after{slot}", len(state[0])) for slot in range(len(state))]
    _read_change(cast(AdamRule, rule), cursor, state, after[_FIRST])
    predicted.read_slots(rule, rule.order[1:], cursor, state, after)
    for part, values in zip(state, after, strict=True):
        copy_bits(values, part)


# ------------------------------------------------------------------------------------------- the first moment


def _kept(rule: AdamRule, first: Floats) -> Floats:
    """What a zero gradient leaves of the first moment: scratch memory."""
    out = floats("kept", len(first))
    scales.scaled(first, single(1.0 - rule.weight1), out)
    return out


def _write_change(rule: AdamRule, old: Sequence[Floats], new: Floats, out: Bytes, at: int, level: int) -> int:
    count, base = len(new), _kept(rule, old[_FIRST])
    found = scales.scales_of(scales.change(new, base), old[_SECOND])
    at = _SCALES.write(found, _NOTHING, out, at, level)
    labels = kernels.scratch("labels", count)
    counts = scales.classes(patterns_of(base), old[_SECOND], found, labels)
    words, gathered = kernels.scratch("mapped", count, 4), kernels.scratch("sorted", count, 4)
    scales.changes(patterns_of(new), patterns_of(base), words)
    kernels.sort(words, labels, counts, gathered)
    for start, stop in runs_of(counts):
        at = write_group(gathered[start:stop], out, at, level)
    return at


def _read_change(rule: AdamRule, cursor: Cursor, old: Sequence[Floats], out: Floats) -> None:
    count, base = len(out), _kept(rule, old[_FIRST])
    found = _read_scales(cursor, count)
    labels = kernels.scratch("labels", count)
    counts = scales.classes(patterns_of(base), old[_SECOND], found, labels)
    gathered = kernels.scratch("sorted", count, 4)
    for start, stop in runs_of(counts):
        read_group(cursor, 4, PUT, gathered, gathered[start:stop])
    scales.unsorted_changes(gathered, labels, counts, patterns_of(base), patterns_of(out))


def _read_scales(cursor: Cursor, count: int) -> Bytes:
    found = kernels.scratch("scales", -(-count // scales.RUN))
    _SCALES.read(cursor, _NOTHING, found)
    return found


# ------------------------------------------------------------------------------------------------- the gradient


def _write_gradient(values: Array, second: Floats, out: Bytes, at: int, level: int) -> int:
    wide = floats("change", len(values))
    widen(values, wide)
    found = scales.scales_of(wide, second)
    at = _SCALES.write(found, _NOTHING, out, at, level)
    words = kernels.scratch("mapped", len(values), values.itemsize)
    scales.away(values.view(kernels.WORDS[values.itemsize]), second, found, words)
    return write_group(words, out, at, level)


def _read_gradient(form: GradientForm, cursor: Cursor, second: Floats, out: Floats) -> None:
    found = _read_scales(cursor, len(out))
    words: Any = patterns_of(out) if form.word == 4 else kernels.scratch("optim halves", len(out), 2)
    read_group(cursor, form.word, PUT, words, words)
    scales.back(words, second, found, words)
    if form.word == 2:
        widen(words, out)
