"""SPEC.md 5.4 holds: a decoder written from the page alone reads what the codecs write, and refuses what they do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore.formats
from ckptstore.formats import codecs
from ckptstore.formats.digest import digest
from ckptstore.formats.errors import CorruptSegmentError, FormatError
from ckptstore.formats.hashing import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.segment import SegmentDoc, header_length, parse
from tests.formats.codec_data import ALL_DTYPES, CHANGES, CLASSES, base_of, codecs_of, pair

# ---- a decoder that knows the page and nothing else ------------------------------------------------------------------

Array = np.ndarray
UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class RefusedError(Exception):
    """The page says that this is refused."""


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


def unfold(z: Array) -> Array:
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
    """5.4.3"""
    mode = stored.byte()
    if mode == 0:
        return np.frombuffer(stored.take(count), np.uint8).copy()
    if mode == 1:
        return np.full(count, stored.byte(), np.uint8)
    if mode == 2:
        return np.frombuffer(frame(stored.take(stored.u32()), count), np.uint8).copy()
    if mode not in (3, 4, 5, 6) or depth > 2:
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


def narrow_part(stored: Stored, count: int, word: int, bits: int) -> Array:
    words = np.zeros(count, UNSIGNED[word])
    if bits:
        packed = piece(stored, -(-count * bits // 8), 1)
        words[:] = packed if bits == 8 else small_numbers(packed.tobytes(), count, bits)
    places = exceptions(stored, count, 2)
    if places:
        if stored.at < len(stored.data) and 16 <= stored.data[stored.at] <= 254:
            raise RefusedError("nested")
        words[places] = group(stored, len(places), word) + words.dtype.type(1 << bits)
    return words


def group(stored: Stored, count: int, word: int) -> Array:
    """5.4.2"""
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
    if word > 1 and form - 16 in (0, 1, 2, 4, 8):
        return narrow_part(stored, count, word, form - 16)
    if word > 1 and form - 32 in (0, 1, 2, 4, 8) and form - 32 < 4 * word:
        low = np.frombuffer(stored.take(count * word // 2), UNSIGNED[word // 2]).astype(kind)
        return low | narrow_part(stored, count, word // 2, form - 32).astype(kind) << low.dtype.type(4 * word)
    raise RefusedError("form")


def numbers(stored: Stored, count: int, bits: int) -> Array:
    """A section of ``prefix``."""
    found = np.zeros(count, np.uint64)
    for byte in range(bits // 8):
        found |= np.frombuffer(stored.take(count), np.uint8).astype(np.uint64) << np.uint64(8 * byte)
    rest = small_numbers(stored.take(-(-count * (bits % 8) // 8)), count, bits % 8)
    return found | rest << np.uint64(bits // 8 * 8)


def prefixed(stored: Stored, count: int, word: int, bits: int, size: int) -> Array:
    """5.4.6"""
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
    """5.4.5: the words z of a block, in their places."""
    shift, low, high = context
    labels = np.clip((base.astype(np.uint64) % (1 << 8 * word - 1)) >> np.uint64(shift), low, high) - low
    order = np.argsort(labels, kind="stable")
    cuts, count = [0], len(base)
    for label in range(high - low + 1):
        end = int((labels <= label).sum())
        if end - cuts[-1] >= 4096 and count - end >= 4096:
            cuts.append(end)
    z = np.empty_like(base)
    z[order] = np.concatenate([group(stored, b - a, word) for a, b in zip(cuts, [*cuts[1:], count], strict=True)])
    return z


def rounded(master: Array, to: str) -> Array:
    narrow, nan = {"BF16": (ml_dtypes.bfloat16, 0x7FC0), "F16": (np.float16, 0x7E00)}[to]
    with np.errstate(all="ignore"):
        found = master.view("<f4").astype(narrow).view("<u2")
    return np.where(np.isnan(master.view("<f4")), np.uint16(nan), found)


def decode(name: str, params: Mapping[str, Any], data: bytes, length: int, base: bytes) -> bytes:
    """5.4 and 5.4.1: the ``length`` bytes of a chunk."""
    if name == "raw":
        return data
    word = 2 if name == "derive" else params["word"]
    unchanged = not data and name in ("xor", "diff", "derive")
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
            return unfold(z)
        case "planes", "none":
            return z
        case "xor", _:
            return base ^ z
        case "diff", _:
            return base + unfold(z)
        case "derive", _:
            return rounded(base, params["to"]) + unfold(z)
    raise RefusedError("codec")


# ---- golden payloads -------------------------------------------------------------------------------------------------

GOLDEN = Path(ckptstore.formats.__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "codecs-1.json").read_text())


def golden(name: str) -> tuple[bytes, SegmentDoc]:
    data, expected = (GOLDEN / name).read_bytes(), EXPECTED["segments"][name]
    header = data[: header_length(data, len(data), name)]
    assert (xxh3_128(data), header_hash(header)) == (expected["hash"], expected["header_hash"])
    return data, parse(header, len(data), name, lambda offset, length: data[offset : offset + length])


def test_golden_payloads_stay_readable() -> None:
    """By the page's decoder and by ours; together they hold every form of group and mode of piece that is written."""
    data, doc = golden("segment-1-codecs-delta.safetensors")
    below, older = golden("segment-1-codecs-base.safetensors")
    images: dict[str, bytes] = {}
    assert {entry.codec for entry in doc.tensors[11].values()} == set(codecs.CODECS)
    for name, entry in doc.tensors[11].items():
        (chunk,) = entry.chunks
        base = b""
        if "of" in entry.params:
            base = images[entry.params["of"]]
        elif name in older.tensors[10]:
            found = older.tensors[10][name].chunks[0]
            base = below[found.offset : found.offset + found.length]
        payload = data[chunk.offset : chunk.offset + chunk.length]
        images[name] = decode(entry.codec, entry.params, payload, chunk.logical, base)
        codec = codecs.codec(entry.codec, {key: value for key, value in entry.params.items() if key != "of"})
        assert codecs.decode(codec, payload, chunk.logical, base).tobytes() == images[name]
        assert chunk_hash(images[name]) == chunk.decoded_hash or entry.codec == "raw"
        assert digest(images[name]) == entry.digest
    assert {name: xxh3_128(image) for name, image in images.items()} == EXPECTED["images"]


