"""SPEC.md 5.4 holds: a decoder written from the page alone reads the codecs' payloads, and refuses the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore.formats
from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import codecs
from ckptstore.formats.checksums import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.digest import digest
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length, parse
from tests.formats.codec_data import ALL_DTYPES, CHANGES, CLASSES, base_of, codecs_of, pair
from tools.conformance.page import codecs as page
from tools.conformance.page.codecs import UNSIGNED, Array, RefusedError, Stored, decode
from tools.golden import make_codecs
from tools.golden.golden_set import GoldenSet

# ---- golden payloads -------------------------------------------------------------------------------------------------

GOLDEN = Path(ckptstore.formats.__file__).parent / "golden"
Set = GoldenSet[make_codecs.Example]


def golden(folder: Path, name: str, listing: dict[str, Any]) -> tuple[bytes, SegmentDoc]:
    data, expected = (folder / name).read_bytes(), listing["segments"][name]
    header = data[: header_length(data, len(data), name)]
    assert (xxh3_128(data), header_hash(header)) == (expected["hash"], expected["header_hash"])
    return data, parse(header, len(data), name, lambda offset, length: data[offset : offset + length])


def decoded(folder: Path, one: Set) -> set[str]:
    """Decode a set by the page's decoder and by ours -> its codecs."""
    assert (folder / one.listing).exists(), f"{folder} has no {one.listing}: `make golden` makes it"
    listing = json.loads((folder / one.listing).read_text())
    data, doc = golden(folder, one.change, listing)
    below, older = golden(folder, one.base, listing)
    images: dict[str, bytes] = {}
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
    assert {name: xxh3_128(image) for name, image in images.items()} == listing["images"]
    return {entry.codec for entry in doc.tensors[11].values()}


def test_golden_payloads_stay_readable() -> None:
    """Together they hold every codec, and every form of group and mode of piece that is written."""
    found = set[str]().union(*(decoded(GOLDEN, one) for one in make_codecs.SETS))
    missing = {*codecs.CODECS} - found
    assert not missing, f"no golden file has {missing}: add a row to SETS in tools/golden/make_codecs.py"


def test_a_later_codec_gets_golden_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without a base: nothing is in the first segment."""
    (first,) = make_codecs.SETS[:1]
    example = make_codecs.Example("later", "U8", np.arange(99, dtype=np.uint8), codecs.Planes(1))
    later = Set("codecs-1-later.json", "later-base.safetensors", "later.safetensors", lambda: [example])
    monkeypatch.setattr(make_codecs, "SETS", (first, later))
    make_codecs.main(tmp_path)
    assert decoded(tmp_path, later) == {"planes"}
    assert decoded(tmp_path, first) == decoded(GOLDEN, first)


def test_the_golden_payloads_cover_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, forms = set[int](), set[int]()
    monkeypatch.setattr(page, "piece", noting(modes, page.piece))
    monkeypatch.setattr(page, "group", noting(forms, page.group))
    test_golden_payloads_stay_readable()
    assert modes == set(range(7))
    assert forms >= {0, 2, 4, 16, 20, 255}


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
    """Weights that an optimizer updated, in two blocks: every form of group that exists, and runs of classes."""
    kind = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("<f8")}[dtype]
    rng = np.random.default_rng(1)
    count = (1 << 20) // kind.itemsize + 30_000
    weights = rng.normal(0, 0.02, count) * np.where(rng.random(count) < 0.3, 0.01, 1)
    moved = weights + rng.normal(0, scale, count)
    base, image = (codecs.as_bytes(values.astype(kind)) for values in (weights, moved))
    ranges = codecs.sample_ranges(len(image))
    samples = [codecs.Sample(image[a:b], base[a:b]) for a, b in ranges]
    tried = codecs.candidates(dtype, samples, codecs.Policy(codecs=("planes", "xor", "sub", "prefix"), context=True))
    assert any("context" in codec.params for codec in tried)
    for codec in tried:
        if codec.name != "prefix" or level == codecs.FAST:
            check(codec, image, base if codec.base_ratio else None, level)


@pytest.mark.parametrize("word", [4, 8])
@pytest.mark.parametrize("most", [1, 2, 4, 16])
@pytest.mark.parametrize("level", [codecs.FAST, codecs.THRIFTY])
def test_random_low_halves(word: int, most: int, level: int) -> None:
    """Words whose low half is noise and whose high half is small, with exceptions."""
    rng, kind = np.random.default_rng(most), UNSIGNED[word]
    low = np.frombuffer(rng.bytes(70_000 * word // 2), UNSIGNED[word // 2]).astype(kind)
    high = np.minimum(rng.geometric(0.72, 70_000) - 1, most - 1).astype(kind)
    high[rng.random(70_000) < 0.01] = 300
    image = (low | high << kind_of(word, 4 * word)).view(np.uint8)
    check(codecs.Planes(word), image, None, level)


def kind_of(word: int, value: int) -> Any:
    return np.dtype(UNSIGNED[word]).type(value)


def test_all_forms_and_modes_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above compare more than a corner of the format."""
    modes, forms = set[int](), set[int]()
    monkeypatch.setattr(page, "piece", noting(modes, page.piece))
    monkeypatch.setattr(page, "group", noting(forms, page.group))
    for dtype in ("F32", "BF16", "F64", "U8"):
        for kind in CLASSES:
            test_hostile_values(dtype, kind)
    for dtype, scale in (("BF16", 1e-5), ("BF16", 1e-4), ("F32", 1e-7)):
        test_trained_values(dtype, scale, codecs.THRIFTY)
    for most in (1, 2, 4, 16):
        test_random_low_halves(4, most, codecs.THRIFTY)
    assert modes == set(range(7))
    assert forms == {0, 1, 2, 4, 8, 16, 20, 255}


def noting(seen: set[int], decoder: Any) -> Any:
    def note(stored: Stored, *rest: Any) -> Any:
        seen.add(stored.data[stored.at])
        return decoder(stored, *rest)

    return note


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8"])
@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(["numbers", "sparse", "bits"]), st.integers(0, 2**32))
def test_damage_is_taken_alike(dtype: str, data: st.DataObject, kind: str, seed: int) -> None:
    """Both refuse the same payloads, and decode the others alike."""
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
    ("sub", {"word": 4, "context": [23, 100, 115]}, True),
    ("sub", {"word": 4, "context": [23, 100, 116]}, False),
    ("sub", {"word": 4, "context": [23, 100, 100]}, False),
    ("sub", {"word": 4, "context": [23, 250, 256]}, False),
    ("sub", {"word": 4, "context": [30, 0, 1]}, True),
    ("sub", {"word": 4, "context": [31, 0, 1]}, False),
    ("sub", {"word": 4, "context": [23, 100]}, False),
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
