"""Encode groups of words as plane pieces: the framing that all plane codecs share (SPEC sections 5.4.1 and 5.4.2).

A chunk of at most ``CHUNK`` logical bytes is encoded as consecutive *blocks* of ``BLOCK`` logical bytes, the last one
shorter. A block fits a core's cache, so a chain of deltas is applied block by block without going back to memory. The
modes of its planes are chosen from a sample of the block, because a tensor differs from place to place.

A *group* is a run of words that are encoded together. Its first byte is its form::

    0, 2, 4, 8  planes: so many low bytes of each word, unencoded, little-endian; then one piece (``plane_coder``)
                for each byte above, lowest first. The word size: all bytes, unencoded.
    16 + b      narrow: words below 2**b (b = 0 or 4 bits) as the piece of their packed bytes (none if b = 0),
                0 for every other word; then the others as exceptions: u32 number of steps, u32 number of exceptions,
                piece of the steps (as in ``plane_coder``), group of the words less 2**b (not itself narrow; no group
                without exceptions)
    255         zero: every word is 0

A group is at most one byte longer than its words. (Other widths of narrow words, and narrow high halves over unencoded
low ones, were tried. They suited under 1 % of the groups of training states and saved less than 0.002 % of the bytes.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.codecs import kernels, plane_coder
from ckptstore.formats.codecs.kernels import ADD, SAMPLE, XOR, Bytes, Words
from ckptstore.formats.codecs.plane_coder import FILL, PACK4, RAW, SPARSE, ZSTD, Cursor
from ckptstore.formats.kernel_choice import hot

CHUNK = 16 << 20
BLOCK = 1 << 20
OVERHEAD = 16
"""Most bytes by which a block's payload may exceed the block: one byte per group, at most 16 groups."""
MARGIN = 32
"""Bytes that an encoder may write past the final end of a payload before it falls back to a smaller form."""
ZERO_GROUP = 255
NARROW = 16
_WIDTHS = (0, 4)
_NARROW_BITS = {FILL: 0, SPARSE: 0, PACK4: 4}
"""Width of narrow words, by the mode that their low bytes would have as a plane. For other modes, use planes."""
_NOTHING = np.empty(0, np.uint8)
_counts = struct.Struct("<II")


