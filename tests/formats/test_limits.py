"""Every limit of SPEC section 12, and of the tables before it: exactly its value is accepted, one more is refused.

Nothing here is as large as its limit: a refusal is for a number that the input states, and an accepted input is refused
later, for another reason. If a limit is checked on existing bytes, they are zeros that the system lends and nothing
touches, or the text is one long string.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import zstandard

from ckptstore.errors import CorruptSegmentError, FormatError, UnsupportedStateError
from ckptstore.formats import codecs, jsontext, optim
from ckptstore.formats.checksums import chunk_hash, xxh3_128
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.history.members import MAX_INT, MAX_TERM
from ckptstore.formats.history.record_text import MANIFEST_LIMIT, SLOT_LIMIT
from ckptstore.formats.history.records import (
    CheckpointId,
    CommitRecord,
    FormatFile,
    OpenRecord,
    PinRecord,
    Request,
    valid_tag,
)
from ckptstore.formats.optim.step_settings import MAX_SCALES
from ckptstore.formats.segment_files.layout import (
    ALIGN,
    CHUNK,
    HEADER_LIMIT,
    MAX_DIMENSIONS,
    MAX_SIZE,
    SEGMENT_LIMIT,
    TensorSpec,
    split,
)
from ckptstore.formats.segment_files.segment import (
    Chunk,
    SegmentDoc,
    TensorEntry,
    encode_packed,
    header_length,
    parse,
    plan_packed,
    plan_plain,
)
from ckptstore.formats.segment_files.segment_doc import MAX_DOC_DEPTH
from ckptstore.formats.segment_files.segment_index import MAX_CHUNKS, MAX_ENTRIES
from ckptstore.formats.segment_files.segment_packed import INDEX_LIMIT
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.states import state

RUN, ID = "0" * 32, "1" * 32
DRAFT = SegmentDoc(run=RUN, term=1, segment=ID, encodings={7: StepEncoding(1, "full")}, trees={7: {}})
COMMIT = {"ckptstore": "commit", "run": RUN, "seq": 1, "previous": "0" * 32, "term": 1, "nonce": ID}


def nothing(offset: int, length: int) -> bytes:
    """The index bytes of a file without an index."""
    return b""


def nested(levels: int) -> Any:
    """Lists inside lists, so many levels of JSON."""
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


# ---- JSON -------------------------------------------------------------------------------------------------------


def test_nesting_and_length_of_json() -> None:
    deepest = b"[" * jsontext.MAX_DEPTH + b"]" * jsontext.MAX_DEPTH
    assert jsontext.loads(deepest, what="it", max_bytes=len(deepest)) == nested(jsontext.MAX_DEPTH)
    with pytest.raises(FormatError, match="nested deeper than 256"):
        jsontext.loads(b"[" + deepest + b"]", what="it", max_bytes=1 << 20)
    with pytest.raises(FormatError, match="at most 511"):
        jsontext.loads(deepest, what="it", max_bytes=len(deepest) - 1)


@pytest.mark.parametrize("sign", ["", "-"])
def test_digits_of_an_integer(sign: str) -> None:
    longest = sign + "9" * 4300
    assert jsontext.loads(longest.encode(), what="it", max_bytes=9999) == int(longest)
    with pytest.raises(FormatError, match="a number of 4301 digits"):
        jsontext.loads(f"{longest}9".encode(), what="it", max_bytes=9999)
    tree = state.flatten(int(longest)).tree
    assert tree == {"$int": longest}
    assert state.unflatten(tree, nothing) == int(longest)
    with pytest.raises(UnsupportedStateError, match="4300 digits"):
        state.flatten(int(longest) + int(f"{sign}1"))
    with pytest.raises(FormatError, match=r"\$int"):
        state.unflatten({"$int": f"{longest}9"}, nothing)


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_without_a_tag(sign: int) -> None:
    assert state.flatten(sign * 2**53).tree == sign * 2**53
    assert state.unflatten(sign * 2**53, nothing) == sign * 2**53
    assert state.flatten(sign * (2**53 + 1)).tree == {"$int": str(sign * (2**53 + 1))}
    with pytest.raises(FormatError, match="without a tag"):
        state.unflatten(sign * (2**53 + 1), nothing)
    with pytest.raises(FormatError, match="small"):
        state.unflatten({"$int": str(sign * 2**53)}, nothing)


# ---- state ------------------------------------------------------------------------------------------------------


def test_nesting_of_a_tree() -> None:
    assert state.unflatten(nested(state.MAX_DEPTH + 1), nothing) == nested(state.MAX_DEPTH + 1)  # 200 levels below it
    with pytest.raises(FormatError, match="nested deeper than 200"):
        state.unflatten(nested(state.MAX_DEPTH + 2), nothing)
    for kind in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}, lambda inner: {"a": inner}):
        value: Any = 0
        for _ in range(state.MAX_DEPTH):
            deeper = kind(value)
            try:
                tree = state.flatten(deeper).tree
            except UnsupportedStateError:
                break
            value = deeper
        else:
            pytest.fail("no depth is too deep")
        assert state.unflatten(state.flatten(value).tree, nothing) == value, "what is written can be read"
        assert len(jsontext.dumps(tree)) > 0


@pytest.mark.parametrize("kind", [list, tuple])
def test_integers_are_packed_from_32(kind: Callable[[range], Any]) -> None:
    few, many = kind(range(31)), kind(range(32))
    assert "$ints" not in jsontext.dumps(state.flatten(few).tree).decode()
    packed = state.flatten(many).tree
    assert list(packed) == ["$ints"]
    assert state.unflatten(packed, nothing) == many
    name, code, _ = packed["$ints"]
    with pytest.raises(FormatError, match="31 numbers"):
        state.unflatten({"$ints": [name, code, "AAEC" * 10 + "AA=="]}, nothing)


@pytest.mark.parametrize(
    ("code", "low", "high"),
    [(f"u{size}", 0, 256**size - 1) for size in (1, 2, 4, 8)]
    + [(f"i{size}", -(256**size // 2), 256**size // 2 - 1) for size in (1, 2, 4, 8)],
)
def test_the_narrowest_integers_that_hold_all(code: str, low: int, high: int) -> None:
    low = min(low, 0)
    inside = [low, high, *range(30)] if code[0] == "u" else [low, *range(31)]
    packed = state.flatten(inside).tree
    assert packed["$ints"][1] == code
    assert state.unflatten(packed, nothing) == inside
    beyond = [high + 1, *range(31)] if code[0] == "u" else [low - 1, *range(31)]
    wider = state.flatten(beyond).tree
    assert "$ints" not in wider or wider["$ints"][1] != code
    assert state.unflatten(wider, nothing) == beyond
    narrow = ["list", code, np_base64([*beyond[1:], 1], code)]
    if code not in ("u1",):
        with pytest.raises(FormatError, match=f"do not need {code}"):
            state.unflatten({"$ints": narrow}, nothing)


def np_base64(values: list[int], code: str) -> str:
    import base64

    return base64.b64encode(np.array(values, f"<{code}").tobytes()).decode()


# ---- tensors ----------------------------------------------------------------------------------------------------


def test_dimensions_and_sizes() -> None:
    assert TensorSpec("a", "U8", (1,) * MAX_DIMENSIONS).nbytes == 1
    with pytest.raises(FormatError, match="65 dimensions"):
        TensorSpec("a", "U8", (1,) * (MAX_DIMENSIONS + 1))
    factors = (6361, 69431, 20394401)
    assert TensorSpec("a", "U8", factors).nbytes == MAX_SIZE - 1 == TensorSpec("a", "U8", (MAX_SIZE - 1,)).nbytes
    for shape in ((MAX_SIZE,), (1 << 26, 1 << 27), (1 << 26, 1 << 27, 0), (0, MAX_SIZE)):
        with pytest.raises(FormatError, match="out of range"):
            TensorSpec("a", "U8", shape)
    assert TensorSpec("a", "F64", ((MAX_SIZE >> 3) - 1,)).nbytes == MAX_SIZE - 8
    with pytest.raises(FormatError, match="bytes are too many"):
        TensorSpec("a", "F64", (MAX_SIZE >> 3,))


def test_a_shard_may_end_where_its_tensor_ends() -> None:
    assert TensorSpec("a", "U8", (3,), (MAX_SIZE - 1,), (MAX_SIZE - 4,)).offset == (MAX_SIZE - 4,)
    assert TensorSpec("a", "U8", (3,), (3,), (0,)).global_shape == (3,)
    for whole, offset in (((MAX_SIZE - 1,), (MAX_SIZE - 3,)), ((3,), (1,)), ((3,), (-1,)), ((MAX_SIZE,), (0,))):
        with pytest.raises(FormatError):
            TensorSpec("a", "U8", (3,), whole, offset)


@pytest.mark.parametrize("over", [0, 1])
def test_a_segment_is_filled_to_its_limit(over: int) -> None:
    space = SEGMENT_LIMIT - HEADER_LIMIT
    specs = [
        TensorSpec(f"t{row}", "U8", (size,)) for row, size in enumerate((space // 2, space - space // 2 - 3, 3 + over))
    ]
    assert [len(part) for part in split(specs)] == ([2, 1] if over else [3])
    assert [len(part) for part in split(specs, limit=space + over)] == [3]


@pytest.mark.parametrize("letters", [0, 1])
def test_names_fill_half_a_header(letters: int) -> None:
    """Every name is counted as if each letter took two escapes, as the longest do, and 400 bytes for the rest."""
    first = TensorSpec("\U0001f600" * 1_398_064, "U8", ())
    second = TensorSpec("b" * (1_398_064 + letters), "U8", (1,))
    described = [400 + 12 * len(spec.name) + 64 * len(spec.shape) + 16 for spec in (first, second)]
    assert sum(described) == HEADER_LIMIT // 2 + 12 * letters
    assert [len(part) for part in split([first, second])] == ([1, 1] if letters else [2])


# ---- segments ---------------------------------------------------------------------------------------------------


def test_length_of_a_header() -> None:
    assert header_length(struct.pack("<Q", HEADER_LIMIT - 8), HEADER_LIMIT, "file") == HEADER_LIMIT
    with pytest.raises(FormatError, match="up to 67108864"):
        header_length(struct.pack("<Q", HEADER_LIMIT + ALIGN - 8), 1 << 62, "file")
    with pytest.raises(CorruptSegmentError, match="within its header"):
        header_length(struct.pack("<Q", HEADER_LIMIT - 8), HEADER_LIMIT - 1, "file")
    assert header_length(struct.pack("<Q", ALIGN - 8), ALIGN, "file") == ALIGN
    with pytest.raises(CorruptSegmentError, match="length field"):
        header_length(struct.pack("<Q", ALIGN - 8)[:7], ALIGN, "file")


@pytest.mark.parametrize("plan", [plan_packed, lambda doc: plan_plain([], doc).header_size], ids=["packed", "plain"])
def test_a_header_is_planned_up_to_its_limit(plan: Callable[[SegmentDoc], int]) -> None:
    def of_kind(letters: int) -> SegmentDoc:
        return replace(DRAFT, encodings={7: StepEncoding(1, "x" * letters)})

    letters = 1 + HEADER_LIMIT - plan(of_kind(1))
    assert plan(of_kind(letters)) == HEADER_LIMIT
    with pytest.raises(FormatError, match="at most 67108864"):
        plan(of_kind(letters + ALIGN))


def test_an_index_is_encoded_up_to_its_limit() -> None:
    def encode(letters: int) -> int:
        header, index = encode_packed(replace(DRAFT, trees={7: "x" * letters}), 0, plan_packed(DRAFT))
        document = json.loads(json.loads(header[8:])["__metadata__"]["ckptstore"])
        assert len(index) < 1 << 20
        return int(document["index"]["length"])

    most = INDEX_LIMIT - encode(0)
    assert encode(most) == INDEX_LIMIT
    with pytest.raises(FormatError, match="at most 67108864"):
        encode(most + 1)


def packed(index: dict[str, Any] | bytes, *, stored: int | None = None, length: int | None = None) -> Any:
    """Read a packed segment without payload that has this index, or claims one of other sizes."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    frame = zstandard.compress(text)
    claimed = len(frame) if stored is None else stored
    header, _ = encode_packed(DRAFT, 0, plan_packed(DRAFT))
    members = json.loads(header[8:])
    document = json.loads(members["__metadata__"]["ckptstore"])
    document["index"] |= {"length": len(text) if length is None else length, "hash": xxh3_128(frame)}
    members["__metadata__"]["ckptstore"] = json.dumps(document)
    members["ckptstore/index"] |= {"shape": [claimed], "data_offsets": [0, claimed]}
    header = header[:8] + json.dumps(members).encode().ljust(len(header) - 8)
    return parse(header, len(header) + claimed, "file", lambda offset, length: frame)


