"""Folds whose checksum is right and whose contents are not: each lie is refused with `FormatError`."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import zstandard

from ckptstore.formats import folds
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.errors import FormatError, IncompatibleFormatError
from ckptstore.formats.hashing import xxh3_128
from tools.fuzz import seeds

DOCUMENT: dict[str, Any] = json.loads(seeds.fold_texts()[0])
HEX = "a" * 32
BEYOND = 2**53 + 1


def decode(document: Any) -> Catalog:
    return decode_frame(zstandard.compress(json.dumps(document).encode()))


def decode_frame(frame: bytes) -> Catalog:
    digest = xxh3_128(frame)
    data = b"ckptstore fold\n" + digest.encode() + b"\n" + frame
    return folds.decode_fold(data, seq=7, run=seeds.RUN, digest16=digest[:16], what="fold/x")


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
    # A column that is none; strings and objects have a length, too.
    ("segments.size", "x" * len(DOCUMENT["segments"]["size"])),
    ("segments.size", {str(row): 1 for row in range(len(DOCUMENT["segments"]["size"]))}),
    ("terms.writers", '"'),
    # Numbers.
    ("segments.size.0", -1),
    ("segments.size.0", BEYOND),
    ("segments.size.0", 1.0),
    ("segments.size.0", True),
    ("segments.header", [1.5] * len(DOCUMENT["segments"]["header"])),
    ("segments.size", DOCUMENT["segments"]["size"][1:]),
    ("terms.time.0", "1"),
    ("terms.time.0", True),
    ("terms.time.0", 1e300),
    ("terms.time.0", -(2**60)),
    ("encodings.kind.0", 1),
    ("encodings.kind.0", None),
    # Digests.
    ("segments.id", DOCUMENT["segments"]["id"][:-1]),
    ("segments.id", DOCUMENT["segments"]["id"] + "a"),
    ("segments.id", DOCUMENT["segments"]["id"][:-1] + "G"),
    ("segments.hash", DOCUMENT["segments"]["hash"].upper().replace("0", "A")),
    ("checkpoints.state", DOCUMENT["checkpoints"]["state"] + HEX),
    ("encodings.loose", "xyz"),
    ("encodings.loose", "g" * 32),
    ("encodings.loose", "a" * 33),
    ("dropped", "a" * 31),
    ("dropped", "z" * 32),
    ("terms.parent.state", ""),
    ("terms.parent.state", HEX * 2),
    # References.
    ("encodings.segment.0", 10_000),
    ("encodings.segment", DOCUMENT["encodings"]["segment"] + [0]),
    ("encodings.count.0", DOCUMENT["encodings"]["count"][0] + 1),
    ("terms.writer.0", len(DOCUMENT["terms"]["writers"])),
    ("terms.writers.0", "[]"),
    ("terms.writers.0", "{"),
    ("terms.writers.0", "\ud800"),
    ("terms.extra", {"0": 1}),
    ("terms.extra", {"0": {}, "1": []}),
    ("terms.extra", []),
    # Lists of the rest.
    ("spent", [-1]),
    ("spent", ["1"]),
    ("spent", [True]),
    ("spent", {}),
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


def test_empty_columns_may_be_lists_only() -> None:
    """Checks of members must not depend on there being any."""
    empty = {**DOCUMENT, "bases": {name: type(value)() for name, value in DOCUMENT["bases"].items()}}
    decode(empty)
    for name, column in empty["bases"].items():
        wrong: Any = {} if isinstance(column, list) else []
        with pytest.raises(FormatError):
            decode({**empty, "bases": {**empty["bases"], name: wrong}})


def test_a_frame_that_claims_more_than_a_fold_may_hold() -> None:
    # The frame header alone: content size of 2 GiB, eight bytes wide.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (2 << 30).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(frame).content_size == 2 << 30
    with pytest.raises(FormatError, match="at most"):
        decode_frame(frame)


def test_a_frame_with_something_behind_it() -> None:
    frame = zstandard.compress(json.dumps(DOCUMENT).encode())
    with pytest.raises(FormatError, match="fold/x"):
        decode_frame(frame + b"\0")
    with pytest.raises(FormatError, match="fold/x"):
        decode_frame(b"")