def block_count(length: int) -> int:
    """The number of blocks of a chunk of ``length`` logical bytes."""
    return -(-length // BLOCK)


def bound(length: int) -> int:
    """The bytes of space that an encoder needs for a chunk of ``length`` logical bytes."""
    return length + block_count(length) * OVERHEAD + MARGIN


# ----------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """How to encode a group, as a sample suggests.

    Attributes:
        narrow: bits of narrow words; None: use planes.
        wide: number of low bytes that are stored unencoded.
        modes: the mode of every byte's plane.
    """

    narrow: int | None
    wide: int
    modes: tuple[int, ...]


def write_group(words: Words, out: Bytes, at: int, level: int, nested: bool = False) -> int:
    """Write the group of ``words`` to ``out[at:]``. Returns its end, at most ``at + 1 + words.nbytes``."""
    if level > plane_coder.THRIFTY:
        return _write_group(words, out, at, level, nested)
    return at + len(encoded_group(words, level, nested, out[at : at + words.nbytes + MARGIN]))


@hot("ckptstore.formats.codecs.compiled_forms", reads=["words"], destroys=["out"])
def encoded_group(words: Words, level: int, nested: bool, out: Bytes) -> Bytes:
    """Write a group with a level up to ``THRIFTY``. Returns the part of ``out`` that it takes."""
    return out[: _write_group(words, out, 0, level, nested)]


def _write_group(words: Words, out: Bytes, at: int, level: int, nested: bool) -> int:
    word, count = words.itemsize, len(words)
    plan = _plan(words, level, nested)
    end = None
    if plan.narrow is not None:
        if plan.narrow == 0 and not words.any():
            out[at] = ZERO_GROUP
            return at + 1
        end = _write_narrow(words, out, at, plan.narrow, level)
        if end is None:
            plan = _plan(words, level, True)
    if end is None and plan.wide < word:
        end = _write_planes(words, out, at, plan, level)
    if end is not None and end - at <= 1 + count * word:
        return end
    out[at] = word
    out[at + 1 : at + 1 + count * word] = words.view(np.uint8)
    return at + 1 + count * word


def _plan(words: Words, level: int, nested: bool) -> _GroupPlan:
    """Choose the form of a group from a sample: eight runs, spread evenly over its words.

    The form is narrow if at most 5 % of the sampled words exceed a byte and the low bytes suit one of its widths.
    Otherwise it has planes. The low bytes whose planes would not compress then stay unencoded: 0, 2, 4 or all bytes.

    Args:
        nested: the group is that of the exceptions of a narrow group, so it is not narrow itself.
    """
    word, count = words.itemsize, len(words)
    if level > plane_coder.THRIFTY:
        return _GroupPlan(None, 0, (ZSTD,) * word)
    if count < plane_coder.SMALL:  # such small planes are only encoded as FILL or RAW
        return _GroupPlan(None if words.any() else 0, 0, (ZSTD,) * word)
    size = min(SAMPLE, max(SAMPLE // 4, count // 16))
    sampled = words
    if count > size:
        run, stride = size // 8, count // 8
        sampled = words[: stride * 8].reshape(8, stride)[:, :run].reshape(-1)
    planes = [kernels.scratch(f"sample{byte}", len(sampled)) for byte in range(word)]
    kernels.split(sampled, list(planes))
    if word > 1 and not nested and 20 * np.count_nonzero(sampled >> 8) <= len(sampled):
        mode = plane_coder.choose_mode(np.minimum(sampled, 255).astype(np.uint8), level)
        if mode in _NARROW_BITS:
            return _GroupPlan(_NARROW_BITS[mode], 0, ())
    modes = tuple(plane_coder.choose_mode(plane, level) for plane in planes)
    uncoded = next((byte for byte, mode in enumerate(modes) if mode != RAW), word)
    return _GroupPlan(None, uncoded if uncoded in (word, 4) else min(uncoded, 2) // 2 * 2, modes)


def _write_planes(words: Words, out: Bytes, at: int, plan: _GroupPlan, level: int) -> int:
    word, count, wide = words.itemsize, len(words), plan.wide
    out[at] = wide
    at += 1
    planes: list[Words] = [out[at : at + count * wide].view(kernels.WORDS[wide])] if wide else []
    planes += [kernels.scratch(f"plane{byte}", count) for byte in range(wide, word)]
    kernels.split(words, planes)
    at += count * wide
    for plane, mode in zip(planes[1 if wide else 0 :], plan.modes[wide:], strict=True):
        at = plane_coder.encode(plane, out, at, mode, level)
    return at


def _write_narrow(words: Words, out: Bytes, at: int, bits: int, level: int) -> int | None:
    """Write the narrow form. Returns its end, or None if it might not be smaller than the words."""
    count = len(words)
    rest = kernels.scratch("plane0", count) if bits else _NOTHING
    steps, greater = kernels.take_exceptions(words, 1 << bits, rest)
    if 16 + -(-count * bits // 8) + len(steps) + greater.nbytes > words.nbytes:
        return None
    out[at] = NARROW + bits
    at += 1
    if bits:
        at = plane_coder.encode(kernels.pack_small(rest, bits), out, at, None, level, depth=1)
    _counts.pack_into(out.data, at, len(steps), len(greater))
    mode = RAW if level == plane_coder.FAST and len(steps) < plane_coder.SAMPLED else ZSTD
    at = plane_coder.encode(steps, out, at + 8, mode, level, depth=1)
    return _write_group(greater, out, at, level, nested=True) if len(greater) else at


# ----------------------------------------------------------------------------------------------------- decoding


def read_group(cursor: Cursor, word: int, how: int, base: Words, out: Words) -> None:
    """Decode the group at ``cursor``, of ``len(out)`` words, into ``out``; ``how`` is as in ``kernels.combine``.

    ``out`` may be ``base``.

    Raises:
        CorruptSegmentError: the group is invalid. ``out`` is unchanged.
    """
    if type(cursor) is Cursor and cursor.left and len(out):
        cursor.position = decoded_group(cursor.data, cursor.position, how, base, out)
    else:
        _read_group(cursor, word, how, base, out)


# `base` is not compared: `out` may overlap it, and a copy of `base` would not change with `out`.
@hot("ckptstore.formats.codecs.compiled_forms", reads=["data"], destroys=["base"])
def decoded_group(data: Bytes, at: int, how: int, base: Words, out: Words) -> int:
    """Decode the group at ``data[at:]``; see :func:`read_group`. Returns the position behind it."""
    cursor = Cursor(data)
    cursor.position = at
    _read_group(cursor, out.itemsize, how, base, out)
    return cursor.position


def _read_group(cursor: Cursor, word: int, how: int, base: Words, out: Words) -> None:
    form = cursor.byte()
    if form == ZERO_GROUP:
        if how not in (ADD, XOR):
            out.fill(0)
        elif not np.may_share_memory(base, out):
            np.copyto(out, base)
        return
    kernels.combine(_read_planes(cursor, len(out), word, form), how, base, out)


def _read_planes(cursor: Cursor, count: int, word: int, form: int) -> list[Words]:
    """Read the planes of a group, lowest first. The narrow form gives one plane of whole words."""
    if word > 1 and form - NARROW in _WIDTHS:
        return [_read_narrow(cursor, count, word, form - NARROW)]
    if form > word or form not in (0, 2, 4, word):
        raise CorruptSegmentError(f"a group of {word}-byte words has unknown form {form}")
    planes: list[Words] = [cursor.take(count * form).view(kernels.WORDS[form])] if form else []
    return planes + [plane_coder.decode(cursor, count, f"plane{byte}") for byte in range(form, word)]


def _read_narrow(cursor: Cursor, count: int, word: int, bits: int) -> Words:
    """Read the body of the narrow form."""
    small = kernels.scratch("narrow", count)
    if bits:
        kernels.unpack_small(plane_coder.decode(cursor, -(-count * bits // 8), "packed", 1), bits, small)
    else:
        small.fill(0)
    steps, found = plane_coder.decode_steps(cursor, count, "top", 1)
    if found and cursor.left and cursor.data[cursor.position] in range(NARROW, ZERO_GROUP):
        raise CorruptSegmentError("narrow groups do not nest")
    greater = np.zeros(found, kernels.WORDS[word])
    if found:
        _read_group(cursor, word, kernels.PUT, greater, greater)
    words = kernels.scratch("narrow words", count, word)
    np.copyto(words, small)
    if not kernels.put_exceptions(steps, greater, 1 << bits, words):
        raise CorruptSegmentError(f"the steps to {found} exceptions among {count} words do not fit")
    return words
