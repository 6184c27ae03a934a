"""Damaged and forged segments: a typed error or right content; no crash, no hang, no allocation by a claimed length."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore.formats
from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import chunk_hash, header_hash, xxh3_128
from ckptstore.formats.history.members import Members
from ckptstore.formats.segment_files.layout import ALIGN, CHUNK, HEADER_LIMIT
from ckptstore.formats.segment_files.segment import SegmentDoc, check_header, encode_packed, header_length, parse
from ckptstore.formats.segment_files.segment_index import MAX_CHUNKS, MAX_ENTRIES
from ckptstore.formats.segment_files.segment_steps import StepEncoding, read_steps, step_columns
from tests.forms import LONG, short_or

GOLDEN = Path(ckptstore.formats.__file__).parent / "golden"
SEGMENTS = {path.stem.removeprefix("segment-1-"): path.read_bytes() for path in sorted(GOLDEN.glob("segment-1-*"))}
PLAIN = [name for name in SEGMENTS if name.startswith("plain")]
PACKED = [name for name in SEGMENTS if name.startswith("packed")]


def sampled(places: range, name: str) -> Iterable[int]:
    """Both ends and 500 places between, others for each name; all with ``CKPTSTORE_TESTS=long``."""
    if len(places) <= 500 or LONG:
        return places
    return {places[0], places[-1], *random.Random(name).sample(places, 500)}


def read(data: bytes, size: int | None = None) -> SegmentDoc:
    size = len(data) if size is None else size
    header = data[: header_length(data[:8], size, "file")]
    return parse(header, size, "file", lambda offset, length: data[offset : offset + length])


def check_everything(data: bytes, committed: str) -> None:
    """The checks of a reader that trusts only the COMMIT record."""
    check_header(data[: header_length(data, len(data), "file")], committed, "file")
    for tensors in read(data).tensors.values():
        for entry in tensors.values():
            for chunk in entry.chunks:
                stored = data[chunk.offset : chunk.offset + chunk.length]
                if chunk_hash(stored) != chunk.stored_hash:
                    raise CorruptSegmentError(f"{entry.name}: chunk at {chunk.offset}")


def assert_sound(doc: SegmentDoc, data: bytes) -> None:
    """Everything accepted lies inside the file, each byte in at most one chunk, and is consistent."""
    extents = []
    for step, tensors in doc.tensors.items():
        assert step in doc.steps
        for name, entry in tensors.items():
            assert entry.name == name
            assert sum(chunk.logical for chunk in entry.chunks) == entry.nbytes
            assert all(0 < chunk.logical <= CHUNK for chunk in entry.chunks)
            extents += [(chunk.offset, chunk.offset + chunk.length) for chunk in entry.chunks if chunk.length]
    ends = [0]
    for start, end in sorted(extents):
        assert ends[-1] <= start < end <= len(data)
        ends.append(end)


def try_to_read(data: bytes) -> None:
    try:
        doc = read(data)
    except (FormatError, CorruptSegmentError) as error:
        message = str(error)
    else:
        message = ""
        assert_sound(doc, data)
    assert len(message) < 2000


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_change_of_any_byte_is_noticed(name: str) -> None:
    data = SEGMENTS[name]
    committed = header_hash(data[: header_length(data, len(data), name)])
    check_everything(data, committed)
    for place in sampled(range(len(data)), name):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises((FormatError, CorruptSegmentError)):
            check_everything(bytes(damaged), committed)


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_change_of_any_header_byte_is_survived_without_the_hash(name: str) -> None:
    data = SEGMENTS[name]
    text_end = len(data[: header_length(data, len(data), name)].rstrip(b" ")) + 2
    for place in sampled(range(text_end), name):
        value = (data[place] ^ 1 << place % 8, ord('"'), ord("9"))[place % 3]
        try_to_read(data[:place] + bytes([value]) + data[place + 1 :])


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_cut_file_is_refused_at_every_length(name: str) -> None:
    data = SEGMENTS[name]
    header = header_length(data, len(data), name)
    for size in {*range(0, header, 97), *sampled(range(header, len(data)), name)}:
        with pytest.raises(CorruptSegmentError):
            read(data[:size])
    with pytest.raises(CorruptSegmentError):
        read(data + b"\0")


@given(st.binary(max_size=64), st.integers(0, 1 << 64))
def test_no_prefix_makes_a_huge_header(prefix: bytes, size: int) -> None:
    try:
        length = header_length(prefix, size, "file")
    except (FormatError, CorruptSegmentError):
        return
    assert length <= min(HEADER_LIMIT, size)


@pytest.mark.parametrize("length", [0, 1, ALIGN, HEADER_LIMIT, 1 << 63, (1 << 64) - 1, (1 << 64) - 8])
def test_impossible_header_lengths_are_refused(length: int) -> None:
    with pytest.raises(FormatError, match="is not a multiple"):
        header_length(struct.pack("<Q", length), 1 << 62, "file")


@pytest.mark.parametrize("first", [b" ", b"\t"])
def test_a_header_begins_with_its_object(first: bytes) -> None:
    data = SEGMENTS["plain-no-tensors"]
    header = header_length(data, len(data), "file")
    text = data[8:header].rstrip(b" ")
    moved = data[:8] + (first + text).ljust(header - 8) + data[header:]
    with pytest.raises(FormatError, match="not a JSON object"):
        read(moved)


def test_a_file_that_ends_within_its_header_is_cut() -> None:
    prefix = struct.pack("<Q", 2 * ALIGN - 8)
    assert header_length(prefix, 2 * ALIGN, "file") == 2 * ALIGN
    for size in (0, 7, 8, ALIGN, 2 * ALIGN - 1):
        with pytest.raises(CorruptSegmentError, match="within its"):
            header_length(prefix, size, "file")


def test_a_header_of_another_length_than_it_says_is_refused() -> None:
    data = SEGMENTS[PLAIN[0]]
    for header in (data[:8], data[:ALIGN], data):
        with pytest.raises(CorruptSegmentError, match="bytes were passed as its header"):
            parse(header, len(data), "file", lambda offset, length: b"")


# ---- forgery: JSON that is well-formed, with right hashes -----------------------------------------------------------


def opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """(header, document, remaining bytes) of a segment."""
    end = header_length(data, len(data), "file")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["ckptstore"]), data[end:]


def closed(header: Any, document: Any, rest: bytes) -> bytes:
    """A segment of these; `document` replaces the header's if it is not None."""
    if document is not None:
        header = {**header, "__metadata__": {"format": "pt", "ckptstore": json.dumps(document)}}
    text = json.dumps(header).encode()
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    return struct.pack("<Q", size - 8) + text.ljust(size - 8) + rest