def columns(**changed: Any) -> dict[str, Any]:
    empty = {"trees": {}, "tensors": [], "codecs": [], "counts": [0], "tensor": [], "codec": [], "length": []}
    return {**empty, "stored": "", "decoded": "", **changed}


def test_sizes_of_an_index_that_is_read() -> None:
    assert packed(columns()).tensors == {7: {}}
    for stored in (INDEX_LIMIT, INDEX_LIMIT + 1):
        allowed = stored == INDEX_LIMIT
        with pytest.raises((FormatError, CorruptSegmentError)) as refused:
            packed(columns(), stored=stored, length=INDEX_LIMIT + 1 if allowed else 1)
        # Read, and refused for its contents; or not even read.
        assert ("not compressed with zstd" in str(refused.value)) is allowed, refused.value
    with pytest.raises(FormatError, match="does not hold 67108864"):
        packed(columns(), length=INDEX_LIMIT)
    with pytest.raises(FormatError, match="more than 67108864"):
        packed(columns(), length=INDEX_LIMIT + 1)


def test_nesting_of_a_document_and_of_an_index() -> None:
    def document(levels: int) -> SegmentDoc:
        draft = replace(DRAFT, trees={}, extra={"later": nested(levels - 1)})
        header, index = encode_packed(replace(draft, extra={}), 0, plan_packed(draft))
        members = json.loads(header[8:])
        text = json.loads(members["__metadata__"]["ckptstore"]) | {"later": nested(levels - 1)}
        members["__metadata__"]["ckptstore"] = json.dumps(text)
        header = header[:8] + json.dumps(members).encode().ljust(len(header) - 8)
        return parse(header, len(header) + len(index), "file", lambda offset, length: index)

    assert document(MAX_DOC_DEPTH).extra["later"] == nested(MAX_DOC_DEPTH - 1)
    assert packed(columns(later=nested(MAX_DOC_DEPTH - 1))).extra["later"] == nested(MAX_DOC_DEPTH - 1)
    with pytest.raises(FormatError, match="nested deeper than 264"):
        document(MAX_DOC_DEPTH + 1)
    with pytest.raises(FormatError, match="nested deeper than 264"):
        packed(columns(later=nested(MAX_DOC_DEPTH)))


