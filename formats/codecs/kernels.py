"""The hot loops of the codecs, in numpy: the reference that compiled forms must match bit for bit.

A function marked ``hot`` has a compiled form in C, which runs instead where it is installed
(``formats.kernel_choice``). Every function works on contiguous one-dimensional little-endian unsigned arrays,
at any address, and fills arrays that the caller owns. No function keeps state. The reference processes *tiles* of at
most ``TILE`` bytes. A tile stays in a core's second-level cache during several passes. On larger blocks the same passes
run at memory speed. numpy releases the interpreter lock inside each pass, so threads scale.

A *word* is one number of the tensor (1, 2, 4 or 8 bytes). A *plane* has the same byte or bytes of every word.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats.kernel_choice import hot

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Counts: TypeAlias = npt.NDArray[np.int64]

PREPARED: Final = "ckptstore.formats.codecs.compiled_forms"
"""The module of compiled forms whose results need memory or tables first."""
TILE = 1 << 18
WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
PUT, UNZIGZAG, ROTATE, ADD, XOR = range(5)
"""The operations that :func:`combine` applies to the merged words."""
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_QUARTERS = np.bitwise_or.reduce([((np.arange(256, dtype="<u4") >> 2 * lane) & 3) << 8 * lane for lane in range(4)])
SAMPLE: Final = 4096
"""Most values that :func:`survey` accepts."""
N_LOG_N: Final[Counts] = np.rint(
    np.concatenate([[0], np.arange(1, SAMPLE + 1) * np.log2(np.arange(1, SAMPLE + 1))]) * (1 << 20)
).astype(np.int64)
_local = threading.local()


def scratch(role: str, count: int, word: int = 1) -> Words:
    """This thread's buffer for ``role``, as ``count`` words with arbitrary contents.

    Only one caller may use a role at a time: the next call returns the same memory. Buffers grow to the largest
    request, at most a few MiB each. Fresh memory for every block would cost more in page faults than the passes.
    """
    buffers: dict[str, Bytes] = _local.__dict__
    buffer = buffers.get(role)
    if buffer is None or buffer.nbytes < count * word:
        buffer = buffers[role] = np.empty(max(count * word, 1 << 12), np.uint8)
    words: Words = buffer[: count * word].view(WORDS[word])
    return words


def tiles(count: int, word: int) -> list[slice]:
    """Cut ``count`` words into runs of at most ``TILE`` bytes, which stay in a core's cache."""
    step = TILE // word
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


# ------------------------------------------------------------------------------------------------ word by word


@hot()
def difference(new: Words, base: Words, out: Words) -> None:
    """``out = zigzag(new - base)``: the wrapping difference of the bit patterns, as small unsigned numbers.

    Zigzag maps 0, -1, 1, -2 … to 0, 1, 2, 3 …: the sign moves to the lowest bit. It is a bijection for every pattern,
    NaN payloads and -0 included.
    """
    for tile in tiles(len(out), out.itemsize):
        np.subtract(new[tile], base[tile], out=out[tile])
        zigzag.reference(out[tile], out[tile])


@hot()
def zigzag(values: Words, out: Words) -> None:
    """``out = zigzag(values)``: two's complement to a sign in the lowest bit. ``out`` may be ``values``."""
    bits, kind = out.itemsize * 8, _SIGNED[out.itemsize]
    for tile in tiles(len(out), out.itemsize):
        sign = scratch("sign", tile.stop - tile.start, out.itemsize)
        np.right_shift(values[tile].view(kind), bits - 1, out=sign.view(kind))
        np.left_shift(values[tile], 1, out=out[tile])
        np.bitwise_xor(out[tile], sign, out=out[tile])


@hot()
def rotate_left(values: Words, out: Words) -> None:
    """Rotate words left by one bit: the sign becomes the lowest bit, and a float's exponent fills the top byte."""
    for tile in tiles(len(out), out.itemsize):
        top = scratch("sign", tile.stop - tile.start, out.itemsize)
        np.right_shift(values[tile], out.itemsize * 8 - 1, out=top)
        np.left_shift(values[tile], 1, out=out[tile])
        np.bitwise_or(out[tile], top, out=out[tile])


# ------------------------------------------------------------------------------------------- words <-> planes


