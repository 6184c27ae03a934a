"""Segments: as any safetensors reader sees them, as ours reads them, and the golden files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore.formats
from ckptstore.errors import CorruptSegmentError, FormatError, IncompatibleFormatError
from ckptstore.formats import dtypes
from ckptstore.formats.checksums import chunk_hash, header_hash, tensor_hash, xxh3_128
from ckptstore.formats.dtypes import DTYPES
from ckptstore.formats.history.members import MAX_TERM
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import (
    ALIGN,
    CHUNK,
    TensorSpec,
    chunk_count,
    chunk_extents,
    order,
    place,
    spec_of,
)
from ckptstore.formats.segment_files.segment import (
    Chunk,
    SegmentDoc,
    TensorEntry,
    check_header,
    encode_packed,
    encode_plain,
    fill_header,
    header_length,
    parse,
    plan_packed,
    plan_plain,
    raw_entry,
)
from ckptstore.formats.segment_files.segment_index import MAX_CHUNKS, MAX_ENTRIES
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from tests.forms import short_or
from tools.golden import make_segments

GOLDEN = Path(ckptstore.formats.__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "segments-1.json").read_text())
FULL = StepEncoding(1, "full")
DRAFT = SegmentDoc("0" * 32, 1, "1" * 32, {100: FULL}, trees={100: {"lr": 0.5}})


def nothing_to_read(offset: int, length: int) -> NoReturn:
    raise AssertionError("a plain segment has no index")


def read(data: bytes, where: str = "segment") -> SegmentDoc:
    header = data[: header_length(data[:8], len(data), where)]
    return parse(header, len(data), where, lambda offset, length: data[offset : offset + length])


def write_plain(images: Mapping[TensorSpec, bytes], draft: SegmentDoc = DRAFT) -> tuple[bytes, SegmentDoc]:
    layout = plan_plain(images, draft)
    tensors = {
        spec.name: raw_entry(layout, spec, [chunk_hash(images[spec][a : a + n]) for a, n in chunk_extents(spec.nbytes)])
        for spec in layout.specs
    }
    doc = replace(draft, tensors={draft.steps[0]: tensors})
    data = encode_plain(layout, doc) + b"".join(images[spec] for spec in layout.specs)
    assert len(data) == layout.size
    return data, doc


def image(spec: TensorSpec) -> bytes:
    values = np.random.default_rng(len(spec.name) + spec.nbytes).integers(0, 256, spec.nbytes, np.uint8)
    return (values & 1 if spec.dtype == "BOOL" else values).tobytes()


def specs_of_every_kind() -> list[TensorSpec]:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (4, 33), (2, 3, 64)]
    return [TensorSpec(f"{name}.{shape}", name, shape) for name in DTYPES for shape in shapes]


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[TensorSpec, bytes]]:
    images = {spec: image(spec) for spec in specs_of_every_kind()}
    path = tmp_path_factory.mktemp("segments") / "every-kind.safetensors"
    path.write_bytes(write_plain(images)[0])
    return path, images


def test_torch_loads_every_dtype_under_its_own_name(every_kind: tuple[Path, dict[TensorSpec, bytes]]) -> None:
    torch = pytest.importorskip("torch")
    path, images = every_kind
    with safetensors.safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(spec.name for spec in images)
        assert file.metadata()["format"] == "pt"
        for spec, expected in images.items():
            tensor = file.get_tensor(spec.name)
            assert tuple(tensor.shape) == dtypes.storage_shape(dtypes.get(spec.dtype), spec.shape)
            assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == expected


def test_numpy_loads_every_dtype_that_it_has(every_kind: tuple[Path, dict[TensorSpec, bytes]]) -> None:
    path, images = every_kind
    with safetensors.safe_open(path, "np") as file:
        for spec, expected in images.items():
            stored = dtypes.get(spec.dtype)
            assert tuple(file.get_slice(spec.name).get_shape()) == dtypes.storage_shape(stored, spec.shape)
            if not stored.storage.startswith("F8_"):  # safetensors knows these only for torch
                assert file.get_tensor(spec.name).tobytes() == expected


def test_ours_reads_what_it_wrote(every_kind: tuple[Path, dict[TensorSpec, bytes]]) -> None:
    path, images = every_kind
    data = path.read_bytes()
    doc = read(data)
    for spec, expected in images.items():
        entry = doc.tensors[100][spec.name]
        assert (entry.dtype, entry.shape, entry.codec, entry.nbytes) == (spec.dtype, spec.shape, "raw", spec.nbytes)
        assert b"".join(data[chunk.offset : chunk.offset + chunk.length] for chunk in entry.chunks) == expected
        assert entry.hash == tensor_hash([chunk_hash(expected)] if expected else [])
    assert doc.trees == {100: {"lr": 0.5}}


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__" and not name.startswith("ckptstore/")
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
states = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=12)


@given(states, st.booleans())
@settings(deadline=None)
def test_any_state_is_a_valid_safetensors_file(state: dict[str, tuple[str, tuple[int, ...]]], shard: bool) -> None:
    specs = [
        TensorSpec(name, dtype, shape, *([tuple(n + 2 for n in shape), (1,) * len(shape)] if shard else []))
        for name, (dtype, shape) in state.items()
    ]
    images = {spec: image(spec) for spec in specs}
    data, doc = write_plain(images)
    assert read(data) == doc
    loaded = dict(safetensors.deserialize(data))
    assert {spec.name: bytes(loaded[spec.name]["data"]) for spec in specs} == {s.name: images[s] for s in specs}


def test_a_thousand_tensors_in_any_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    codes = ["F32", "BF16", "U8", "I64"]
    rows = [(f"layer.{row}", codes[row % 4], tuple(rng.integers(0, 20, 2).tolist())) for row in range(1000)]
    images = {spec: image(spec) for spec in (TensorSpec(*row) for row in rows)}
    path = tmp_path / "thousand.safetensors"
    data, doc = write_plain(images)
    path.write_bytes(data)
    loaded = safetensors.numpy.load_file(path)
    assert {spec.name: loaded[spec.name].tobytes() for spec in images} == {s.name: images[s] for s in images}
    assert read(data) == doc


def test_the_header_is_sized_before_hashes_are_known_and_quickly() -> None:
    specs = [TensorSpec(f"model.layers.{row}.weight", "F32", (2500, 1000)) for row in range(1000)]  # 10 GB
    draft = replace(DRAFT, trees={100: {spec.name: {"$t": spec.name} for spec in specs}})
    best = [1.0, 1.0]
    for _ in range(5):
        layout = plan_plain(specs, draft)
        tensors = {spec.name: raw_entry(layout, spec, ["f" * 16] * chunk_count(spec.nbytes), 1) for spec in specs}
        planned = time.thread_time()
        header = encode_plain(layout, replace(draft, tensors={100: tensors}))
        encoded = time.thread_time()
        doc = parse(header, layout.size, "segment", nothing_to_read)
        best = [min(best[0], encoded - planned), min(best[1], time.thread_time() - encoded)]
    assert len(header) == layout.header_size
    assert layout.header_size - len(header.rstrip(b" ")) < ALIGN
    assert doc == replace(draft, tensors={100: tensors})
    assert max(best) < 0.1, "encoding and parsing take about 10 and 20 ms; far more means something is quadratic"


def test_a_tensor_of_many_chunks_opens_elsewhere(tmp_path: Path) -> None:
    spec = TensorSpec("big", "U8", (2 * CHUNK + 5,))
    layout = plan_plain([spec], DRAFT)
    entry = raw_entry(layout, spec, ["0" * 16, "1" * 16, "2" * 16])
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(encode_plain(layout, replace(DRAFT, tensors={100: {"big": entry}})))
        file.truncate(layout.size)
    with safetensors.safe_open(path, "np") as file:
        assert file.get_slice("big").get_shape() == [2 * CHUNK + 5]
    with path.open("rb") as file:
        doc = parse(file.read(layout.header_size), layout.size, "big", nothing_to_read)
    assert doc.tensors[100]["big"] == entry
    assert [chunk.logical for chunk in entry.chunks] == [CHUNK, CHUNK, 5]


def test_unplanned_entries_are_not_encoded() -> None:
    spec = TensorSpec("a", "U8", (4,))
    layout = plan_plain([spec], DRAFT)
    entry = raw_entry(layout, spec, ["0" * 16])

    def encode(doc: SegmentDoc) -> bytes:
        return encode_plain(layout, doc)

    with pytest.raises(FormatError, match="0 tensors, 1 were planned"):
        encode(DRAFT)
    with pytest.raises(FormatError, match="'a' was planned"):
        encode(replace(DRAFT, tensors={100: {"b": entry}}))
    (chunk,) = entry.chunks
    chunks = [
        (replace(chunk, offset=chunk.offset + 1),),
        (replace(chunk, length=3),),
        (replace(chunk, logical=5),),
        (replace(chunk, decoded_hash="1" * 16),),
        (chunk, chunk),
        (),
    ]
    others = [replace(entry, chunks=some) for some in chunks]
    others += [replace(entry, codec="xor"), replace(entry, dtype="I8"), replace(entry, params={"a": 1})]
    others += [replace(entry, name="b"), replace(entry, shape=(2, 2))]
    others += [replace(entry, global_shape=(8,), offset=(4,)), replace(entry, offset=(0,))]
    for other in others:
        with pytest.raises(FormatError, match="differs from its plan"):
            encode(replace(DRAFT, tensors={100: {"a": other}}))
    with pytest.raises(FormatError, match="chunk hash"):
        encode(replace(DRAFT, tensors={100: {"a": raw_entry(layout, spec, ["0" * 15 + "G"])}}))
    with pytest.raises(FormatError, match="2 hashes for 1 chunks"):
        raw_entry(layout, spec, ["0" * 16] * 2)
    longer = replace(DRAFT, trees={100: "x" * ALIGN}, tensors={100: {"a": entry}})
    for other in (longer, replace(longer, trees={100: "y"}), replace(DRAFT, term=2, tensors=longer.tensors)):
        with pytest.raises(FormatError, match="document differs from the planned one"):
            encode(other)
    with pytest.raises(FormatError, match="exceeds the"):
        encode_plain(place(layout.specs, layout.header_size), longer)
    with pytest.raises(FormatError, match="64-bit"):
        encode(replace(DRAFT, tensors={100: {"a": replace(entry, digest=1 << 64)}}))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "0" * 31},
        {"segment": "G" * 32},
        {"term": -1},
        {"generation": 1 << 54},
        {"encodings": {100: replace(FULL, base=CheckpointId(1, 2, "short"))}},
        {"encodings": {100: replace(FULL, kind=5)}},
        {"encodings": {100: replace(FULL, term=0)}},
        {"encodings": {100: replace(FULL, time=float("nan"))}},
        {"encodings": {100: replace(FULL, part=SegmentPart("1" * 32, 2, 2))}},
        {"encodings": {100: replace(FULL, part=SegmentPart("1" * 32, 0, 1))}},
        {"encodings": {100: replace(FULL, part=SegmentPart("1", 0, 2))}},
        {"parents": {2: None, 1: None}},
        {"parents": {0: None}},
        {"parents": {2: CheckpointId(2, 5, "0" * 32)}},
    ],
)
def test_a_document_that_could_not_be_read_back_is_not_planned(change: Mapping[str, Any]) -> None:
    with pytest.raises(FormatError):
        plan_plain([], replace(DRAFT, **change))
    with pytest.raises(FormatError):
        plan_packed(replace(DRAFT, **change))


def test_steps_ascend_and_a_plain_segment_has_one() -> None:
    with pytest.raises(FormatError, match="one step, not 2"):
        plan_plain([], replace(DRAFT, encodings={100: FULL, 101: FULL}))
    for steps in ((), (2, 1)):
        with pytest.raises(FormatError, match="ascending"):
            encode_packed(SegmentDoc("0" * 32, 1, "1" * 32, dict.fromkeys(steps, FULL)), 0, ALIGN)
    with pytest.raises(FormatError, match="other steps"):
        replace(DRAFT, encodings={101: FULL})


def test_a_tree_beyond_a_header_is_refused_when_planned() -> None:
    with pytest.raises(FormatError, match="a header of"):
        plan_plain([], replace(DRAFT, trees={100: "x" * (64 << 20)}))


def test_a_packed_header_or_index_beyond_its_limit_is_not_written() -> None:
    with pytest.raises(FormatError, match="a header of"):
        plan_packed(replace(DRAFT, encodings={100: replace(FULL, kind="x" * (64 << 20))}))
    with pytest.raises(FormatError, match="an index of"):
        encode_packed(replace(DRAFT, trees={100: "x" * (64 << 20)}), 0, plan_packed(DRAFT))


def test_more_entries_or_chunks_than_a_reader_takes_are_not_encoded() -> None:
    empty = TensorEntry("t", "U8", (0,), ())
    chunks = (Chunk(ALIGN, 0, CHUNK, chunk_hash(b""), None),) * (MAX_CHUNKS + 1)
    large = TensorEntry("t", "U8", (len(chunks) * CHUNK,), chunks, "xor")
    for tensors in (dict.fromkeys(map(str, range(MAX_ENTRIES + 1)), empty), {"t": large}):
        with pytest.raises(FormatError, match="too many"):
            encode_packed(replace(DRAFT, tensors={100: tensors}), 0, ALIGN)


def test_unknown_members_and_features_survive() -> None:
    draft = replace(DRAFT, extra={"later": {"x": [1, None, 0.5]}}, ro_compat=("unheard-of",))
    data, doc = write_plain({}, draft)
    assert read(data) == doc
    assert read(data).extra == {"later": {"x": [1, None, 0.5]}}
    with pytest.raises(FormatError, match="is a known member"):
        plan_plain([], replace(DRAFT, extra={"kinds": "x"}))
    header, index = encode_packed(draft, 0, plan_packed(draft))
    assert read(header + index).extra == draft.extra
    assert read(header + index).ro_compat == ("unheard-of",)


def test_newer_versions_and_features_are_refused() -> None:
    data, _ = write_plain({})
    for old, new in ((rb"\"version\":1", rb"\"version\":2"), (rb"\"incompat\":[],", rb"\"incompat\":[\"a\"],")):
        changed = data[8:].replace(old, new)[: len(data) - 8]
        assert changed != data[8:]
        with pytest.raises(IncompatibleFormatError):
            read(data[:8] + changed)
    with pytest.raises(IncompatibleFormatError):
        plan_plain([], replace(DRAFT, incompat=("a",)))


def test_an_ordinary_safetensors_file_is_not_a_segment() -> None:
    small = safetensors.numpy.save({"a": np.zeros(3)})
    with pytest.raises(FormatError, match="is not a multiple of 4096"):
        read(small)
    text = small[8 : 8 + int.from_bytes(small[:8], "little")].ljust(ALIGN - 8)
    with pytest.raises(FormatError, match="ordinary safetensors file"):
        read((ALIGN - 8).to_bytes(8, "little") + text + bytes(24))


def test_a_header_is_checked_against_its_hash() -> None:
    data, _ = write_plain({})
    check_header(data, header_hash(data), "s")
    with pytest.raises(CorruptSegmentError, match="its COMMIT record has"):
        check_header(data, "0" * 32, "s")


# ---- the packed form ----------------------------------------------------------------------------------------------


def write_packed(draft: SegmentDoc, steps: Mapping[int, Sequence[TensorEntry]]) -> tuple[bytes, SegmentDoc]:
    """A packed segment of entries that come with unplaced chunks; the payload is made of the chunks' lengths."""
    header_size = plan_packed(draft)
    position, tensors, payload = header_size, {}, b""
    for step, entries in steps.items():
        tensors[step] = {}
        for entry in entries:
            chunks = []
            for chunk in entry.chunks:
                stored = bytes((position + place) % 256 for place in range(chunk.length))
                hashed = chunk_hash(stored)
                decoded = hashed if entry.codec == "raw" else chunk.decoded_hash
                chunks.append(replace(chunk, offset=position, stored_hash=hashed, decoded_hash=decoded))
                position += chunk.length
                payload += stored
            tensors[step][entry.name] = replace(entry, chunks=tuple(chunks))
    doc = replace(draft, tensors=tensors)
    header, index = encode_packed(doc, len(payload), header_size)
    assert len(header) == header_size
    return header + payload + index, doc


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
params = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
hashes = st.none() | st.from_regex(r"[0-9a-f]{16}", fullmatch=True)