def test_entries_of_a_packed_segment() -> None:
    for entries in (MAX_ENTRIES, MAX_ENTRIES + 1):
        with pytest.raises(FormatError) as refused:
            packed(columns(counts=[entries]))
        assert ("at most 1048576" in str(refused.value)) is (entries > MAX_ENTRIES), refused.value
        entry = TensorEntry("t", "U8", (9,), ())  # has one chunk, and claims none
        with pytest.raises(FormatError) as refused:
            encode_packed(replace(DRAFT, tensors={7: dict.fromkeys(map(str, range(entries)), entry)}), 0, ALIGN)
        assert ("too many" in str(refused.value)) is (entries > MAX_ENTRIES), refused.value


def test_chunks_of_a_packed_segment() -> None:
    for chunks in (MAX_CHUNKS, MAX_CHUNKS + 1):
        large = columns(
            tensors=[["t", "U8", [chunks * CHUNK]]], codecs=[["xor", {}]], counts=[1], tensor=[0], codec=[0], length=[1]
        )
        with pytest.raises(FormatError) as refused:
            packed(large)
        assert ("at most 1048576" in str(refused.value)) is (chunks > MAX_CHUNKS), refused.value
        cells = (Chunk(ALIGN, 0, CHUNK, chunk_hash(b"-"), None),) * chunks  # no bytes, and another hash than theirs
        entry = TensorEntry("t", "U8", (chunks * CHUNK,), cells, "xor")
        with pytest.raises(FormatError) as refused:
            encode_packed(replace(DRAFT, tensors={7: {"t": entry}}), 0, ALIGN)
        assert ("too many" in str(refused.value)) is (chunks > MAX_CHUNKS), refused.value


