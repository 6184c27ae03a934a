"""The cost of a few hostile bytes: texts and folds are bounded before they are decompressed and parsed.

Each case ran for minutes, or filled all memory, before there was a bound; every one must end in seconds here.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zstandard

from ckptstore.errors import FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder, TermEntry
from ckptstore.formats.history.members import MAX_TERM
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, CommitRecord, Encoding, OpenRecord
from tools.fuzz import seeds

HEX = "a" * 32


@pytest.fixture(autouse=True)
def in_seconds() -> Iterator[None]:
    begin = time.thread_time()
    yield
    assert time.thread_time() - begin < 20


def peak(call: Callable[[], object]) -> int:
    """The peak of Python's memory during the call, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# JSON


def test_many_small_values_are_refused_before_they_are_made() -> None:
    def hostile(text: bytes) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(FormatError, match=r"here: JSON of \d+ arrays and objects and \d+ values"):
                jsontext.loads(text, what="here", max_bytes=1 << 30)

        return run

    for text in (
        b"[" + b"[]," * (1 << 22) + b"0]",
        b"[" + b"0," * (1 << 24) + b"0]",
        b"[" + b"{}," * (1 << 23) + b"0]",
    ):
        assert peak(hostile(text)) < 2 * len(text) + (1 << 20)


@pytest.mark.parametrize(("count", "accepted"), [(999, True), (1000, False)])
def test_the_limit_of_arrays_is_exact_and_the_writer_keeps_it(
    monkeypatch: pytest.MonkeyPatch, count: int, accepted: bool
) -> None:
    monkeypatch.setattr(jsontext, "MAX_ARRAYS", 1000)
    value: list[Any] = [[]] * count
    text = jsontext.dumps(value)
    if accepted:
        assert jsontext.bounded(value, what="here") == text
        assert len(jsontext.loads(text, what="here", max_bytes=1 << 30)) == count
        return
    for refused in (
        lambda: jsontext.bounded(value, what="here"),
        lambda: jsontext.loads(text, what="here", max_bytes=1 << 30),
    ):
        with pytest.raises(FormatError, match="here"):
            refused()


@pytest.mark.parametrize(("count", "accepted"), [(99, True), (100, True), (101, False)])
def test_the_limit_of_values_is_exact(count: int, accepted: bool) -> None:
    # As many marks as values: one bracket, and a comma before every value but the first.
    text = jsontext.dumps([0] * count)
    if accepted:
        assert len(jsontext.loads(text, what="here", max_bytes=1 << 10, max_marks=100)) == count
        return
    with pytest.raises(FormatError, match="101 values"):
        jsontext.loads(text, what="here", max_bytes=1 << 10, max_marks=100)


def test_brackets_in_strings_are_not_counted() -> None:
    value = ['[{,\\"' * 1000, {",[": "],"}]
    assert jsontext.loads(jsontext.dumps(value), what="here", max_bytes=1 << 20, max_marks=4) == value


def test_no_text_is_sealed_that_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_text.unseal(record_text.seal({"a": [[]] * 10}), what="here") == {"a": [[]] * 10}
    monkeypatch.setattr(jsontext, "MAX_ARRAYS", 10)
    with pytest.raises(FormatError, match="kind 'pin'"):
        record_text.seal({"ckptstore": "pin", "a": [[]] * 10})


# Folds


