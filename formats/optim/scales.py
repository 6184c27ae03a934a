"""Scales of runs: how large the numbers of a step are, beside the root of the second moment (SPEC section 5.5.5).

Under Adam, the second moment tells about how large a number's gradient is; how large this step's are, differs from row
to row. So a byte for each run of ``RUN`` numbers has the scale of their magnitudes beside the roots of their old second
moments, in quarters of an octave. Second moment and scale give the *expected* pattern of a magnitude: half of the
second moment's pattern is about the logarithm of its root, and the scale is added. All of this is integer arithmetic.

Gradients are stored as differences from their expected patterns (``away``, ``back``). Changes of the first moment are
sorted by the logarithm of the expected change in units of the moment's last place (``classes``, ``changes``).
"""

from __future__ import annotations

import numpy as np

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import Bytes, Counts, Words
from ckptstore.formats.kernel_choice import hot
from ckptstore.formats.optim.arithmetic import Floats, Patterns, floats, settle

RUN = 256
"""Numbers that share a scale."""
CLASSES = 16
COMPILED = "ckptstore.formats.optim.compiled_steps"
_LEAST = 126  # what the byte 0 stands for, in quarters of an octave
_FIRST = 246  # class 0: the expected change is 2**-10 of the moment
_MAGNITUDE = 0x7FFFFFFF
_LOW = 0xFFFFFF
_INFINITY = 0x7F800000
_OCTAVE = 1 << 23
_QUARTER = 21
_CENTRES = (-(1 << 30), 3 << 29)
_SAMPLED = 64  # every so manieth number is sampled for the centre