@pytest.mark.parametrize("number", [MAX_INT, MAX_INT + 1])
def test_numbers_in_a_document(number: int) -> None:
    def of_step(step: int, term: int, base: CheckpointId | None = None) -> dict[str, Any]:
        return {"encodings": {step: StepEncoding(term, "full", base)}, "trees": {}}

    term = number if number > MAX_INT else MAX_TERM
    below = CheckpointId(term, number, ID)
    doc = replace(DRAFT, generation=number, term=term, **of_step(number, term, below))
    if number > MAX_INT:
        for changed, member in (
            (of_step(number, 1), "steps"),
            (of_step(7, number), "terms"),
            (of_step(7, 1, below._replace(step=1)), "bases"),
            (of_step(7, 1, below._replace(term=1)), "bases"),
            ({"generation": number}, "generation"),
            ({"term": number}, "term"),
        ):
            with pytest.raises(FormatError, match=f"'{member}'"):
                plan_packed(replace(DRAFT, **changed))
        return
    header, index = encode_packed(doc, 0, plan_packed(doc))
    assert parse(header, len(header) + len(index), "file", lambda offset, length: index) == replace(
        doc, tensors={number: {}}
    )


# ---- texts of the store -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "taken"),
    [
        (MAX_INT, True),
        (-MAX_INT, True),
        (float(MAX_INT), True),
        (-float(MAX_INT), True),
        (MAX_INT + 1, False),
        (-MAX_INT - 1, False),
        (float(MAX_INT + 2), False),
        (-float(MAX_INT + 2), False),
    ],
)
def test_times(time: float, taken: bool) -> None:
    data = record_text.encode_open(OpenRecord(1, None, ID, time, {}), seq=0, run=RUN)
    if taken:
        assert record_text.decode_record(data, seq=0, run=RUN, what="slot") == OpenRecord(1, None, ID, time, {})
    else:
        with pytest.raises(FormatError, match="time"):
            record_text.decode_record(data, seq=0, run=RUN, what="slot")


