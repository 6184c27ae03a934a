"""SPEC.md 5.4: codecs of chunks, and the words that all codecs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

Array = np.ndarray
UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class RefusedError(Exception):
    """The page refuses this."""


class Stored:
    """Stored bytes, taken one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise RefusedError("ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")


def unzigzag(z: Array) -> Array:
    return np.where(z % 2 == 0, z // 2, -(z // 2) - z.dtype.type(1))


def small_numbers(packed: bytes, count: int, bits: int) -> Array:
    """``bits`` bits for each of ``count`` values, the first in the lowest bits of the first byte."""
    stream = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: count * bits].reshape(count, bits)
    return (stream.astype(np.uint64) << np.arange(bits, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def exceptions(stored: Stored, count: int, depth: int) -> list[int]:
    """Places of the exceptions among ``count`` values (5.4.4); the steps are a piece at ``depth``."""
    steps, expected = stored.u32(), stored.u32()
    if expected > count or steps > expected + count // 255:
        raise RefusedError("too many")
    found, at = [], 0
    for step in piece(stored, steps, depth).tolist():
        at += step
        if step < 255:
            found.append(at)
            at += 1
    if len(found) != expected or (found and found[-1] >= count):
        raise RefusedError("steps")
    return found


def piece(stored: Stored, count: int, depth: int) -> Array:
    """Decode a piece (5.4.3)."""
    mode = stored.byte()
    if mode == 0:
        return np.frombuffer(stored.take(count), np.uint8).copy()
    if mode == 1:
        return np.full(count, stored.byte(), np.uint8)
    if mode == 2:
        return np.frombuffer(frame(stored.take(stored.u32()), count), np.uint8).copy()
    if mode not in (3, 4, 5, 6) or depth > 1:
        raise RefusedError("mode")
    bits = (0, 1, 2, 4)[mode - 3]
    values = np.zeros(count, np.uint8)
    if bits:
        values[:] = small_numbers(piece(stored, -(-count * bits // 8), depth + 1).tobytes(), count, bits)
    places = exceptions(stored, count, depth + 1)
    values[places] = piece(stored, len(places), depth + 1) + np.uint8(1 << bits)
    return values


def frame(data: bytes, count: int) -> bytes:
    try:
        said = zstandard.get_frame_parameters(data)
        if said.content_size != count or said.dict_id or said.window_size > 1 << 20:
            raise RefusedError("frame")
        return zstandard.ZstdDecompressor(max_window_size=1 << 20).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError("frame") from error


def narrow(stored: Stored, count: int, word: int, bits: int) -> Array:
    words = np.zeros(count, UNSIGNED[word])
    if bits:
        packed = piece(stored, -(-count * bits // 8), 1)
        words[:] = small_numbers(packed.tobytes(), count, bits)
    places = exceptions(stored, count, 2)
    if places:
        if stored.at < len(stored.data) and 16 <= stored.data[stored.at] <= 254:
            raise RefusedError("nested")
        words[places] = group(stored, len(places), word) + words.dtype.type(1 << bits)
    return words


def group(stored: Stored, count: int, word: int) -> Array:
    """Decode a group (5.4.2)."""
    form, kind = stored.byte(), UNSIGNED[word]
    if form == 255:
        return np.zeros(count, kind)
    if form == word:
        return np.frombuffer(stored.take(count * word), kind).copy()
    if form in (0, 2, 4) and form < word:
        words = np.zeros(count, kind)
        if form:
            words[:] = np.frombuffer(stored.take(count * form), UNSIGNED[form])
        for byte in range(form, word):
            words |= piece(stored, count, 0).astype(kind) << words.dtype.type(8 * byte)
        return words
    if word > 1 and form - 16 in (0, 4):
        return narrow(stored, count, word, form - 16)
    raise RefusedError("form")


def numbers(stored: Stored, count: int, bits: int) -> Array:
    """A section of ``prefix``."""
    found = np.zeros(count, np.uint64)
    for byte in range(bits // 8):
        found |= np.frombuffer(stored.take(count), np.uint8).astype(np.uint64) << np.uint64(8 * byte)
    rest = small_numbers(stored.take(-(-count * (bits % 8) // 8)), count, bits % 8)
    return found | rest << np.uint64(bits // 8 * 8)


def prefixed(stored: Stored, count: int, word: int, bits: int, size: int) -> Array:
    """Decode ``prefix`` (5.4.6)."""
    form = stored.byte()
    if form == 0:
        return np.frombuffer(stored.take(count * word), UNSIGNED[word]).copy()
    if form != 1:
        raise RefusedError("form")
    groups = [range(start, min(start + (size or count), count)) for start in range(0, count, size or count)]
    entries = (numbers(stored, len(groups), bits) + 1).tolist()
    listed = numbers(stored, sum(entries), bits)
    ends = np.cumsum(entries)
    prefixes = np.zeros(count, np.uint64)
    indices = np.zeros(count, np.uint64)
    for width in range(1, bits + 1):
        wide = [g for g, n in zip(groups, entries, strict=True) if 1 << width - 1 < n <= 1 << width]
        places = np.concatenate([np.arange(g.start, g.stop) for g in wide]) if wide else np.empty(0, np.intp)
        indices[places] = numbers(stored, len(places), width)
    for g, n, end in zip(groups, entries, ends.tolist(), strict=True):
        own = indices[g.start : g.stop]
        if (own >= n).any():
            raise RefusedError("index")
        prefixes[g.start : g.stop] = listed[end - n : end][own.astype(np.intp)]
    suffixes = numbers(stored, count, 8 * word - bits)
    return (prefixes << np.uint64(8 * word - bits) | suffixes).astype(UNSIGNED[word])


def sorted_by_class(stored: Stored, base: Array, word: int, context: list[int]) -> Array:
    """Put the words z of a block in their places (5.4.5)."""
    shift, low, high = context
    labels = np.clip((base.astype(np.uint64) % (1 << 8 * word - 1)) >> np.uint64(shift), low, high) - low
    return grouped(stored, labels, high - low + 1, word)


def grouped(stored: Stored, labels: Array, classes: int, word: int) -> Array:
    """Read words that are sorted by class and cut into groups, and put them in their places."""
    order = np.argsort(labels, kind="stable")
    cuts, count = [0], len(labels)
    for label in range(classes):
        end = int((labels <= label).sum())
        if end - cuts[-1] >= 4096 and count - end >= 4096:
            cuts.append(end)
    z = np.empty(count, UNSIGNED[word])
    z[order] = np.concatenate([group(stored, b - a, word) for a, b in zip(cuts, [*cuts[1:], count], strict=True)])
    return z


def rounded(master: Array, to: str) -> Array:
    narrow, nan = {"BF16": (ml_dtypes.bfloat16, 0x7FC0), "F16": (np.float16, 0x7E00)}[to]
    with np.errstate(all="ignore"):
        found = master.view("<f4").astype(narrow).view("<u2")
    return np.where(np.isnan(master.view("<f4")), np.uint16(nan), found)


def decode(name: str, params: Mapping[str, Any], data: bytes, length: int, base: bytes) -> bytes:
    """Decode a chunk of ``length`` bytes (5.4 and 5.4.1)."""
    if name == "raw":
        return data
    word = 2 if name == "derive" else params.get("word")
    if name not in ("planes", "xor", "sub", "prefix", "derive") or word not in (1, 2, 4, 8):
        raise RefusedError("codec")
    unchanged = not data and name in ("xor", "sub", "derive")
    if unchanged and length % word:
        raise RefusedError("nothing")
    stored, twice = Stored(data), 2 if name == "derive" else 1
    out = b""
    for start in range(0, length, 1 << 20):
        size = min(1 << 20, length - start)
        count = size // word
        below = base[twice * start : twice * (start + count * word)]
        if count:
            words = block(name, params, stored, count, word, below, unchanged)
            out += words.astype(UNSIGNED[word]).tobytes()
        out += stored.take(size % word)
    if stored.at < len(data):
        raise RefusedError("more")
    return out


def block(
    name: str, params: Mapping[str, Any], stored: Stored, count: int, word: int, below: bytes, unchanged: bool
) -> Array:
    if name == "prefix":
        return prefixed(stored, count, word, params["bits"], params.get("group", 0))
    base = np.frombuffer(below, "<u4" if name == "derive" else UNSIGNED[word])
    if unchanged:
        z = np.zeros(count, UNSIGNED[word])
    elif "context" in params:
        z = sorted_by_class(stored, base, word, params["context"])
    else:
        z = group(stored, count, word)
    one, last = z.dtype.type(1), z.dtype.type(8 * word - 1)
    match name, params.get("map", "none"):
        case "planes", "rotate":
            return z >> one | z << last
        case "planes", "fold":
            return unzigzag(z)
        case "planes", "none":
            return z
        case "xor", _:
            return base ^ z
        case "sub", _:
            return base + unzigzag(z)
        case "derive", _:
            return rounded(base, params["to"]) + unzigzag(z)
    raise RefusedError("codec")