def fold(document: Any) -> tuple[bytes, str]:
    """A fold of this JSON, with the columns of `base`, or of these bytes."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode() + b"\n" + columns()
    frame = zstandard.ZstdCompressor(level=19).compress(text)
    digest = xxh3_128(frame)
    return b"ckptstore fold\n" + digest.encode() + b"\n" + frame, digest[:16]


def decode(document: Any) -> Catalog:
    data, digest16 = fold(document)
    return folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")


def base() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(seeds.fold_texts()[0].partition(b"\n")[0])
    return found


def columns() -> bytes:
    return seeds.fold_texts()[0].partition(b"\n")[2]


@pytest.mark.parametrize(
    "text", [b"[" + b"[]," * 30_000_000 + b"0]", b" " * 90_000_000, b'"' + b"a" * 90_000_000 + b'"']
)
def test_a_small_fold_does_not_become_a_large_one(text: bytes) -> None:
    data, digest16 = fold(text)
    assert len(data) < 40_000

    def run() -> None:
        with pytest.raises(FormatError, match=f"bytes contain {len(text)} bytes of JSON and columns, at most"):
            folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")

    assert peak(run) < 1 << 20


def test_the_ratio_is_exact() -> None:
    document = json.dumps(base(), separators=(",", ":")).encode()

    def padded(size: int) -> bytes:
        return document + b" " * (size - len(document) - 1 - len(columns())) + b"\n" + columns()

    def most(size: int) -> int:
        return folds.SLACK + folds.RATIO * len(zstandard.ZstdCompressor(level=19).compress(padded(size)))

    size = folds.SLACK
    while most(size) > size:  # white space takes next to nothing, so this ends at once
        size = most(size)
    assert decode(padded(size)).next_seq == 8
    with pytest.raises(FormatError, match=f"at most {most(size + 1)} are allowed"):
        decode(padded(most(size + 1) + 1))


def test_a_million_encodings_of_one_checkpoint_take_linear_time() -> None:
    count = 20_000
    catalog = CatalogBuilder(seeds.catalog()).snapshot()
    node = next(iter(catalog.checkpoints))
    catalog.encodings[node] = tuple(
        Encoding(node, "full", None, (HEX,), False, random.getrandbits(53)) for _ in range(count)
    )
    data, digest = folds.encode_fold(catalog, run=seeds.RUN)
    begin = time.thread_time()
    found = folds.decode_fold(data, seq=catalog.next_seq - 1, run=seeds.RUN, digest16=digest[:16], what="fold/x")
    assert len(found.encodings[node]) == count
    assert time.thread_time() - begin < 1.5  # a copy for each took 2.7 s, and a hundred times that for 200,000


@pytest.mark.parametrize("rows", [2**20, 2**53])
def test_rows_that_have_no_bytes_cost_nothing(rows: int) -> None:
    for table in ("checkpoints", "held", "segments", "encodings"):
        document = base()
        document[table]["rows"] = rows
        data, digest16 = fold(document)

        def run(data: bytes = data, digest16: str = digest16) -> None:
            with pytest.raises(FormatError, match="bytes of columns, the tables have"):
                folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")

        assert peak(run) < 1 << 20
    document = base()
    document["encodings"]["uses"] = rows
    with pytest.raises(FormatError, match=r"bytes of columns, the tables have"):
        decode(document)


def test_a_record_with_a_million_encodings_of_one_checkpoint_takes_linear_time() -> None:
    count = 200_000
    edges = tuple(Encoding((1, 1), "full", None, (HEX,), False, 1) for _ in range(count))
    builder = CatalogBuilder()
    begin = time.thread_time()
    builder.apply(CommitRecord(1, HEX, encodings=edges), 0)
    assert time.thread_time() - begin < 5
    assert len(builder.catalog.encodings[1, 1]) == count


def test_no_fold_is_written_that_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = seeds.catalog()
    folds.encode_fold(catalog, run=seeds.RUN)
    for name, value in (("SLACK", 0), ("FOLD_LIMIT", 1000), ("JSON_LIMIT", 50)):
        with monkeypatch.context() as patched:
            patched.setattr(folds, name, value)
            patched.setattr(folds, "RATIO", 1)
            with pytest.raises(FormatError, match="the fold through slot"):
                folds.encode_fold(catalog, run=seeds.RUN)


def test_the_json_of_a_fold_is_bounded_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A string within the fold's length and its ratio: once it took four times its length, and twenty seconds."""
    monkeypatch.setattr(folds, "JSON_LIMIT", 1 << 20)
    monkeypatch.setattr(folds, "RATIO", 1 << 20)
    text = json.dumps(base() | {"later": "a" * (32 << 20)}).encode() + b"\n" + columns()
    data, digest16 = fold(text)

    def run() -> None:
        with pytest.raises(FormatError, match="more than 1048576 bytes of JSON"):
            folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")

    assert peak(run) < 8 << 20
    longest = "a" * ((1 << 20) - len(json.dumps(base() | {"later": ""})))
    text = json.dumps(base() | {"later": longest}).encode() + b"\n" + columns()
    decode(text)


