"""Small numbers, exceptions and samples as loops for numba: see ``kernels``, and ``codecs.compiled``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.kernels import N_LOG_N, WORDS, Bytes, Counts, Words, scratch
from ckptstore.formats.kernel_choice import Loop, inner, loop, loops

# ------------------------------------------------------------------------------------- small numbers in bytes


@loop("u2", "u1!")
def _pack_nibbles(pairs: Words, out: Bytes) -> None:
    for i in range(len(pairs)):
        out[i] = pairs[i] | (pairs[i] >> np.uint16(4))


@loop("u4", "u1!")
def _pack_quarters(fours: Words, out: Bytes) -> None:
    for i in range(len(fours)):
        pair = fours[i] | (fours[i] >> np.uint32(6))
        out[i] = pair | (pair >> np.uint32(12))


@loop("u1", "u2!")
def _unpack_nibbles(packed: Bytes, out: Words) -> None:
    for i in range(len(out)):
        pair = np.uint16(packed[i])
        out[i] = (pair | (pair << np.uint16(4))) & np.uint16(0x0F0F)


@loop("u1", "u4!")
def _unpack_quarters(packed: Bytes, out: Words) -> None:
    for i in range(len(out)):
        four = np.uint32(packed[i])
        four |= four << np.uint32(12)
        out[i] = (four | (four << np.uint32(6))) & np.uint32(0x03030303)


_SMALL: dict[int, tuple[Loop[..., Any], Loop[..., Any]]] = {
    4: (_pack_nibbles, _unpack_nibbles),
    2: (_pack_quarters, _unpack_quarters),
}


def pack_small(values: Bytes, bits: int) -> Bytes:
    """See ``kernels.pack_small``. numpy's own packing of bits is as fast as can be."""
    if bits == 1:
        return kernels.pack_small.reference(values, bits)
    per = 8 // bits
    out, whole = np.empty(-(-len(values) // per), np.uint8), len(values) // per
    _SMALL[bits][0](values[: whole * per].view(WORDS[per]), out[:whole])
    if whole < len(out):
        out[whole] = sum(value << bits * lane for lane, value in enumerate(values[whole * per :].tolist()))
    return out


def unpack_small(packed: Bytes, bits: int, out: Bytes) -> None:
    """See ``kernels.unpack_small``."""
    if bits == 1:
        kernels.unpack_small.reference(packed, bits, out)
        return
    per = 8 // bits
    whole = len(out) // per
    _SMALL[bits][1](packed[:whole], out[: whole * per].view(WORDS[per]))
    for lane in range(len(out) - whole * per):
        out[whole * per + lane] = (int(packed[whole]) >> bits * lane) & ((1 << bits) - 1)


# -------------------------------------------------------------------------------------------------- exceptions


@loops("u", "int", "u4!")
def _find(values: Words, limit: int, where: Words) -> int:
    """Positions of the values from ``limit`` up. Writing every one and moving on past some needs no branch."""
    found, least = 0, values.dtype.type(limit)
    for i in range(len(values)):
        where[found] = i
        found += values[i] >= least
    return found


@loops("u", "int", "u4", "u1!", "u1!", "u!")
def _take(values: Words, limit: int, where: Words, rest: Bytes, steps: Bytes, greater: Words) -> int:
    word = values.dtype.type
    least = word(limit)
    for i in range(len(rest)):
        rest[i] = values[i] if values[i] < least else word(0)
    count, after = 0, 0
    for k in range(len(where)):
        at = int(where[k])
        gap = at - after
        while gap >= 255:
            steps[count] = 255
            count += 1
            gap -= 255
        steps[count] = gap
        count += 1
        greater[k] = values[at] - least
        after = at + 1
    return count


@loops("u1", "u", "int", "u!")
def _put(steps: Bytes, greater: Words, limit: int, out: Words) -> bool:
    least = out.dtype.type(limit)
    at, used = 0, 0
    for k in range(len(steps)):
        at += steps[k]
        if steps[k] < 255:
            if at >= len(out) or used >= len(greater):
                return False
            out[at] = greater[used] + least
            at += 1
            used += 1
    return used == len(greater)


@inner
def _count(values: Bytes, tables: Words) -> None:
    """A histogram in the first of four tables: adding to one place twice in a row waits for the first sum."""
    one = np.uint32(1)
    tables[:] = 0
    for i in range(len(values) // 4):
        tables[values[4 * i]] += one
        tables[256 + np.int64(values[4 * i + 1])] += one
        tables[512 + np.int64(values[4 * i + 2])] += one
        tables[768 + np.int64(values[4 * i + 3])] += one
    for i in range(len(values) // 4 * 4, len(values)):
        tables[values[i]] += one
    for i in range(256):
        tables[i] += tables[256 + i] + tables[512 + i] + tables[768 + i]


@inner
def _information(counts: Words, n_log_n: Counts) -> int:
    found = 0
    for i in range(len(counts)):
        found += n_log_n[counts[i]]
    return found


@loop("u1", "i8", "u4!")
def _survey(values: Bytes, n_log_n: Counts, tables: Words) -> tuple[int, int, int]:
    _count(values, tables)
    counts = tables[:256]
    return counts[0], counts.max(), _information(counts, n_log_n)


@loop("u1", "int", "i8", "u4!")
def _survey_packed(values: Bytes, bits: int, n_log_n: Counts, tables: Words) -> tuple[int, int, int, int]:
    limit, per = 1 << bits, 8 // bits
    _count(values, tables)
    greater = _information(tables[limit:256], n_log_n)
    exceptions = 0
    for i in range(limit, 256):
        exceptions += tables[i]
    packed = tables[:256]
    packed[:] = 0
    for i in range(-(-len(values) // per)):
        byte = 0
        for lane in range(min(per, len(values) - per * i)):
            value = values[per * i + lane]
            if value < limit:
                byte |= value << (bits * lane)
        packed[byte] += np.uint32(1)
    return exceptions, greater, packed.max(), _information(packed, n_log_n)


def take_exceptions(values: Words, limit: int, rest: Bytes) -> tuple[Bytes, Words]:
    """See ``kernels.take_exceptions``."""
    where = scratch("where", len(values), 4)
    found = _find[values.itemsize](values, limit, where)
    steps, greater = np.empty(found + len(values) // 255, np.uint8), np.empty(found, values.dtype)
    count = _take[values.itemsize](values, limit, where[:found], rest, steps, greater)
    return steps[:count], greater


def put_exceptions(stepped: Bytes, greater: Words, limit: int, out: Words) -> bool:
    """See ``kernels.put_exceptions``."""
    return bool(_put[out.itemsize](stepped, greater, limit, out))


def survey(values: Bytes) -> tuple[int, int, int]:
    """See ``kernels.survey``."""
    zeros, top, information = _survey(values, N_LOG_N, scratch("tables", 1024, 4))
    return zeros, top, information


def survey_packed(values: Bytes, bits: int) -> tuple[int, int, int, int]:
    """See ``kernels.survey_packed``."""
    tables = scratch("tables", 1024, 4)
    exceptions, greater, top, packed = _survey_packed(values, bits, N_LOG_N, tables)
    return exceptions, greater, top, packed