@hot()
def split(words: Words, planes: list[Words]) -> None:
    """Split words into planes, lowest bytes first.

    Planes have 1, 2 or 4 bytes per word, in non-increasing order. Their item sizes add up to the word size. The
    conversions truncate, which is twice as fast as strided copies.
    """
    for tile in tiles(len(words), words.itemsize):
        position = 0
        for plane in planes:
            part = words[tile]
            if position:
                part = scratch("shifted", tile.stop - tile.start, words.itemsize)
                np.right_shift(words[tile], 8 * position, out=part)
            np.copyto(plane[tile], part, casting="unsafe")
            position += plane.itemsize


# `base` is not compared: `out` may overlap it, and a copy of `base` would not change with `out`.
@hot(destroys=("base",))
def combine(planes: list[Words], how: int, base: Words, out: Words) -> None:
    """Merge planes into words (the inverse of :func:`split`), and undo the map that was applied before the split.

    ``how`` is ``PUT`` (no map), ``UNZIGZAG`` (undo zigzag), ``ROTATE`` (rotate right by one bit), ``ADD`` (undo zigzag
    and add to ``base``) or ``XOR`` (with ``base``). Only ``ADD`` and ``XOR`` read ``base``, and ``out`` may be
    ``base``. ``planes`` may lack the top bytes; these are zero. The planes do not overlap ``out``.
    """
    for tile in tiles(len(out), out.itemsize):
        parts, words = [plane[tile] for plane in planes], out[tile]
        merged = scratch("merged", len(words), out.itemsize) if how in (ADD, XOR) else words
        (_merge_zigzag if how in (UNZIGZAG, ADD) else _merge)(parts, merged)
        if how == ROTATE:
            _rotate_right(merged)
        elif how == ADD:
            np.add(base[tile], merged, out=words)
        elif how == XOR:
            np.bitwise_xor(base[tile], merged, out=words)


