"""Contexts and narrower floats as loops for numba: see ``kernels``, ``rounding``, and ``codecs.compiled``."""

from __future__ import annotations

import numpy as np

from ckptstore.formats.codecs.kernels import Bytes, Counts, Words
from ckptstore.formats.kernel_choice import loop, loops

# --------------------------------------------------------------------------------------------------- contexts


@loops("u", "int", "int", "int", "u1!", "i8!")
def _classify(base: Words, shift: int, low: int, high: int, labels: Bytes, counts: Counts) -> None:
    word = base.dtype.type
    least, most = word(low), word(high)
    for i in range(len(labels)):
        magnitude = word(base[i] << word(1)) >> word(shift + 1)
        labels[i] = min(max(magnitude, least), most) - least
    classes, quarter = high - low + 1, len(labels) // 4
    first, second, third, last = counts[:classes], counts[classes:], counts[2 * classes :], counts[3 * classes :]
    ahead, far, farther = labels[quarter:], labels[2 * quarter :], labels[3 * quarter :]
    for i in range(quarter):
        first[labels[i]] += 1
        second[ahead[i]] += 1
        third[far[i]] += 1
        last[farther[i]] += 1
    for i in range(quarter, len(farther)):
        last[farther[i]] += 1


@loops("u", "u1", "u8!", "u!")
def _sort(words: Words, labels: Bytes, places: Words, out: Words) -> None:
    """Four quarters at once: each place follows from the one before, but four such sequences overlap.

    (Unsigned places and slices: an index that might be negative costs a comparison.)
    """
    one, classes, quarter = np.uint64(1), len(places) // 4, len(words) // 4
    p, q, r, s = places[:classes], places[classes:], places[2 * classes :], places[3 * classes :]
    k, m, n = labels[quarter:], labels[2 * quarter :], labels[3 * quarter :]
    x, y, z = words[quarter:], words[2 * quarter :], words[3 * quarter :]
    for i in range(quarter):
        out[p[labels[i]]] = words[i]
        out[q[k[i]]] = x[i]
        out[r[m[i]]] = y[i]
        out[s[n[i]]] = z[i]
        p[labels[i]] += one
        q[k[i]] += one
        r[m[i]] += one
        s[n[i]] += one
    for i in range(quarter, len(z)):
        out[s[n[i]]] = z[i]
        s[n[i]] += one


@loops("u", "u1", "u8!", "u", "u!")
def _add_unsorted(words: Words, labels: Bytes, places: Words, base: Words, out: Words) -> None:
    word, one = out.dtype.type, np.uint64(1)
    classes, quarter = len(places) // 4, len(out) // 4
    p, q, r, s = places[:classes], places[classes:], places[2 * classes :], places[3 * classes :]
    k, m, n = labels[quarter:], labels[2 * quarter :], labels[3 * quarter :]
    x, y, z = out[quarter:], out[2 * quarter :], out[3 * quarter :]
    e, f, g = base[quarter:], base[2 * quarter :], base[3 * quarter :]
    for i in range(quarter):
        a, b, c, d = words[p[labels[i]]], words[q[k[i]]], words[r[m[i]]], words[s[n[i]]]
        p[labels[i]] += one
        q[k[i]] += one
        r[m[i]] += one
        s[n[i]] += one
        out[i] = base[i] + ((a >> word(1)) ^ (word(0) - (a & word(1))))
        x[i] = e[i] + ((b >> word(1)) ^ (word(0) - (b & word(1))))
        y[i] = f[i] + ((c >> word(1)) ^ (word(0) - (c & word(1))))
        z[i] = g[i] + ((d >> word(1)) ^ (word(0) - (d & word(1))))
    for i in range(quarter, len(z)):
        d = words[s[n[i]]]
        s[n[i]] += one
        z[i] = g[i] + ((d >> word(1)) ^ (word(0) - (d & word(1))))


def classify(base: Words, shift: int, low: int, high: int, out: Bytes) -> Counts:
    """See ``kernels.classify``."""
    counts = np.zeros(4 * (high - low + 1), np.int64)
    _classify[base.itemsize](base, shift, low, high, out, counts)
    return counts.reshape(4, -1)


def sort(words: Words, labels: Bytes, counts: Counts, out: Words) -> None:
    """See ``kernels.sort``."""
    _sort[words.itemsize](words, labels, _first_places(counts), out)


def add_unsorted(words: Words, labels: Bytes, counts: Counts, base: Words, out: Words) -> None:
    """See ``kernels.add_unsorted``."""
    _add_unsorted[out.itemsize](words, labels, _first_places(counts), base, out)


def _first_places(counts: Counts) -> Words:
    """Where in the sorted words those of each quarter and class begin: class by class, quarter by quarter."""
    sizes = counts.T.reshape(-1)
    return (sizes.cumsum() - sizes).reshape(-1, 4).T.reshape(-1).astype(np.uint64)


# ------------------------------------------------------------------------------------------- narrower floats


@loop("u4", "u2!")
def to_bfloat16(values: Words, out: Words) -> None:
    """See ``rounding.to_bfloat16``."""
    for i in range(len(out)):
        rounded = np.uint32(values[i] + np.uint32(0x7FFF) + ((values[i] >> np.uint32(16)) & np.uint32(1)))
        nan = (values[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint32(0x7FC0) if nan else rounded >> np.uint32(16)


@loop("u4", "u2!")
def to_float16(values: Words, out: Words) -> None:
    """See ``rounding.to_float16``."""
    one = np.uint32(1)
    for i in range(len(out)):
        magnitude = values[i] & np.uint32(0x7FFFFFFF)
        exponent = magnitude >> np.uint32(23)
        normal = np.uint32(magnitude + ((magnitude >> np.uint32(13)) & one) + np.uint32(0xC8000FFF)) >> np.uint32(13)
        shift = min(np.uint32(126) - min(exponent, np.uint32(112)), np.uint32(31))
        mantissa = (magnitude & np.uint32(0x7FFFFF)) | (np.uint32(0x800000) if exponent else np.uint32(0))
        whole, half = mantissa >> shift, one << (shift - one)
        rest = mantissa & ((one << shift) - one)
        small = whole + (one if rest > half or (rest == half and whole & one) else np.uint32(0))
        found = small if magnitude < np.uint32(0x38800000) else normal
        found = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else found
        found |= (values[i] >> np.uint32(16)) & np.uint32(0x8000)
        out[i] = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else found