def test_columns_that_no_table_has_are_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "RATIO", 1 << 20)
    data, digest16 = fold(json.dumps(base()).encode() + b"\n" + columns() + bytes(64 << 20))

    def run() -> None:
        with pytest.raises(FormatError, match=r"\d+ bytes of columns, the tables have \d+"):
            folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")

    assert peak(run) < 8 << 20


def test_a_fold_longer_than_any_is_not_even_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    data, digest16 = fold(base())
    monkeypatch.setattr(folds, "FOLD_LIMIT", len(data) - 1)
    monkeypatch.setattr(folds, "intact", None)
    with pytest.raises(FormatError, match=f"{len(data)} bytes, at most {len(data) - 1}"):
        folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest16, what="fold/x")


@pytest.mark.parametrize("count", [1000, 20_000])
def test_real_folds_stay_far_from_the_ratio(count: int) -> None:
    """The most regular run: only the hashes differ from row to row."""
    draw = random.Random(count)
    nodes = [(1, step) for step in range(count)]
    catalog = Catalog(term=1, next_seq=count)
    catalog.terms[1] = TermEntry(1, None, 0.0, {}, 0)
    for node in nodes:
        entry = CheckpointEntry(*node, f"{draw.getrandbits(128):032x}", 0.0, 1, 1)
        catalog.checkpoints[node] = entry
        catalog.slots[node] = node[1]
    data, _ = folds.encode_fold(catalog, run=seeds.RUN)
    text = zstandard.ZstdDecompressor().decompress(memoryview(data)[len(b"ckptstore fold\n") + 33 :])
    assert len(text) < folds.RATIO / 8 * len(data)


@pytest.mark.parametrize("term", [0, 3, 2**53])
def test_the_newest_term_of_a_fold_is_one_of_its_terms(term: int) -> None:
    document = base()
    assert document["term"] == 2 == max(document["terms"]["term"])
    document["term"] = term
    with pytest.raises(FormatError, match="newest term"):
        decode(document)


# Chains of parents


@pytest.mark.parametrize("parent", [1, 2, MAX_TERM])
def test_a_term_whose_parent_is_not_older_is_refused(parent: int) -> None:
    """Following the parents of such terms would never end."""
    record = OpenRecord(1, CheckpointId(parent, 5, HEX), HEX, 0.0, {})
    data = record_text.encode_open(record, seq=0, run=seeds.RUN)
    with pytest.raises(FormatError, match="an earlier term"):
        record_text.decode_record(data, seq=0, run=seeds.RUN, what="log/0")
    document = base()
    document["terms"]["parent"] = {
        "term": [parent] + [0] * (len(document["terms"]["term"]) - 1),
        "step": [5] + [0] * (len(document["terms"]["term"]) - 1),
        "state": HEX,
    }
    with pytest.raises(FormatError, match="a parent of a later term"):
        decode(document)


def test_the_newest_checkpoint_behind_many_empty_terms_is_found_in_linear_time() -> None:
    catalog, count = Catalog(term=20_000, next_seq=1), 20_000
    first = CheckpointId(1, count, HEX)
    catalog.terms = {
        term: TermEntry(term, first if term == 2 else CheckpointId(term - 1, 1, HEX), 0.0, {}, 0)
        for term in range(2, count + 1)
    }
    catalog.terms[1] = TermEntry(1, None, 0.0, {}, 0)
    for step in range(count):
        entry = CheckpointEntry(1, step, HEX, 0.0, 1, 1)
        catalog.checkpoints[entry.node], catalog.slots[entry.node] = entry, 0
    catalog.checkpoints.consolidate()  # as after every record
    begin = time.thread_time()
    found = catalog.latest()
    assert time.thread_time() - begin < 2  # 30 s when every term looked at every checkpoint
    assert found is not None
    assert found.node == (1, count - 1)