def _merge(planes: list[Words], out: Words) -> None:
    np.copyto(out, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(out, plane.itemsize * 8, out=out)
        np.bitwise_or(out, plane, out=out)


def _merge_zigzag(planes: list[Words], out: Words) -> None:
    """``out = unzigzag(merge(planes))`` in fewer passes: the sign is in the low half, so most passes are half as wide.

    Let ``t`` be all ones if the value z is odd, else zero. Then unzigzag(z) = (z >> 1) ^ t. Sign-extending the low
    half's (low >> 1) ^ t gives all of it except the high half, whose bits start one position lower than in z.
    """
    half, below = out.itemsize // 2, 1
    while below < len(planes) and sum(plane.itemsize for plane in planes[:below]) < half:
        below += 1
    if planes[0].itemsize > half or out.itemsize == 1:
        _merge(planes, out)
        _unzigzag(out)
        return
    low = scratch("low half", len(out), half)
    _merge(planes[:below], low)
    _unzigzag(low)
    # A conversion followed by an operation on one type is faster than an operation on two types.
    extended = out
    if planes[below:]:
        _merge(planes[below:], out)
        np.left_shift(out, 4 * out.itemsize - 1, out=out)
        extended = scratch("extended", len(out), out.itemsize)
    np.copyto(extended.view(_SIGNED[out.itemsize]), low.view(_SIGNED[half]))
    if extended is not out:
        np.bitwise_xor(out, extended, out=out)


def _unzigzag(values: Words) -> None:
    sign = scratch("sign", len(values), values.itemsize)
    np.bitwise_and(values, 1, out=sign)
    np.negative(sign, out=sign)
    np.right_shift(values, 1, out=values)
    np.bitwise_xor(values, sign, out=values)


def _rotate_right(values: Words) -> None:
    top = scratch("sign", len(values), values.itemsize)
    np.left_shift(values, values.itemsize * 8 - 1, out=top)
    np.right_shift(values, 1, out=values)
    np.bitwise_or(values, top, out=values)


# ------------------------------------------------------------------------------------- small numbers in bytes


@hot(PREPARED)
def pack_small(values: Bytes, bits: int) -> Bytes:
    """Pack values below ``2**bits`` (``bits`` 1, 2 or 4) into bytes, first value in the lowest bits, padded with 0."""
    if bits == 1:
        return np.packbits(values.view(np.bool_), bitorder="little")
    per = 8 // bits
    padded = values
    if len(values) % per:
        padded = np.zeros(-(-len(values) // per) * per, np.uint8)
        padded[: len(values)] = values
    while bits < 8:
        pairs = padded.view("<u2")
        padded = np.bitwise_or(pairs, pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return padded


@hot(PREPARED)
def unpack_small(packed: Bytes, bits: int, out: Bytes) -> None:
    """Undo :func:`pack_small`: fill ``out``. Its length is the number of values."""
    if bits == 1:
        out[:] = np.unpackbits(packed, count=len(out), bitorder="little")
    elif bits == 2:
        whole = len(out) // 4
        np.take(_QUARTERS, packed[:whole], out=out[: 4 * whole].view("<u4"), mode="clip")
        if whole < len(packed):
            out[4 * whole :] = _QUARTERS[packed[whole:]].view(np.uint8)[: len(out) - 4 * whole]
    else:
        whole = len(out) // 2
        pairs, high = out[: 2 * whole].view("<u2"), scratch("pairs", whole, 2)
        np.copyto(pairs, packed[:whole])
        np.left_shift(pairs, 4, out=high)
        np.bitwise_or(pairs, high, out=pairs)
        np.bitwise_and(pairs, 0x0F0F, out=pairs)
        if whole < len(packed):
            out[-1] = packed[-1] & 15


# -------------------------------------------------------------------------------------------------- exceptions


def positions(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """The indices at which a mask is set, ascending.

    Below a density of one tenth ``flatnonzero`` runs a search for every hit. Two dense passes, over the packed mask and
    then over its non-zero bytes, take half the time.
    """
    if 10 * np.count_nonzero(mask) > len(mask):
        return np.flatnonzero(mask)
    packed = np.packbits(mask, bitorder="little")
    rows = np.flatnonzero(packed != 0)
    inside = np.flatnonzero(np.unpackbits(packed[rows], bitorder="little").view(np.bool_))
    rows *= 8
    rows -= np.arange(0, 8 * len(rows), 8)
    inside += rows[inside >> 3]
    return inside


def steps(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], Bytes]:
    """The indices at which a mask is set, and the same as steps (SPEC section 5.4.4).

    A step s < 255 skips s entries and then meets one that is set. A step of 255 skips 255 entries and meets none.
    """
    where = positions(mask)
    return where, steps_to(where)


def steps_to(where: npt.NDArray[np.integer[Any]]) -> Bytes:
    """Convert ascending positions to steps (:func:`steps`)."""
    strides = np.empty(len(where), np.intp)
    strides[:1] = where[:1] + 1
    np.subtract(where[1:], where[:-1], out=strides[1:])
    if not len(strides) or int(strides.max()) < 256:
        return (strides - 1).astype(np.uint8)
    far = np.flatnonzero(strides > 255)
    strides -= 1
    skips = strides[far] // 255
    near = strides.astype(np.uint8)
    near[far] = strides[far] - 255 * skips
    # The steps between two far positions move back by the number of skips before them.
    shift = np.repeat(np.append(0, np.cumsum(skips)), np.diff(np.concatenate([[0], far, [len(near)]])))
    out = np.full(len(near) + int(skips.sum()), 255, np.uint8)
    shift += np.arange(len(near))
    out[shift] = near
    return out


def positions_of_steps(stepped: Bytes) -> npt.NDArray[np.intp]:
    """Undo :func:`steps`: return the indices, ascending. They are not checked against the mask's length."""
    meets = stepped != 255
    where = np.cumsum(stepped + meets, dtype=np.intp)
    where -= 1
    return where if meets.all() else np.compress(meets, where)


@hot(PREPARED)
def take_exceptions(values: Words, limit: int, rest: Bytes) -> tuple[Bytes, Words]:
    """Separate the exceptions, the values of at least ``limit``. Returns the steps to them, and each less ``limit``.

    ``rest`` is either empty or as long as ``values``. It receives the values below ``limit``, and 0 for each exception.
    """
    where, stepped = steps(values >= limit)
    if len(rest):
        np.copyto(rest, values, casting="unsafe")
        rest[where] = 0
    return stepped, values[where] - values.dtype.type(limit)


@hot()
def put_exceptions(stepped: Bytes, greater: Words, limit: int, out: Words) -> bool:
    """Undo :func:`take_exceptions`: write the exceptions into ``out``.

    Returns:
        Whether the steps lead to exactly ``len(greater)`` positions, all within ``out``. If False, some exceptions may
        have been written.
    """
    where = positions_of_steps(stepped)
    if len(where) != len(greater) or (len(where) and int(where[-1]) >= len(out)):
        return False
    out[where] = greater + greater.dtype.type(limit)
    return True


# ----------------------------------------------------------------------------------------------------- samples


def histogram(values: Bytes) -> Counts:
    """Count how often each of the 256 byte values occurs."""
    return np.bincount(values, minlength=256)


@hot(PREPARED)
def survey(values: Bytes) -> tuple[int, int, int]:
    """Statistics of at most ``SAMPLE`` values.

    Returns:
        The number of zeros, the count of the most frequent value, and the sum of n log n over the histogram, in 2**-20
        bits (an integer, so that every machine makes the same choices).
    """
    counts = histogram(values)
    return int(counts[0]), int(counts.max()), int(N_LOG_N.take(counts).sum())


@hot(PREPARED)
def survey_packed(values: Bytes, bits: int) -> tuple[int, int, int, int]:
    """Statistics of a sample after packing it into ``bits`` bits per value.

    Returns:
        The number of exceptions (values of at least ``2**bits``) and their sum of n log n; then, of the packed bytes,
        the count of the most frequent one and the sum of n log n.
    """
    greater = histogram(values)[1 << bits :]
    packed = histogram(pack_small.reference(np.where(values >> bits, np.uint8(0), values), bits))
    information = int(N_LOG_N.take(greater).sum()), int(N_LOG_N.take(packed).sum())
    return int(greater.sum()), information[0], int(packed.max()), information[1]


# --------------------------------------------------------------------------------------------------- contexts


@hot(PREPARED)
def classify(base: Words, shift: int, low: int, high: int, out: Bytes) -> Counts:
    """``out = clip(magnitude(base) >> shift, low, high) - low``: the class of every word (SPEC section 5.4.5).

    For floats ``shift`` is the width of the mantissa, so the class is the exponent.

    Returns:
        How many words of each quarter have each class, as four rows, because compiled forms sort the quarters
        concurrently. The last row includes the remainder.
    """
    bits = base.itemsize * 8
    for tile in tiles(len(base), base.itemsize):
        exponent = scratch("shifted", tile.stop - tile.start, base.itemsize)
        np.bitwise_and(base[tile], (1 << (bits - 1)) - 1, out=exponent)
        np.right_shift(exponent, shift, out=exponent)
        np.clip(exponent, low, high, out=exponent)
        np.subtract(exponent, low, out=exponent)
        np.copyto(out[tile], exponent, casting="unsafe")
    quarter = len(base) // 4
    parts = [out[:quarter], out[quarter : 2 * quarter], out[2 * quarter : 3 * quarter], out[3 * quarter :]]
    return np.array([np.bincount(part, minlength=high - low + 1) for part in parts], np.int64)


@hot()
def sort(words: Words, labels: Bytes, counts: Counts, out: Words) -> None:
    """Sort words by their class, those of one class in order; ``labels`` and ``counts`` are from :func:`classify`."""
    for tile, order, places in places_of(labels, counts, words.itemsize):
        ordered = scratch("merged", len(order), words.itemsize)
        np.take(words[tile], order, out=ordered, mode="clip")
        at = 0
        for place in places:
            size = place.stop - place.start
            out[place] = ordered[at : at + size]
            at += size


@hot()
def add_unsorted(words: Words, labels: Bytes, counts: Counts, base: Words, out: Words) -> None:
    """Undo :func:`sort`, undo zigzag, and add the words to ``base``. ``out`` may be ``base``."""
    for tile, order, places in places_of(labels, counts, words.itemsize):
        ordered = scratch("low", len(order), words.itemsize)
        np.concatenate([words[place] for place in places], out=ordered)
        unsorted = scratch("unsorted", len(order), words.itemsize)
        unsorted[order] = ordered
        combine.reference([unsorted], ADD, base[tile], out[tile])


def places_of(labels: Bytes, counts: Counts, word: int) -> list[tuple[slice, npt.NDArray[np.intp], list[slice]]]:
    """For each tile: the permutation that sorts it, and the range of each of its classes in the sorted block.

    A counting sort of a tile that fits the cache is nearly three times as fast as a sort of the whole block.
    """
    totals = counts.sum(axis=0)
    starts = np.cumsum(totals) - totals
    found = []
    for tile in tiles(len(labels), word):
        ends = starts + np.bincount(labels[tile], minlength=len(totals))
        places = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        found.append((tile, np.argsort(labels[tile], kind="stable"), places))
        starts = ends
    return found