def scales_of(values: Floats, second: Floats) -> Bytes:
    """The scales of ``values`` beside the old second moments ``second``: scratch memory, a byte for each run.

    A scale is the mean of the ratios of magnitude and root. To add them as integers, whatever their size, they are
    divided by their median.
    """
    few = values.view("<u4")[::_SAMPLED], second.view("<u4")[::_SAMPLED]
    ratios = np.sort(_ratios(*few))
    centre = int(np.clip(ratios[len(ratios) // 2], *_CENTRES)) if len(ratios) else 0
    out = kernels.scratch("scales", -(-len(values) // RUN))
    mean_scales(values, second, centre, out)
    return out


def _ratios(values: Words, second: Words) -> Counts:
    """Logarithms of the ratios of magnitudes and roots, in 2**-23 octaves."""
    magnitudes = np.minimum(values & _MAGNITUDE, _INFINITY).astype(np.int64)
    ratios: Counts = magnitudes - ((second & _MAGNITUDE) >> 1).astype(np.int64)
    return ratios


@hot()
def mean_scales(values: Floats, second: Floats, centre: int, out: Bytes) -> None:
    """Compute the scale of each run. ``centre`` is the logarithm of a usual ratio, in 2**-23 octaves."""
    count = len(values)
    for start in range(0, count, kernels.TILE):
        part = slice(start, min(start + kernels.TILE, count))
        ratios = _ratios(values[part].view("<u4"), second[part].view("<u4"))
        np.clip(ratios, centre - 127 * _OCTAVE, centre + 6 * _OCTAVE, out=ratios)
        ratios -= centre - 127 * _OCTAVE
        shares = (ratios.astype("<u4").view("<f4") * np.float32(65536)).astype(np.int64)
        sums = np.add.reduceat(shares, np.arange(0, len(shares), RUN))
        if len(shares) % RUN:
            sums[-1] = sums[-1] * RUN // (len(shares) % RUN)
        logarithms = sums.astype("<f4").view("<u4").astype(np.int64) - (127 + 24) * _OCTAVE + centre
        quarters = (logarithms + (1 << (_QUARTER - 1))) >> _QUARTER
        np.copyto(out[start // RUN : -(-part.stop // RUN)], np.clip(quarters - _LEAST, 0, 255), casting="unsafe")


def _expected(second: Floats, scales: Bytes, part: slice) -> Patterns:
    """The expected patterns of a tile: scratch memory."""
    count = part.stop - part.start
    found = kernels.scratch("expected", count, 4)
    np.bitwise_and(second[part].view("<u4"), _MAGNITUDE, out=found)
    np.right_shift(found, 1, out=found)
    own = scales[part.start // RUN : -(-part.stop // RUN)].astype("<u4")
    found += np.repeat((own + np.uint32(_LEAST)) << np.uint32(_QUARTER), RUN)[:count]
    patterns: Patterns = found
    return patterns


def _tiles(count: int) -> list[slice]:
    return [slice(start, min(start + (1 << 15), count)) for start in range(0, count, 1 << 15)]


@hot()
def away(values: Words, second: Floats, scales: Bytes, out: Words) -> None:
    """``out``: the differences of magnitudes from their expected patterns, rotated left by one bit, with the sign last.

    ``values`` are fp32 or bf16 patterns. A magnitude of 0 becomes 0, and the expected one what 0 would have become:
    zeros are frequent, whatever is expected.
    """
    kind, bits = values.dtype.type, 8 * values.itemsize
    for part in _tiles(len(values)):
        expected = (_expected(second, scales, part) >> np.uint32(32 - bits)).astype(values.dtype)
        magnitudes = values[part] & kind((1 << (bits - 1)) - 1)
        differences = magnitudes - expected
        np.copyto(differences, 0, where=magnitudes == 0)
        np.copyto(differences, -expected, where=magnitudes == expected)
        out[part] = differences << kind(1) | values[part] >> kind(bits - 1)


@hot()
def back(words: Words, second: Floats, scales: Bytes, out: Words) -> None:
    """Undo :func:`away`. ``out`` may be ``words``."""
    kind, bits = words.dtype.type, 8 * words.itemsize
    mask = kind((1 << (bits - 1)) - 1)
    for part in _tiles(len(words)):
        expected = (_expected(second, scales, part) >> np.uint32(32 - bits)).astype(words.dtype)
        differences, signs = words[part] >> kind(1), words[part] << kind(bits - 1)
        magnitudes = (differences + expected) & mask
        unchanged = magnitudes == 0
        np.copyto(magnitudes, 0, where=differences == 0)
        np.copyto(magnitudes, expected, where=unchanged)
        out[part] = magnitudes | signs


@hot(COMPILED)
def classes(base: Words, second: Floats, scales: Bytes, out: Bytes) -> Counts:
    """``out``: the class of every number. Returns the counts in each quarter, as ``kernels.classify`` does."""
    for part in _tiles(len(base)):
        octaves = _expected(second, scales, part)
        octaves -= base[part] & np.uint32(_MAGNITUDE)
        octaves += np.uint32(1 << 31)
        np.right_shift(octaves, 23, out=octaves)
        np.clip(octaves, _FIRST, _FIRST + CLASSES - 1, out=octaves)
        octaves -= np.uint32(_FIRST)
        np.copyto(out[part], octaves, casting="unsafe")
    quarter = len(base) // 4
    parts = [out[:quarter], out[quarter : 2 * quarter], out[2 * quarter : 3 * quarter], out[3 * quarter :]]
    return np.array([np.bincount(part, minlength=CLASSES) for part in parts], np.int64)


@hot()
def changes(new: Words, base: Words, out: Words) -> None:
    """``out``: how fp32 patterns differ from others.

    The low 24 and high 6 bits are the difference of the magnitudes modulo 2**31, complemented if it is negative. Bit 24
    says whether it is, bit 25 whether the sign differs. So the highest byte is a small number if the difference is.
    """
    for part in _tiles(len(new)):
        difference = ((new[part] - base[part]) << np.uint32(1)).view("<i4")
        negative = (difference >> np.int32(31)).view("<u4")
        low = (difference.view("<u4") >> np.uint32(1)) ^ negative
        flags = (negative & np.uint32(1)) | ((new[part] ^ base[part]) >> np.uint32(31)) << np.uint32(1)
        out[part] = (low & np.uint32(_LOW)) | (flags << np.uint32(24)) | ((low & np.uint32(0x3F000000)) << np.uint32(2))


@hot()
def unsorted_changes(words: Words, labels: Bytes, counts: Counts, base: Words, out: Words) -> None:
    """Undo ``kernels.sort`` and :func:`changes`. ``labels`` and ``counts`` are from :func:`classes`."""
    for part, order, places in kernels.places_of(labels, counts, words.itemsize):
        unsorted = kernels.scratch("unsorted", len(order), words.itemsize)
        unsorted[order] = np.concatenate([words[place] for place in places])
        negative = np.uint32(0) - ((unsorted >> np.uint32(24)) & np.uint32(1))
        difference = ((unsorted & np.uint32(_LOW)) | ((unsorted >> np.uint32(26)) << np.uint32(24))) ^ negative
        sign = (unsorted << np.uint32(6) ^ base[part]) & np.uint32(1 << 31)
        out[part] = sign | ((difference + base[part]) & np.uint32(_MAGNITUDE))


@hot()
def scaled(values: Floats, factor: float, out: Floats) -> None:
    """``out = values * factor``, settled. ``factor`` is an fp32 number."""
    np.multiply(values, np.float32(factor), out=out)
    settle(out)


def change(new: Floats, base: Floats) -> Floats:
    """``new - base``: scratch memory."""
    out = floats("change", len(new))
    np.subtract(new, base, out=out)
    return out