@st.composite
def entries(draw: st.DrawFn, name: str) -> TensorEntry:
    codec = draw(st.sampled_from(["raw", "xor", "planes"]))
    shape = draw(st.sampled_from([(), (0,), (5,), (3, 7)] if codec == "raw" else [(3,), (2 * CHUNK + 1,)]))
    spec = TensorSpec(name, draw(st.sampled_from(["U8", "BF16", "C64"])), shape)
    chunks = tuple(
        Chunk(0, n if codec == "raw" else draw(st.integers(0, 9)), n, "", draw(hashes))
        for _, n in chunk_extents(spec.nbytes)
    )
    whole, offset = (tuple(n + 1 for n in shape), (1,) * len(shape)) if draw(st.booleans()) else (None, None)
    digest = draw(st.none() | st.integers(0, 2**64 - 1))
    return TensorEntry(name, spec.dtype, shape, chunks, codec, draw(params), whole, offset, digest)


encodings = st.builds(
    StepEncoding,
    st.integers(1, MAX_TERM),
    st.sampled_from(["full", "delta", "later"]),
    st.none() | st.builds(CheckpointId, st.integers(1, 9), st.integers(0, 9), st.just("a" * 32)),
    st.floats(-(2.0**53), 2.0**53),
    st.booleans(),
    st.none() | st.builds(SegmentPart, st.just("b" * 32), st.integers(0, 3), st.integers(4, 9)),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[SegmentDoc, dict[int, list[TensorEntry]]]:
    steps = sorted(draw(st.sets(st.integers(0, 2**53), min_size=1, max_size=4)))
    tensors = {step: [draw(entries(name)) for name in sorted(draw(st.sets(names, max_size=3)))] for step in steps}
    trees = {step: draw(json_values) for step in steps if draw(st.booleans())}
    told = {step: draw(encodings) for step in steps}
    parents = draw(st.dictionaries(st.integers(2, 9), st.none() | st.just(CheckpointId(1, 3, "a" * 32)), max_size=3))
    doc = SegmentDoc("0" * 32, 1, "1" * 32, told, parents=dict(sorted(parents.items())), trees=trees)
    return doc, tensors


@given(batches())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_batch_comes_back(batch: tuple[SegmentDoc, dict[int, list[TensorEntry]]]) -> None:
    data, doc = write_packed(*batch)
    found = read(data)
    assert found == doc
    for step in doc.steps:  # == does not tell 1 from True
        for name, entry in doc.tensors[step].items():
            assert repr(found.tensors[step][name].params) == repr(entry.params)


def test_a_packed_segment_opens_elsewhere_and_pretends_nothing(tmp_path: Path) -> None:
    chunk = Chunk(0, 5, 12, "", None)
    data, _ = write_packed(DRAFT, {100: [TensorEntry("w", "F32", (3,), (chunk,), "xor")]})
    path = tmp_path / "packed.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["ckptstore/index", "ckptstore/payload"]
        assert file.get_tensor("ckptstore/payload").nbytes == 5


def test_twenty_steps_of_a_thousand_tensors_stay_small_and_quick() -> None:
    steps = tuple(range(100, 120))
    rng = np.random.default_rng(1)

    def entry(row: int, step: int) -> TensorEntry:
        length = int(rng.integers(1, 2000))
        chunk = Chunk(0, 0, 4000, chunk_hash(b""), rng.bytes(8).hex())
        return TensorEntry(f"model.layers.{row}.weight", "F32", (1000,), (replace(chunk, length=length),), "sparse")

    draft = replace(DRAFT, encodings=dict.fromkeys(steps, StepEncoding(1, "gradient")), trees={})
    header_size, position, tensors = plan_packed(draft), plan_packed(draft), {}
    for step in steps:
        tensors[step] = {}
        for row in range(1000):
            made = entry(row, step)
            chunk = replace(made.chunks[0], offset=position, stored_hash=rng.bytes(8).hex())
            tensors[step][made.name] = replace(made, chunks=(chunk,))
            position += chunk.length
    doc = replace(draft, tensors=tensors)
    start = time.thread_time()
    header, index = encode_packed(doc, position - header_size, header_size)
    encoded = time.thread_time()
    size = position + len(index)
    assert parse(header, size, "s", lambda offset, length: index if offset == position else b"") == doc
    assert len(index) < 20_000 * 21, "two hashes take 16 bytes; everything else together at most 5"
    assert encoded - start < 3
    assert time.thread_time() - encoded < 3


def test_a_header_is_planned_for_any_payload_and_generation() -> None:
    told = StepEncoding(MAX_TERM, "gradient", CheckpointId(MAX_TERM, 2**53, "f" * 32), -(2.0**53) / 3)
    many = replace(DRAFT, encodings=dict.fromkeys(range(2**53 - 299, 2**53 + 1), told), trees={})
    size = plan_packed(many)
    header, index = encode_packed(replace(many, generation=2**53), 0, size)
    assert len(header) == size > ALIGN
    assert read(header + index).encodings == many.encodings
    with pytest.raises(FormatError, match="exceeds the"):
        encode_packed(many, 0, plan_packed(DRAFT))


def test_chunks_lie_in_order_and_fill_the_payload() -> None:
    size = plan_packed(DRAFT)
    cell = "0" * 16

    def encode(*extents: tuple[int, int]) -> bytes:
        tensors = {
            f"t{row}": TensorEntry(f"t{row}", "U8", (9,), (Chunk(size + start, length, 9, cell, cell),), "xor")
            for row, (start, length) in enumerate(extents)
        }
        doc = replace(DRAFT, tensors={100: tensors})
        header, index = encode_packed(doc, 10, size)
        assert read(header + bytes(10) + index) == doc
        return header

    encode((0, 4), (4, 6))
    for extents in (
        [(4, 6), (0, 4)],
        [(0, 4)],
        [(0, 4), (5, 5)],
        [(0, 6), (4, 6)],
        [(0, 10), (10, 1)],
        [(-1, 11)],
        [(1, 9)],
    ):
        with pytest.raises(CorruptSegmentError, match=r"of a payload|expected at"):
            encode(*extents)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (TensorEntry("t", "U8", (9,), (), "xor"), "do not match its size of 9 bytes"),
        (TensorEntry("t", "U8", (9,), (Chunk(0, 0, 8, "0" * 16, None),), "xor"), "do not match its size of 9 bytes"),
        (TensorEntry("t", "U8", (9,), (Chunk(0, 0, 9, "0" * 16, None),), "xor"), "an empty chunk"),
        (TensorEntry("t", "U8", (9,), (Chunk(0, -1, 9, "0" * 16, None),), "xor"), "chunk of -1 bytes"),
        (TensorEntry("t", "U8", (9,), (Chunk(0, 8, 9, "0" * 16, "0" * 16),)), "raw chunk"),
        (TensorEntry("t", "U8", (9,), (Chunk(0, 9, 9, "0" * 16, "1" * 16),)), "raw chunk"),
        (TensorEntry("t", "XX", (9,), (Chunk(0, 9, 9, "0" * 16, "0" * 16),)), "dtype"),
    ],
)
def test_an_entry_that_could_not_be_read_back_is_not_encoded(entry: TensorEntry, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        encode_packed(replace(DRAFT, tensors={100: {"t": entry}}), 9, ALIGN)


def test_a_tensor_whose_decoded_hashes_are_unknown_has_no_hash() -> None:
    entry = TensorEntry("t", "U8", (9,), (Chunk(0, 1, 9, "0" * 16, None),), "xor")
    assert (entry.stored, entry.nbytes) == (1, 9)
    with pytest.raises(FormatError, match="'t'"):
        _ = entry.hash


# ---- golden files -------------------------------------------------------------------------------------------------


def as_json(doc: SegmentDoc) -> Any:
    listed = {step: dict(own) for step, own in doc.tensors.items()}  # of a packed segment they are made when needed
    return json.loads(json.dumps(asdict(replace(doc, tensors=listed))))


@pytest.mark.parametrize("name", EXPECTED["segments"])
def test_golden_segments_stay_readable(name: str) -> None:
    data, expected = (GOLDEN / name).read_bytes(), EXPECTED["segments"][name]
    header = data[: header_length(data, len(data), name)]
    assert (len(data), len(header), xxh3_128(data)) == (expected["size"], expected["header"], expected["hash"])
    check_header(header, expected["header_hash"], name)
    doc = read(data, name)
    assert as_json(doc) == expected["doc"]
    for tensors in doc.tensors.values():
        for entry in tensors.values():
            for chunk in entry.chunks:
                assert chunk_hash(data[chunk.offset : chunk.offset + chunk.length]) == chunk.stored_hash
    assert {key for key, _ in safetensors.deserialize(data)} == (
        {"ckptstore/payload", "ckptstore/index"} if "packed" in name else set(doc.tensors[doc.steps[0]])
    )


@pytest.mark.parametrize("name", EXPECTED["segments"])
def test_golden_segments_are_encoded_again_byte_for_byte(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    doc, header_size = read(data, name), header_length(data, len(data), name)
    if "plain" in name:
        tensors = doc.tensors[doc.steps[0]]
        in_access_order = [TensorSpec(e.name, e.dtype, e.shape, e.global_shape, e.offset) for e in tensors.values()]
        digests = any(entry.digest is not None for entry in tensors.values())
        layout = plan_plain(in_access_order, doc, digests=digests)
        assert (layout.size, encode_plain(layout, doc)) == (len(data), data[:header_size])
        return
    payload = sum(entry.stored for tensors in doc.tensors.values() for entry in tensors.values())
    header, index = encode_packed(doc, payload, plan_packed(doc))
    stored = data[header_size + payload :]
    assert zstandard.decompress(index) == zstandard.decompress(stored)
    if list(zstandard.ZSTD_VERSION) == EXPECTED["zstd"]:
        assert (header, index) == (data[:header_size], stored)


def test_the_script_makes_the_golden_segments(tmp_path: Path) -> None:
    make_segments.main(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= set(EXPECTED["segments"])
    if list(zstandard.ZSTD_VERSION) != EXPECTED["zstd"]:
        pytest.skip("another version of zstd compresses to other bytes")
    for name in made:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name


@settings(deadline=None, max_examples=short_or(40, 400))
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from("abc"), st.sampled_from(["F32", "I32", "C64"]), st.sampled_from([(), (2,), (1, 2)])
            ),
            max_size=3,
            unique_by=lambda row: row[0],
        ),
        min_size=2,
        max_size=4,
    )
)
def test_what_is_remembered_of_tensors_is_never_used_for_others(
    lists: list[list[tuple[str, str, tuple[int, ...]]]],
) -> None:
    """Names, dtypes, shapes or the order may differ from the segment before: the header is that of these tensors."""
    for rows in lists:
        specs = [spec_of(*row) for row in rows]
        layout = plan_plain(specs, DRAFT)
        hashes = [f"{number:016x}" for number in range(len(specs))]
        header = fill_header(layout, DRAFT, hashes, list(range(len(specs))))
        found = parse(header, layout.size, "a segment", lambda _at, _length: b"").tensors[100]
        assert [(one.name, one.dtype, one.shape) for one in found.values()] == [
            (spec.name, spec.dtype, spec.shape) for spec in order([TensorSpec(*row) for row in rows])
        ]
        assert [one.chunks[0].stored_hash for one in found.values()] == hashes
        assert [one.digest for one in found.values()] == list(range(len(specs)))
        assert encode_plain(layout, replace(DRAFT, tensors={100: found})) == header
    with pytest.raises(FormatError, match="hashes"):
        fill_header(plan_plain([], DRAFT), DRAFT, ["0" * 16], [])