@pytest.mark.parametrize("term", [0, 1, MAX_TERM, MAX_TERM + 1])
def test_terms_in_records(term: int) -> None:
    slot = record_text.encode_open(OpenRecord(term, None, ID, 0, {}), seq=0, run=RUN)
    if 1 <= term <= MAX_TERM:
        assert record_text.decode_record(slot, seq=0, run=RUN, what="slot").term == term
    else:
        with pytest.raises(FormatError, match="term"):
            record_text.decode_record(slot, seq=0, run=RUN, what="slot")


@pytest.mark.parametrize("number", [0, 1, MAX_INT, MAX_INT + 1])
def test_numbers_in_records(number: int) -> None:
    file = record_text.encode_format(FormatFile(RUN, anchor_every=number))
    if 1 <= number <= MAX_INT:
        assert record_text.decode_format(file).anchor_every == number
    else:
        with pytest.raises(FormatError, match="anchor_every"):
            record_text.decode_format(file)


@pytest.mark.parametrize("step", [-1, 0, MAX_INT, MAX_INT + 1])
def test_steps_in_records(step: int) -> None:
    data = record_text.seal(COMMIT | {"retires": [[1, step]]})
    if 0 <= step <= MAX_INT:
        found = record_text.decode_record(data, seq=1, run=RUN, what="slot")
        assert isinstance(found, CommitRecord)
        assert found.retires == ((1, step),)
    else:
        with pytest.raises(FormatError, match="retires"):
            record_text.decode_record(data, seq=1, run=RUN, what="slot")