def test_the_golden_payloads_cover_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, forms = set[int](), set[int]()
    monkeypatch.setitem(globals(), "piece", noting(modes, piece))
    monkeypatch.setitem(globals(), "group", noting(forms, group))
    test_golden_payloads_stay_readable()
    assert modes == set(range(7))
    assert forms >= {0, 2, 4, 16, 255}
    assert forms & {32, 33, 34, 36}


# ---- the comparison --------------------------------------------------------------------------------------------------


def check(codec: codecs.Codec, image: Array, base: Array | None, level: int) -> None:
    payload = codecs.encode(codec, image, base, level=level).tobytes()
    assert len(payload) <= len(image) + 16 * -(-len(image) // (1 << 20))
    below = b"" if base is None else base.tobytes()
    assert decode(codec.name, codec.params, payload, len(image), below) == image.tobytes(), codec


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", list(CLASSES))
def test_hostile_values(dtype: str, kind: str) -> None:
    for change in CHANGES:
        for count in (1, 700, 5000):
            base, image = pair(dtype, kind, change, count, 3)
            for codec in codecs_of(dtype):
                check(codec, image, base_of(codec, base), codecs.THRIFTY if count == 700 else codecs.FAST)


@pytest.mark.parametrize("level", [codecs.FAST, codecs.THRIFTY, 3])
@pytest.mark.parametrize(
    ("dtype", "scale"), [("F32", 1e-7), ("F32", 1e-5), ("BF16", 1e-5), ("BF16", 1e-4), ("F64", 1e-9)]
)
def test_trained_values(dtype: str, scale: float, level: int) -> None:
    """Weights that an optimizer moved, in two blocks: every form of group that there is, and runs of classes."""
    kind = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("<f8")}[dtype]
    rng = np.random.default_rng(1)
    count = (1 << 20) // kind.itemsize + 30_000
    weights = rng.normal(0, 0.02, count) * np.where(rng.random(count) < 0.3, 0.01, 1)
    moved = weights + rng.normal(0, scale, count)
    base, image = (codecs.as_bytes(values.astype(kind)) for values in (weights, moved))
    ranges = codecs.sample_ranges(len(image))
    samples = [codecs.Sample(image[a:b], base[a:b]) for a, b in ranges]
    tried = codecs.candidates(dtype, samples, codecs.Policy(codecs=("planes", "xor", "diff", "prefix"), context=True))
    assert any("context" in codec.params for codec in tried)
    for codec in tried:
        if codec.name != "prefix" or level == codecs.FAST:
            check(codec, image, base if codec.base_ratio else None, level)


