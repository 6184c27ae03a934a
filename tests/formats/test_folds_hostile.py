"""Folds with a valid checksum and invalid contents: each error is refused with `FormatError`."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import zstandard

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats.history import folds
from ckptstore.formats.history.catalog import Catalog, TermEntry
from ckptstore.formats.history.records import CheckpointEntry
from tests.formats.fold_data import LAYOUT, Columns, body, body_of, parted, sealed_frame
from tools.fuzz import seeds

DOCUMENT, COLUMNS = parted(folds.encode_fold(seeds.catalog(), run=seeds.RUN)[0])
HEX = "a" * 32
BEYOND = 2**53 + 1


def decode(document: Any, columns: Columns = COLUMNS, seq: int = 7) -> Catalog:
    return decode_frame(zstandard.compress(body(document, columns)), seq)


def decode_frame(frame: bytes, seq: int = 7) -> Catalog:
    data, digest16 = sealed_frame(frame)
    return folds.decode_fold(data, seq=seq, run=seeds.RUN, digest16=digest16, what="fold/x")


def changed(path: str, value: Any) -> Any:
    document = copy.deepcopy(DOCUMENT)
    holder = document
    *parents, last = path.split(".")
    for key in parents:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    if isinstance(holder, list):
        holder[int(last)] = value
    else:
        holder[last] = value
    return document


LIES = [
    ("ckptstore", "commit"),
    ("run", "f" * 32),
    ("seq", 8),
    ("term", -1),
    # A value that is not a table or column; strings and objects have a length, too.
    ("segments", None),
    ("segments", []),
    ("segments.rows", None),
    ("segments.rows", 1.0),
    ("segments.rows", True),
    ("segments.rows", 2**60),
    ("encodings.rows", 0),
    ("encodings.uses", None),
    ("encodings.uses", DOCUMENT["encodings"]["uses"] - 1),
    ("terms.writers", '"'),
    ("terms.seq", "x" * len(DOCUMENT["terms"]["seq"])),
    ("terms.seq", {str(row): 1 for row in range(len(DOCUMENT["terms"]["seq"]))}),
    # Numbers.
    ("terms.seq.0", -1),
    ("terms.seq.0", BEYOND),
    ("terms.seq.0", 1.0),
    ("terms.seq.0", True),
    ("terms.seq", [1.5] * len(DOCUMENT["terms"]["seq"])),
    ("terms.seq", DOCUMENT["terms"]["seq"][1:]),
    ("terms.time.0", "1"),
    ("terms.time.0", True),
    ("terms.time.0", 1e300),
    ("terms.time.0", -(2**60)),
    ("encodings.kinds", None),
    ("encodings.kinds", []),
    ("encodings.kinds.0", 1),
    ("encodings.kinds.0", None),
    # Digests.
    ("encodings.loose", None),
    ("encodings.loose", "xyz"),
    ("encodings.loose", "g" * 32),
    ("encodings.loose", "A" * 32),
    ("encodings.loose", "a" * 33),
    ("dropped", "a" * 31),
    ("dropped", "z" * 32),
    ("terms.parent.state", ""),
    ("terms.parent.state", HEX * 2),
    # References.
    ("terms.writer.0", len(DOCUMENT["terms"]["writers"])),
    ("terms.writers.0", "[]"),
    ("terms.writers.0", "{"),
    ("terms.writers.0", "\ud800"),
    ("terms.writers.0", 5),
    ("terms.writers.0", None),
    ("terms.extra", {"0": 1}),
    ("terms.extra", {"0": {}, "1": []}),
    ("terms.extra", []),
    ("segments.extra", {"0": 1}),
    ("segments.extra", {"-1": {}}),
    ("segments.extra", {"00": {}}),
    ("segments.extra", {"1" * 5000: {}}),
    ("segments.extra", {"\u0663": {}}),
    ("segments.extra", {str(DOCUMENT["segments"]["rows"]): {}}),
    ("checkpoints.extra", []),
    ("encodings.extra", {"x": {}}),
    # Lists of the other columns.
    ("spent", [-1]),
    ("spent", ["1"]),
    ("spent", [True]),
    ("spent", {}),
    ("spent", [2, 1]),
    ("spent", [1, 1]),
    ("damage", [3, 2]),
    ("damage", [2, 2]),
    ("damage", [-1]),
    ("damage", [None]),
    ("damage", [1.5]),
    ("tags", {"best": [0, 1]}),
    ("tags", {"no tag!": [1, 1]}),
    ("requests", {"short": None}),
    ("requests", {HEX.upper(): None}),
    ("requests", {HEX: 1}),
    ("requests", {HEX: []}),
    ("requests", [HEX]),
    ("manifests", [{HEX: 1}]),
    ("manifests", [HEX]),
    ("manifests", [{HEX: 1, "slot": 2, "term": 1}]),
    ("manifests", [[HEX, 1]]),
    ("manifests", [[HEX, 1, 2, 3]]),
    ("manifests", [["x", 1, 2]]),
    ("manifests", [[HEX, -1, 2]]),
    ("manifests", [[HEX, 1, -2]]),
    ("manifests", [[HEX, 1, "2"]]),
    ("unknown", [{"1": {}}]),
    ("unknown", [[1]]),
    ("unknown", [[1, {}, 2]]),
    ("unknown", [[-1, {}]]),
    ("unknown", [[1, []]]),
    ("unknown", [7]),
    ("ro_compat", [1]),
]


def test_the_document_itself_is_read() -> None:
    assert decode(DOCUMENT).term == 2
    assert DOCUMENT["manifests"]
    assert DOCUMENT["damage"]


@pytest.mark.parametrize(("path", "value"), LIES, ids=[f"{path}={value!r:.30}" for path, value in LIES])
def test_a_lie(path: str, value: Any) -> None:
    with pytest.raises(FormatError, match="fold/x"):
        decode(changed(path, value))


def test_an_unknown_feature() -> None:
    with pytest.raises(IncompatibleFormatError, match="later"):
        decode({**DOCUMENT, "incompat": ["later"]})


COLUMN_LIES = [
    *[
        (f"{table}.{name}", 0, value)
        for table, name in [("segments", "size"), ("checkpoints", "slot"), ("encodings", "bytes")]
        for value in (-1, BEYOND, 2**62)
    ],
    ("checkpoints.time", 0, float("nan")),
    ("checkpoints.time", 0, float("inf")),
    ("checkpoints.time", 0, -1e300),
    ("encodings.lossy", 0, 2),
    ("encodings.kind", 0, len(DOCUMENT["encodings"]["kinds"])),
    ("encodings.segment", 0, 10_000),
    ("encodings.count", 0, COLUMNS["encodings.count"][0] + 1),
    ("encodings.base_step", COLUMNS["encodings.base_term"].index(0), 1),
    ("encodings.base_state", COLUMNS["encodings.base_term"].index(0), HEX),
    # Out of order, or twice.
    ("checkpoints.term", 0, 9),
    ("segments.id", 0, COLUMNS["segments.id"][1]),
    ("segments.id", 0, "f" * 32),
    ("encodings.term", 0, 9),
]


@pytest.mark.parametrize(("path", "row", "value"), COLUMN_LIES, ids=[f"{lie[0]}={lie[2]!r:.30}" for lie in COLUMN_LIES])
def test_a_lie_in_a_column(path: str, row: int, value: Any) -> None:
    columns = copy.deepcopy(COLUMNS)
    columns[path][row] = value
    with pytest.raises(FormatError, match="fold/x"):
        decode(DOCUMENT, columns)


@pytest.mark.parametrize(("path", "value"), [("encodings.base_step", 1), ("encodings.base_state", HEX)])
def test_where_no_encoding_has_a_base(path: str, value: Any) -> None:
    columns = copy.deepcopy(COLUMNS)
    rows = len(columns["encodings.term"])
    columns |= {"encodings.base_term": [0] * rows, "encodings.base_step": [0] * rows}
    columns["encodings.base_state"] = ["0" * 32] * rows
    assert all(edge.base is None for edges in decode(DOCUMENT, columns).encodings.values() for edge in edges)
    columns[path][rows - 1] = value
    with pytest.raises(FormatError, match="a base of term 0"):
        decode(DOCUMENT, columns)


def test_limits_of_numbers_and_times_are_inclusive() -> None:
    columns = copy.deepcopy(COLUMNS)
    columns["segments.size"][0] = 2**53
    columns["checkpoints.time"][0] = -(2.0**53)
    catalog = decode(DOCUMENT, columns)
    assert next(iter(catalog.segments.values())).size == 2**53
    assert next(iter(catalog.checkpoints.values())).time == -(2.0**53)


MOST = 9_999_999_999


@pytest.mark.parametrize(
    "path", ["checkpoints.term", "held.term", "segments.term", "encodings.term", "encodings.base_term"]
)
def test_a_term_has_ten_digits_at_most(path: str) -> None:
    """As in slots, segments and names of folders."""
    columns = copy.deepcopy(COLUMNS)
    rows = len(columns[path])
    assert rows
    columns[path] = [*columns[path][:-1], MOST]
    try:
        decode(DOCUMENT, columns)
    except FormatError as error:
        assert "term out of range" not in str(error)  # noqa: PT017 - the rest need not fit
    for value in (MOST + 1, 0)[: 1 + (path != "encodings.base_term")]:
        columns[path][-1] = value
        with pytest.raises(FormatError, match="a term out of range"):
            decode(DOCUMENT, columns)


def test_a_term_of_the_tables_in_the_json_has_ten_digits_at_most() -> None:
    last = len(DOCUMENT["terms"]["term"]) - 1
    document = changed(f"terms.term.{last}", MOST)
    document["term"] = MOST
    assert decode(document).term == MOST
    document["terms"]["term"][last] = document["term"] = MOST + 1
    with pytest.raises(FormatError, match="terms, at most"):
        decode(document)
    with pytest.raises(FormatError, match="terms, at most"):
        decode(changed("terms.parent.term.0", MOST + 1))
    for term in (0, MOST + 1):
        with pytest.raises(FormatError, match="manifests"):
            decode(changed("manifests", [[HEX, term, 3]]))
    assert decode(changed("manifests", [[HEX, MOST, 3]])).manifests[HEX] == (MOST, 3)


def test_without_rows() -> None:
    """Checks of columns must not require rows."""
    document = copy.deepcopy(DOCUMENT)
    document["encodings"] |= {"kinds": [], "uses": 0, "loose": ""}
    for table in LAYOUT:
        document[table]["rows"] = 0
        document[table].pop("extra", None)
    catalog = decode(document, {name: [] for name in COLUMNS})
    assert not catalog.checkpoints
    assert not catalog.encodings


def test_a_frame_that_claims_more_than_a_fold_may_hold() -> None:
    # The frame header alone: content size of 2 GiB, eight bytes wide.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (2 << 30).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(frame).content_size == 2 << 30
    with pytest.raises(FormatError, match="at most"):
        decode_frame(frame)


@pytest.mark.parametrize("nodes", [[(1, 1), (2, 2), (1, 3)], [(1, 2), (1, 1)], [(1, 1), (1, 1)], [(2, 1), (1, 2)]])
def test_rows_out_of_order(nodes: list[tuple[int, int]]) -> None:
    """Also if only the steps ascend, and the first and the last row are of one term."""
    catalog = Catalog(term=2, next_seq=1)
    catalog.terms[2] = TermEntry(2, None, 0.0, {}, 0, nonce="0" * 32)
    for step in range(1, len(nodes) + 1):
        catalog.checkpoints[1, step] = CheckpointEntry(1, step, "0" * 32, 0.0, 1, 1)
        catalog.slots[1, step] = 0
    document, columns = parted(folds.encode_fold(catalog, run=seeds.RUN)[0])
    assert decode(document, columns, seq=0).checkpoints
    columns["checkpoints.term"] = [term for term, _ in nodes]
    columns["checkpoints.step"] = [step for _, step in nodes]
    with pytest.raises(FormatError, match="checkpoints"):
        decode(document, columns, seq=0)


def test_a_body_without_a_line() -> None:
    with pytest.raises(FormatError, match="its JSON does not end with a line feed"):
        decode_frame(zstandard.compress(b"{}"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_frame_that_ends_before_its_line(kept: float) -> None:
    """A read at the end of the frame returns nothing; the search for the line must end there."""
    frame = zstandard.compress(random.Random(0).randbytes(300_000).replace(b"\n", b""))
    with pytest.raises(FormatError, match="ends after"):
        decode_frame(frame[: int(len(frame) * kept)])


def test_a_frame_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """If compression makes it longer than its content: the frame has its own limit."""
    catalog = Catalog(term=0, next_seq=1)
    size = len(body_of(folds.encode_fold(catalog, run=seeds.RUN)[0]))
    real = zstandard.ZstdCompressor
    monkeypatch.setattr(zstandard, "ZstdCompressor", lambda **options: real(**(options | {"level": -100_000})))
    folds.encode_fold(catalog, run=seeds.RUN)
    monkeypatch.setattr(folds, "FOLD_LIMIT", size)
    with pytest.raises(FormatError, match="the fold through slot"):
        folds.encode_fold(catalog, run=seeds.RUN)


def test_a_frame_with_something_behind_it() -> None:
    frame = zstandard.compress(body(DOCUMENT, COLUMNS))
    with pytest.raises(FormatError, match="fold/x"):
        decode_frame(frame + b"\0")
    with pytest.raises(FormatError, match="fold/x"):
        decode_frame(b"")


def test_a_fold_without_terms_has_no_newest_one() -> None:
    document, columns = parted(folds.encode_fold(Catalog(term=0, next_seq=1), run=seeds.RUN)[0])
    document["term"] = 5
    with pytest.raises(FormatError, match="newest term 5"):
        decode(document, columns, seq=0)