def test_length_of_a_slot() -> None:
    def opened(letters: int) -> bytes:
        return record_text.encode_open(OpenRecord(1, None, ID, 0, {"host": "x" * letters}), seq=0, run=RUN)

    most = SLOT_LIMIT - len(opened(0))
    data = opened(most)
    assert len(data) == SLOT_LIMIT
    assert record_text.decode_record(data, seq=0, run=RUN, what="slot").term == 1
    with pytest.raises(FormatError, match="at most 262144"):
        opened(most + 1)
    longer = record_text.seal(json.loads(data[:-34]) | {"writer": {"host": "x" * (most + 1)}})
    with pytest.raises(FormatError, match="at most 262144"):
        record_text.decode_record(longer, seq=0, run=RUN, what="slot")


def test_a_commit_longer_than_a_slot_has_a_manifest() -> None:
    def committed(letters: int) -> tuple[bytes, bytes | None]:
        record = CommitRecord(term=1, nonce=ID, extra={"later": "x" * letters})
        return record_text.encode_commit(record, seq=1, run=RUN, manifest="2" * 32)

    most = SLOT_LIMIT - len(committed(0)[0])
    slot, manifest = committed(most)
    assert (len(slot), manifest) == (SLOT_LIMIT, None)
    slot, manifest = committed(most + 1)
    assert manifest is not None
    assert len(slot) < 1000 < SLOT_LIMIT < len(manifest) == SLOT_LIMIT + 1
    found = record_text.decode_record(slot, seq=1, run=RUN, what="slot", fetch=lambda key, size: manifest)
    assert found.extra == {"later": "x" * (most + 1)}


@pytest.mark.parametrize("size", [MANIFEST_LIMIT, MANIFEST_LIMIT + 1])
def test_length_of_a_manifest(size: int) -> None:
    asked: list[int] = []

    def fetch(key: str, size: int) -> bytes:
        asked.append(size)
        return b""

    slot = record_text.seal(COMMIT | {"manifest": {"id": "2" * 32, "size": size, "hash": "0" * 32}})
    with pytest.raises(FormatError, match="a manifest of 268435457 bytes" if size > MANIFEST_LIMIT else "checksum"):
        record_text.decode_record(slot, seq=1, run=RUN, what="slot", fetch=fetch)
    assert asked == ([size] if size == MANIFEST_LIMIT else [])