def opened_index(data: bytes) -> Any:
    header, _, rest = opened(data)
    return json.loads(zstandard.decompress(rest[header["ckptstore/payload"]["shape"][0] :]))


def with_index(data: bytes, text: bytes, stored: bytes | None = None, length: int | None = None) -> bytes:
    """`data` with another index: `text`, or the bytes `stored` under a valid hash with the claim `length`."""
    header, document, rest = opened(data)
    payload = header["ckptstore/payload"]["shape"][0]
    stored = zstandard.compress(text) if stored is None else stored
    document.pop("uses", None)  # of the other index
    document["index"] |= {"length": len(text) if length is None else length, "hash": xxh3_128(stored)}
    header["ckptstore/index"] |= {"shape": [len(stored)], "data_offsets": [payload, payload + len(stored)]}
    return closed(header, document, rest[:payload] + stored)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of JSON `value` with `new` (REMOVE: nothing) at `path`."""
    if not path:
        return new
    copy = value.copy()
    if len(path) == 1 and new is REMOVE:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


REMOVE = object()
nasty = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            -1,
            0,
            1,
            2,
            1.0,
            1e308,
            2**31,
            2**53,
            2**63,
            2**64,
            10**30,
            "",
            "-",
            "0" * 16,
            "-" * 16,
            "\ud800",
        ]
    ),
    st.sampled_from([[], {}, [[]], [None], [0, 1 << 60], [1 << 20] * 4, [-1, -2], {"a": 1}, [["t", "U8", [1 << 52]]]]),
    st.integers(-5, 10),
    st.text(max_size=3),
    st.lists(st.integers(-1, 1 << 54), max_size=4),
)


@given(st.data())
@settings(max_examples=short_or(160, 400), deadline=None)
def test_any_value_anywhere_in_a_plain_header_is_survived(data: st.DataObject) -> None:
    header, document, rest = opened(SEGMENTS[data.draw(st.sampled_from(PLAIN))])
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            document = changed(document, data.draw(st.sampled_from(list(paths(document))[1:])), data.draw(nasty))
        else:
            header = changed(header, data.draw(st.sampled_from(list(paths(header))[1:])), data.draw(nasty))
            document = None if data.draw(st.booleans()) else document
        if not isinstance(document, dict):
            break
    try_to_read(closed(header, document, rest))


@given(st.data())
@settings(max_examples=short_or(160, 400), deadline=None)
def test_any_value_anywhere_in_a_packed_index_is_survived(data: st.DataObject) -> None:
    segment = SEGMENTS["packed-batch"]
    index = opened_index(segment)
    for _ in range(data.draw(st.integers(1, 3))):
        index = changed(index, data.draw(st.sampled_from(list(paths(index))[1:])), data.draw(nasty))
    try_to_read(with_index(segment, json.dumps(index).encode()))


@pytest.mark.parametrize("name", SEGMENTS)
def test_any_member_may_be_missing(name: str) -> None:
    header, document, rest = opened(SEGMENTS[name])
    for path in list(paths(header))[1:]:
        try_to_read(closed(changed(header, path, REMOVE), None, rest))
    for path in list(paths(document))[1:]:
        try_to_read(closed(header, changed(document, path, REMOVE), rest))
    if name in PACKED:
        index = opened_index(SEGMENTS[name])
        for path in list(paths(index))[1:]:
            try_to_read(with_index(SEGMENTS[name], json.dumps(changed(index, path, REMOVE)).encode()))


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("document", [None, True, 3, "x", [], {}, [[[]]], {"version": 1}])
def test_a_document_of_another_type_is_refused(name: str, document: Any) -> None:
    header, _, rest = opened(SEGMENTS[name])
    for text in (json.dumps(document), "", "{", json.dumps({"version": 1}) * 2):
        forged = {**header, "__metadata__": {"format": "pt", "ckptstore": text}}
        with pytest.raises(FormatError):
            read(closed(forged, None, rest))
    for metadata in (document, {"ckptstore": document if not isinstance(document, str) else 1}):
        with pytest.raises(FormatError):
            read(closed({**header, "__metadata__": metadata}, None, rest))


COLUMNS = ("terms", "kinds", "times", "bases")
PLAIN_FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "overlap": lambda h, d: h["replicated"].update(data_offsets=[16, 32]),
    "hole": lambda h, d: h["w"].update(data_offsets=[48, 112]),
    "backwards": lambda h, d: h["z"].update(data_offsets=[24, 0]),
    "negative": lambda h, d: h["z"].update(data_offsets=[-24, 0]),
    "beyond": lambda h, d: h["w"].update(shape=[1 << 40], data_offsets=[40, 40 + (4 << 40)]),
    "short": lambda h, d: (h["w"].update(shape=[15], data_offsets=[40, 100]), d.update(shards=[])),
    "huge": lambda h, d: h["replicated"].update(shape=[1 << 52], data_offsets=[24, 24]),
    "product": lambda h, d: h["replicated"].update(shape=[1 << 40, 1 << 40]),
    "dimensions": lambda h, d: h["replicated"].update(shape=[1] * 65),
    "dtype": lambda h, d: h["z"].update(dtype="F128"),
    "dtype of another type": lambda h, d: h["z"].update(dtype=["F32"]),
    "stored otherwise": lambda h, d: h["z"].update(dtype="U32"),
    "another trailing dimension": lambda h, d: h["z"].update(shape=[3, 3]),
    "no trailing dimension": lambda h, d: h["z"].update(shape=[6]),
    "native complex": lambda h, d: (h["z"].update(dtype="C64"), d.update(dtypes=[])),
    "row beyond": lambda h, d: d.update(dtypes=[[9, "C64"]]),
    "shard outside": lambda h, d: d.update(shards=[[2, [3, 8], [2, 0]]]),
    "shard of other rank": lambda h, d: d.update(shards=[[2, [16], [4]]]),
    "too few hashes": lambda h, d: d.update(hashes=d["hashes"][16:]),
    "too many hashes": lambda h, d: d.update(hashes=d["hashes"] + "0" * 16),
    "no hash": lambda h, d: d.update(hashes="-" * len(d["hashes"])),
    "upper case": lambda h, d: d.update(hashes="A" * len(d["hashes"])),
    "other digits": lambda h, d: d.update(hashes="٣" * len(d["hashes"])),
    "digests": lambda h, d: d.update(digests="0" * 17),
    "another tree": lambda h, d: d.update(trees={"102": {}}),
    "tree with a sign": lambda h, d: d.update(trees={"+101": {}}),
    "two steps": lambda h, d: d.update({name: 2 * d[name] for name in COLUMNS} | {"steps": [101, 102]}),
    "form": lambda h, d: d.update(form="packed"),
    "reserved name": lambda h, d: h.update({"ckptstore/x": h.pop("replicated")}),
    "further field": lambda h, d: h["z"].update(strides=[1]),
    "step": lambda h, d: d.update(steps=[True]),
    "base of term 0": lambda h, d: d.update(bases=[[0, 3, "a" * 32]]),
    "base of a true term": lambda h, d: d.update(bases=[[True, 3, "a" * 32]]),
    "base of a negative step": lambda h, d: d.update(bases=[[1, -3, "a" * 32]]),
    "base of another type": lambda h, d: d.update(bases=[{"term": 1, "step": 3, "state": "a" * 32}]),
    "base without a state": lambda h, d: d.update(bases=[[1, 3]]),
    "base of an odd state": lambda h, d: d.update(bases=[[1, 3, "a" * 31]]),
    **{f"fewer {name}": (lambda h, d, name=name: d.update({name: []})) for name in COLUMNS},
    **{f"more {name}": (lambda h, d, name=name: d.update({name: d[name] * 2})) for name in COLUMNS},
    "term 0": lambda h, d: d.update(terms=[0]),
    "a true term": lambda h, d: d.update(terms=[True]),
    "a kind of another type": lambda h, d: d.update(kinds=[1]),
    "a time of another type": lambda h, d: d.update(times=["now"]),
    "a time beyond all": lambda h, d: d.update(times=[1e300]),
    "another step is lossy": lambda h, d: d.update(lossy=[102]),
    "lossy as it was": lambda h, d: d.update(lossy=True),
    "lossy twice": lambda h, d: d.update(lossy=[101, 101]),
    "a part of another step": lambda h, d: d.update(parts=[[102, "b" * 32, 0, 2]]),
    "a part of one": lambda h, d: d.update(parts=[[101, "b" * 32, 0, 1]]),
    "a part beyond all": lambda h, d: d.update(parts=[[101, "b" * 32, 2, 2]]),
    "a part of something": lambda h, d: d.update(parts=[[101, "b", 0, 2]]),
    "two parts of a step": lambda h, d: d.update(parts=[[101, "b" * 32, 0, 2]] * 2),
    "a parent of term 0": lambda h, d: d.update(parents=[[0, None]]),
    "two parents": lambda h, d: d.update(parents=[[3, None]] * 2),
    "a parent of its own term": lambda h, d: d.update(parents=[[3, [3, 1, "a" * 32]]]),
    "a parent without a state": lambda h, d: d.update(parents=[[3, [2, 1]]]),
}


@pytest.mark.parametrize("forgery", PLAIN_FORGERIES)
def test_forged_plain_headers_are_refused(forgery: str) -> None:
    header, document, rest = opened(SEGMENTS["plain-shards"])
    assert list(header) == ["__metadata__", "z", "replicated", "w"]
    PLAIN_FORGERIES[forgery](header, document)
    with pytest.raises((FormatError, CorruptSegmentError)):
        read(closed(header, document, rest))


def column(name: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index[name].__setitem__(place, value)


PACKED_FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "negative length": column("length", 0, -20),
    "longer": column("length", 0, 21),
    "length of another type": column("length", 0, True),
    "no such tensor": column("tensor", 0, 10**6),
    "negative tensor": column("tensor", 0, -1),
    "no such codec": column("codec", 0, 10**6),
    "another tensor": lambda i: i.update(tensor=[i["tensor"][1], *i["tensor"][1:]]),
    "more entries than columns": column("counts", 0, 1 << 19),
    "too many entries": column("counts", 0, 1 << 50),
    "fewer steps": lambda i: i.update(counts=[8]),
    "chunks by the million": lambda i: i["tensors"][0].__setitem__(2, [1 << 52]),
    "raw of another length": lambda i: i["tensors"].__setitem__(2, ["raw", "I64", [4]]),
    "a name of another type": lambda i: i["tensors"].__setitem__(0, [7, "U8", [1]]),
    "a lone surrogate": lambda i: i["tensors"].__setitem__(0, ["\ud800", "BF16", [10]]),
    "parameters of another type": lambda i: i["codecs"].__setitem__(0, ["sparse", []]),
    "codec of another type": lambda i: i["codecs"].__setitem__(0, [None, {}]),
    "stored": lambda i: i.update(stored=i["stored"][1:]),
    "stored unknown": lambda i: i.update(stored="-" * len(i["stored"])),
    "decoded": lambda i: i.update(decoded="-" * 8 + "0" * 8 + i["decoded"][16:]),
    "digests": lambda i: i.update(digests=""),
    "trees": lambda i: i.update(trees={"7": {}}),
    "the header's member": lambda i: i.update(mood=1),
}


@pytest.mark.parametrize("forgery", PACKED_FORGERIES)
def test_forged_indices_are_refused(forgery: str) -> None:
    segment = SEGMENTS["packed-batch"]
    header, document, rest = opened(segment)
    segment = closed(header, document | {"mood": 0}, rest)
    index = opened_index(segment)
    assert read(with_index(segment, json.dumps(index).encode())).extra.keys() == {"mood", "later"}
    PACKED_FORGERIES[forgery](index)
    with pytest.raises((FormatError, CorruptSegmentError)):
        read(with_index(segment, json.dumps(index).encode()))


PACKED_HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another tensor": lambda h: h.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "no index": lambda h: h.pop("ckptstore/index"),
    "index elsewhere": lambda h: h["ckptstore/index"].update(data_offsets=[0, h["ckptstore/index"]["shape"][0]]),
    "payload elsewhere": lambda h: h["ckptstore/payload"].update(data_offsets=[1, 88]),
    "payload of another type": lambda h: h.update({"ckptstore/payload": 87}),
    "payload of other bytes": lambda h: h["ckptstore/payload"].update(dtype="I8"),
    "payload of two dimensions": lambda h: h["ckptstore/payload"].update(shape=[87, 1]),
    "longer payload": lambda h: h["ckptstore/payload"].update(shape=[88], data_offsets=[0, 88]),
}


@pytest.mark.parametrize("forgery", PACKED_HEADERS)
def test_forged_packed_headers_are_refused(forgery: str) -> None:
    header, _, rest = opened(SEGMENTS["packed-batch"])
    assert header["ckptstore/payload"] == {"dtype": "U8", "shape": [87], "data_offsets": [0, 87]}
    PACKED_HEADERS[forgery](header)
    with pytest.raises((FormatError, CorruptSegmentError)):
        read(closed(header, None, rest))


def test_an_index_that_says_another_codec_is_not_guessed_at() -> None:
    header, document, rest = opened(SEGMENTS["packed-batch"])
    document["index"]["codec"] = "lz4"
    with pytest.raises(FormatError, match="not compressed with zstd"):
        read(closed(header, document, rest))


def index_of_one_step(shape: list[int], entries: int, chunks: int) -> bytes:
    """An index of `entries` entries of one tensor, with `chunks` chunks in all, none of which has stored bytes."""
    zeros = [0] * entries
    columns = {"counts": [entries], "tensor": zeros, "codec": zeros, "length": [0] * chunks, "stored": ""}
    tables = {"trees": {}, "tensors": [["a", "U8", shape]], "codecs": [["zero", {}]]}
    return json.dumps(tables | columns | {"decoded": "-" * 16 * chunks}).encode()


def test_a_tensor_stands_once_in_a_step() -> None:
    segment = SEGMENTS["packed-no-payload"]
    assert list(read(with_index(segment, index_of_one_step([0], 1, 0))).tensors[300]) == ["a"]
    with pytest.raises(FormatError, match="a tensor twice"):
        read(with_index(segment, index_of_one_step([0], 2, 0)))


def test_entries_and_chunks_are_counted_before_they_are_made() -> None:
    segment = SEGMENTS["packed-no-payload"]
    with pytest.raises(FormatError, match="entries, at most"):
        read(with_index(segment, index_of_one_step([0], MAX_ENTRIES + 1, 0)))
    shape = [(MAX_CHUNKS + 1) * CHUNK]
    with pytest.raises(FormatError, match="chunks, at most"):
        read(with_index(segment, index_of_one_step(shape, 1, MAX_CHUNKS + 1)))


# ---- inputs that would make a careless reader allocate, recurse or loop ---------------------------------------------


def refused_within(data: bytes, megabytes: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, CorruptSegmentError)):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < megabytes << 20
    finally:
        tracemalloc.stop()


def frame_that_lies(claimed: int, held: int) -> bytes:
    """A zstd frame of one run-length block that claims `claimed` bytes and would give `held` (at most 128 KiB each)."""
    head = struct.pack("<IB", 0xFD2FB528, 0b11100000) + struct.pack("<Q", claimed)
    blocks = [min(1 << 17, held - at) for at in range(0, held, 1 << 17)]
    body = b"".join(
        (size << 3 | 1 << 1 | (row == len(blocks) - 1)).to_bytes(3, "little") + b"[" for row, size in enumerate(blocks)
    )
    return head + body


@pytest.mark.parametrize(
    ("claimed_by_header", "claimed_by_frame", "held"),
    [
        (1 << 40, 1 << 40, 1 << 20),  # both claim a terabyte
        (100, 1 << 40, 1 << 20),  # the frame claims a terabyte
        (100, 100, 1 << 30),  # the frame holds more than it claims
        (1 << 26, 1 << 26, 1 << 10),  # less than it claims: the claim is allocated, and no more
        (10, (1 << 64) - 2, 10),
    ],
)
def test_decompression_bombs_are_refused(claimed_by_header: int, claimed_by_frame: int, held: int) -> None:
    assert zstandard.decompress(frame_that_lies(1 << 18, 1 << 18)) == b"[" * (1 << 18)
    stored = frame_that_lies(claimed_by_frame, held)
    refused_within(with_index(SEGMENTS["packed-batch"], b"", stored, claimed_by_header), 70)


def test_frames_of_unknown_size_or_with_a_tail_are_refused() -> None:
    segment = SEGMENTS["packed-batch"]
    text = json.dumps(opened_index(segment)).encode()
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(text)
    whole = zstandard.compress(text)
    read(with_index(segment, text))
    for stored in (unknown, whole + b"\0", whole + whole, whole[:-1], b"", b"\0" * 20, text):
        with pytest.raises(FormatError):
            read(with_index(segment, text, stored))


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"$tuple":[', b""), (b"[", b"")])
def test_deep_json_is_refused_everywhere(opening: bytes, closing: bytes) -> None:
    deep = opening * 20_000 + b"0" + closing * 20_000
    header, document, rest = opened(SEGMENTS[PLAIN[0]])
    text = json.dumps(document).encode()[:-1] + b',"deep":' + deep + b"}"
    forged = {**header, "__metadata__": {"format": "pt", "ckptstore": text.decode()}}
    refused_within(closed(forged, None, rest), 40)
    refused_within(with_index(SEGMENTS["packed-batch"], b'{"trees":{"200":' + deep + b"}}"), 40)
    size = -(-(8 + len(deep)) // ALIGN) * ALIGN
    refused_within(struct.pack("<Q", size - 8) + deep.ljust(size - 8), 40)


def test_a_tree_as_deep_as_a_tree_may_be_is_read() -> None:
    tree: Any = 0
    for _ in range(jsontext.MAX_DEPTH):
        tree = [tree]
    jsontext.loads(jsontext.dumps(tree), what="tree", max_bytes=4096)
    header, document, rest = opened(SEGMENTS["plain-no-tensors"])
    assert read(closed(header, document | {"trees": {"102": tree}}, rest)).trees == {102: tree}
    index = opened_index(SEGMENTS["packed-no-payload"]) | {"trees": {"300": tree}}
    assert read(with_index(SEGMENTS["packed-no-payload"], json.dumps(index).encode())).trees == {300: tree}


def test_duplicate_members_are_refused_everywhere() -> None:
    data = SEGMENTS["plain-shards"]
    end = header_length(data, len(data), "file")
    outer = data[8:end].rstrip().replace(b'{"__metadata__"', b'{"z":{},"__metadata__"', 1)
    inner = data[8:end].rstrip().replace(rb"{\"version\":1", rb"{\"version\":1,\"version\":1", 1)
    for text in (outer, inner):
        assert len(text) < end - 8
        with pytest.raises(FormatError, match="duplicate"):
            read(data[:8] + text.ljust(end - 8) + data[end:])
    with pytest.raises(FormatError, match="duplicate"):
        read(with_index(SEGMENTS["packed-batch"], b'{"trees":{},"trees":{}}'))


def test_a_huge_index_is_refused_before_it_is_read() -> None:
    header, document, _ = opened(SEGMENTS["packed-no-payload"])
    length = HEADER_LIMIT + 1
    header["ckptstore/index"] |= {"shape": [length], "data_offsets": [0, length]}
    data = closed(header, document, b"")
    with pytest.raises(FormatError, match="an index of"):
        read(data, len(data) + length)


def test_a_short_read_of_the_index_is_noticed() -> None:
    data = SEGMENTS["packed-batch"]
    header = data[: header_length(data, len(data), "file")]
    with pytest.raises(CorruptSegmentError, match="whose hash"):
        parse(header, len(data), "file", lambda offset, length: data[offset : offset + length - 1])


@pytest.mark.parametrize("more", [-1, 1])
def test_a_payload_that_the_chunks_do_not_fill_is_not_described(more: int) -> None:
    data = SEGMENTS["packed-batch"]
    doc, header_size = read(data), header_length(data[:8], len(data), "here")
    payload = sum(chunk.length for own in doc.tensors.values() for entry in own.values() for chunk in entry.chunks)
    encode_packed(doc, payload, header_size)
    with pytest.raises(CorruptSegmentError, match=f"a payload of {payload + more}"):
        encode_packed(doc, payload + more, header_size)


@pytest.mark.parametrize("step", [True, 1.0, "1"], ids=repr)
def test_a_lossy_step_is_named_by_its_number(step: Any) -> None:
    columns = step_columns({1: StepEncoding(1, "full", None, 0.0, lossy=True)})
    assert read_steps(Members(dict(columns), "here"))[1].lossy
    with pytest.raises(FormatError, match="lossy"):
        read_steps(Members(columns | {"lossy": [step]}, "here"))