@pytest.mark.parametrize("word", [4, 8])
@pytest.mark.parametrize("most", [1, 2, 4, 16])
@pytest.mark.parametrize("level", [codecs.FAST, codecs.THRIFTY])
def test_random_low_halves(word: int, most: int, level: int) -> None:
    """Words whose low half is noise and whose high half is small, with exceptions: the form of halves."""
    rng, kind = np.random.default_rng(most), UNSIGNED[word]
    low = np.frombuffer(rng.bytes(70_000 * word // 2), UNSIGNED[word // 2]).astype(kind)
    high = np.minimum(rng.geometric(0.72, 70_000) - 1, most - 1).astype(kind)
    high[rng.random(70_000) < 0.01] = 300
    image = (low | high << kind_of(word, 4 * word)).view(np.uint8)
    check(codecs.Planes(word), image, None, level)


def kind_of(word: int, value: int) -> Any:
    return np.dtype(UNSIGNED[word]).type(value)


def test_all_forms_and_modes_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare is not a corner of the format."""
    modes, forms = set[int](), set[int]()
    monkeypatch.setitem(globals(), "piece", noting(modes, piece))
    monkeypatch.setitem(globals(), "group", noting(forms, group))
    for dtype in ("F32", "BF16", "F64", "U8"):
        for kind in CLASSES:
            test_hostile_values(dtype, kind)
    for dtype, scale in (("BF16", 1e-5), ("BF16", 1e-4), ("F32", 1e-7)):
        test_trained_values(dtype, scale, codecs.THRIFTY)
    for most in (1, 2, 4, 16):
        test_random_low_halves(4, most, codecs.THRIFTY)
    assert modes == set(range(7))
    assert {0, 1, 2, 4, 8, 16, 17, 18, 20, 24, 255} <= forms
    assert len(forms & {32, 33, 34, 36}) > 1


def noting(seen: set[int], decoder: Any) -> Any:
    def note(stored: Stored, *rest: Any) -> Any:
        seen.add(stored.data[stored.at])
        return decoder(stored, *rest)

    return note


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8"])
@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(["numbers", "sparse", "bits"]), st.integers(0, 2**32))
def test_damage_is_taken_alike(dtype: str, data: st.DataObject, kind: str, seed: int) -> None:
    """Both refuse the same payloads, and make the same of the others."""
    count = data.draw(st.sampled_from([3, 600, 5000]))
    base, image = pair(dtype, kind, "near" if seed % 2 else "few", count, seed)
    for codec in codecs_of(dtype):
        reference = base_of(codec, base)
        payload = bytearray(codecs.encode(codec, image, reference).tobytes())
        for _ in range(data.draw(st.integers(0, 3))):
            if payload:
                payload[data.draw(st.integers(0, min(len(payload), 60) - 1))] ^= data.draw(st.integers(1, 255))
        below = b"" if reference is None else reference.tobytes()
        if codec.name == "raw":
            continue
        try:
            expected = decode(codec.name, codec.params, bytes(payload), len(image), below)
        except RefusedError:
            with pytest.raises((CorruptSegmentError, FormatError)):
                codecs.decode(codec, bytes(payload), len(image), reference)
        else:
            assert codecs.decode(codec, bytes(payload), len(image), reference).tobytes() == expected


PARAMETERS = [
    ("raw", {}, True),
    ("raw", {"word": 1}, False),
    ("planes", {"word": 4}, True),
    ("planes", {"word": 3}, False),
    ("planes", {"word": True}, False),
    ("planes", {}, False),
    ("planes", {"word": 2, "map": "rotate"}, True),
    ("planes", {"word": 2, "map": "turn"}, False),
    ("xor", {"word": 8}, True),
    ("xor", {"word": 8, "map": "none"}, False),
    ("diff", {"word": 4, "context": [23, 100, 115]}, True),
    ("diff", {"word": 4, "context": [23, 100, 116]}, False),
    ("diff", {"word": 4, "context": [23, 100, 100]}, False),
    ("diff", {"word": 4, "context": [23, 250, 256]}, False),
    ("diff", {"word": 4, "context": [30, 0, 1]}, True),
    ("diff", {"word": 4, "context": [31, 0, 1]}, False),
    ("diff", {"word": 4, "context": [23, 100]}, False),
    ("prefix", {"word": 2, "bits": 12}, True),
    ("prefix", {"word": 2, "bits": 13}, False),
    ("prefix", {"word": 1, "bits": 8}, False),
    ("prefix", {"word": 4, "bits": 9, "group": 16384}, True),
    ("prefix", {"word": 4, "bits": 9, "group": 100}, False),
    ("derive", {"to": "F16"}, True),
    ("derive", {"to": "F32"}, False),
    ("else", {}, False),
]


@pytest.mark.parametrize(("name", "params", "allowed"), PARAMETERS, ids=str)
def test_parameters_are_those_of_the_page(name: str, params: dict[str, Any], allowed: bool) -> None:
    if allowed:
        assert codecs.codec(name, params).name == name
    else:
        with pytest.raises(FormatError):
            codecs.codec(name, params)