def test_a_manifest_is_encoded_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit: at the real one, a record and its copies would take a gigabyte."""
    limit = SLOT_LIMIT + 1000
    monkeypatch.setattr(record_text, "MANIFEST_LIMIT", limit)

    def encoded(letters: int) -> int:
        record = CommitRecord(term=1, nonce=ID, extra={"later": "x" * letters})
        slot, manifest = record_text.encode_commit(record, seq=1, run=RUN, manifest="2" * 32)
        return len(manifest or slot)

    most = limit - encoded(0)
    assert encoded(most) == limit
    with pytest.raises(FormatError, match=f"at most {limit}"):
        encoded(most + 1)


@pytest.mark.parametrize("kind", ["request", "pin"])
def test_length_of_a_request_and_a_pin(kind: str) -> None:
    for size in (MANIFEST_LIMIT, MANIFEST_LIMIT + 1):
        zeros: Any = memoryview(bytes(size))  # lent by the system and never written
        decode = partial(record_text.decode_request, run=RUN) if kind == "request" else record_text.decode_pin
        with pytest.raises(FormatError) as refused:
            decode(zeros, what="it")
        assert ("at most 268435456" in str(refused.value)) is (size > MANIFEST_LIMIT), refused.value


@pytest.mark.parametrize(
    ("more", "most"),
    [
        (0, 1073741824),  # as many bytes as the limit needs at 64 for each, and 1 MiB besides
        (1, 1073741824),  # more of them allow no more
        (-1, 1073741824 - 64),
    ],
)
def test_size_of_a_fold(more: int, most: int) -> None:
    stored = (1073741824 - 1048576) // 64 + more
    for size in (most, most + 1):
        # One frame; it states that size, and is empty. Behind it zeros.
        frame = (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00").ljust(stored, b"\0")
        digest = xxh3_128(frame)
        data = b"ckptstore fold\n" + digest.encode() + b"\n" + frame
        assert folds.intact(data, digest[:16])
        with pytest.raises(FormatError) as refused:
            folds.decode_fold(data, seq=0, run=RUN, digest16=digest[:16], what="fold")
        assert (f"at most {most} are allowed" in str(refused.value)) is (size > most), refused.value


@pytest.mark.parametrize(
    ("tag", "valid"),
    [
        ("", False),
        ("a", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a\n", False),
        ("_x.+/-", True),
        *((f"{first}x", False) for first in ".+/-"),
    ],
)
def test_names_of_tags(tag: str, valid: bool) -> None:
    assert valid_tag(tag) is valid
    request = Request(ID, 1, "a test", (), (), (), (), {tag: (1, 1)})
    data = record_text.encode_request(request, run=RUN)
    if valid:
        assert record_text.decode_request(data, run=RUN, what="it").tags == {tag: (1, 1)}
    else:
        with pytest.raises(FormatError, match="tag"):
            record_text.decode_request(data, run=RUN, what="it")


def test_a_pin_names_any_number_of_segments() -> None:
    pin = PinRecord(ID, tuple(f"{number:032x}" for number in range(20_000)), {})  # longer than a slot may be
    data = record_text.encode_pin(pin)
    assert len(data) > SLOT_LIMIT
    assert record_text.decode_pin(data, what="it") == pin


# ---- codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("sub", {"word": 4, "context": [23, 0, 15]}, {"word": 4, "context": [23, 0, 16]}),  # 16 classes
        ("sub", {"word": 4, "context": [23, 0, 1]}, {"word": 4, "context": [23, 0, 0]}),  # and 2
        ("sub", {"word": 4, "context": [30, 0, 1]}, {"word": 4, "context": [31, 0, 1]}),  # shift
        ("sub", {"word": 4, "context": [23, 240, 255]}, {"word": 4, "context": [23, 241, 256]}),  # the highest class
        ("sub", {"word": 8, "context": [0, 65520, 65535]}, {"word": 8, "context": [0, 65521, 65536]}),
        ("sub", {"word": 1, "context": [6, 0, 1]}, {"word": 1, "context": [7, 0, 1]}),
        ("sub", {"word": 8, "context": [0, 0, 1]}, {"word": 8, "context": [0, -1, 0]}),
        ("prefix", {"word": 4, "bits": 1}, {"word": 4, "bits": 0}),
        ("prefix", {"word": 4, "bits": 12}, {"word": 4, "bits": 13}),
        ("prefix", {"word": 1, "bits": 7}, {"word": 1, "bits": 8}),
        ("prefix", {"word": 4, "bits": 9, "group": 256}, {"word": 4, "bits": 9, "group": 128}),
        ("prefix", {"word": 4, "bits": 9, "group": 16384}, {"word": 4, "bits": 9, "group": 32768}),
        ("planes", {"word": 8}, {"word": 16}),
        ("planes", {"word": 1}, {"word": 0}),
        ("xor", {"word": 2}, {"word": 3}),
    ],
)
def test_parameters_of_codecs(name: str, taken: dict[str, Any], refused: dict[str, Any]) -> None:
    assert codecs.codec(name, taken).name == name
    with pytest.raises(FormatError, match=r"parameter|class|prefix"):
        codecs.codec(name, refused)


@pytest.mark.parametrize("length", [1, codecs.BLOCK, codecs.BLOCK + 1])
def test_a_payload_is_no_longer_than_its_chunk_and_16_bytes_for_each_block(length: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    blocks = -(-length // codecs.BLOCK)
    for name in ("planes", "prefix", "xor", "sub"):
        codec = codecs.codec(name, {"word": 1} | ({"bits": 7} if name == "prefix" else {}))
        base = np.zeros(length, np.uint8)
        payload = codecs.encode(codec, image, base)
        assert len(payload) <= length + 16 * blocks
        assert (codecs.decode(codec, payload, length, base) == image).all()


def test_length_of_a_chunk() -> None:
    codec = codecs.codec("xor", {"word": 4})
    zeros = np.zeros(codecs.CHUNK + 4, np.uint8)
    image = zeros[: codecs.CHUNK]
    assert not len(codecs.encode(codec, image, image))
    assert not codecs.decode(codec, b"", len(image), image).any()
    with pytest.raises(ValueError, match="at most 16777216"):
        codecs.encode(codec, zeros, zeros)
    with pytest.raises(FormatError, match="at most 16777216"):
        codecs.decode(codec, b"", len(zeros), zeros)


# ---- optimizers -------------------------------------------------------------------------------------------------


def test_numbers_of_a_step() -> None:
    assert optim.Step(count=1, lr=0.1).count == 1
    assert optim.Step(count=2**53, lr=0.1).count == 2**53
    for count in (0, 2**53 + 1):
        with pytest.raises(ValueError, match="counted"):
            optim.Step(count=count, lr=0.1)
    for bad in ({"lr": float("inf")}, {"lr": 0.1, "loss_scale": 0.0}, {"lr": 0.1, "loss_scale": float("inf")}):
        with pytest.raises(ValueError, match="finite"):
            optim.Step(count=1, **bad)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_betas(kind: Any) -> None:
    below = float(np.nextafter(1.0, 0.0))
    for betas in ((0.0, 0.0), (below, below)):
        assert (kind(*betas).beta1, kind(*betas).beta2) == betas
        rule = kind(*betas).rule(optim.Step(count=3, lr=0.1))
        assert optim.rule(rule.params) == rule
    for betas in ((-5e-324, 0.5), (0.5, -5e-324), (1.0, 0.5), (0.5, 1.0), (float("nan"), 0.5), (0.5, float("nan"))):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            kind(*betas)


def test_parameters_of_rules() -> None:
    adam = optim.Adam().rule(optim.Step(count=3, lr=0.1)).params
    highest = (1 << 32) - 1
    assert len(optim.rule(adam | {"scales": [1] * MAX_SCALES}).params["scales"]) == MAX_SCALES == 4
    assert optim.rule(adam | {"eps": 0}).params["eps"] == 0
    assert optim.rule(adam | {"eps": highest - (1 << 31)}).params["eps"] == highest - (1 << 31)
    for changed in ({"scales": [1] * (MAX_SCALES + 1)}, {"eps": highest + 1}, {"eps": -1}, {"eps": True}):
        with pytest.raises(FormatError, match="parameter"):
            optim.rule(adam | changed)
    longest = ["x" * 200, *"abcdefg"]
    assert optim.rule({"rule": "skip/1", "slots": longest}).slots == tuple(longest)
    assert optim.rule({"rule": "skip/1", "slots": ["a"]}).slots == ("a",)
    for slots in ([], [*longest, "h"], ["x" * 201], [1]):
        with pytest.raises(FormatError, match="slots"):
            optim.rule({"rule": "skip/1", "slots": slots})
