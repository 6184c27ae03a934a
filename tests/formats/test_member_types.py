"""Every member of every text, one after the other, is given values of every other type: each is refused.

Otherwise it would silently be lost or overlooked, and readers would differ in what they accept.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ckptstore.errors import CorruptSegmentError, FormatError, IncompatibleFormatError
from ckptstore.formats import jsontext
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.segment_files import segment
from ckptstore.formats.segment_files.layout import padded
from tests.formats.log_strategies import RUN, digest

GOLDEN = Path(__file__).parents[2] / "formats" / "golden"
SEGMENT = {"id": digest(1), "size": 10, "header": 5, "hash": digest(2)}
CHECKPOINT = {"step": 3, "state": digest(3), "time": 1.5, "tensors": 1, "bytes": 4, "metadata": {"a": 1}}
ENCODING = {"checkpoint": [1, 3], "kind": "full", "base": None, "segments": [digest(1)], "lossy": False, "bytes": 4}
CHANGES = {
    "segments": [SEGMENT],
    "encodings": [ENCODING, ENCODING | {"base": [1, 2, digest(9)]}],
    "drops": [digest(5)],
    "retires": [[1, 2]],
    "tags": {"a": [1, 3], "b": None},
    "keep": ["last:3"],
}
FEATURES = {"incompat": ["keep"], "ro_compat": ["keep"]}
COMMON = {"run": RUN, "seq": 5, "previous": digest(9), "term": 2, "nonce": digest(8)} | FEATURES
OPEN = COMMON | {"ckptstore": "open", "parent": [1, 3, digest(3)], "time": 1.0, "writer": {"host": "x"}}
OPEN |= {"remote": "s3://b", "reached": 3, "lacks": 4}
COMMIT = COMMON | CHANGES | {"ckptstore": "commit", "checkpoints": [CHECKPOINT], "swept": [digest(5)]}
COMMIT |= {"requests": {digest(6): None, digest(7): "no"}, "closed": True, "lacks": 3, "highest": 4}
FORMAT = {"ckptstore": "format", "major": 1, "run": RUN, "anchor_every": 1024}
FORMAT |= {"features": {"read": ["keep"], "write": ["keep"], "gc": ["x"]}}
REQUEST = {"ckptstore": "request", "run": RUN, "term": 1, "id": digest(4), "what": "w", "incompat": ["keep"]} | CHANGES
PIN = {"ckptstore": "pin", "nonce": digest(1), "segments": [digest(1)], "reader": {"a": 1}}

VALUES: list[Any] = [None, True, False, 7, 0, -1, 1.5, 2**60, "x", "", [], {}, [1], ["x"], [[]], [None], {"a": 1}, [{}]]
ANYTHING = ("writer", "metadata", "reader", "trees", "new", "later", "mood")
"""Objects of users, and members unknown to this version: they may have any value."""
UNKNOWN = ("new", "later", "mood")
MAY_BE_NULL = ("parent", "base", "tags", "requests", "parents", "bases")
FREE = ("codecs",)
"""Parameters, which the codecs check."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every member and entry, down to those that may have any value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        if key not in ANYTHING:
            yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def same_type(one: Any, other: Any, path: tuple[Any, ...]) -> bool:
    if path[-1] in UNKNOWN or "trees" in path[:-1]:
        return True
    if other is None:
        return one is None or any(name in path for name in MAY_BE_NULL)
    if one is None:
        return any(name in path for name in MAY_BE_NULL)
    numbers = (int, float)
    if any(str(name).startswith("time") for name in path) and type(one) in numbers:
        return type(other) in numbers
    return type(one) is type(other)


def check(value: Any, read: Callable[[Any], object]) -> int:
    """How many values were refused."""
    read(value)
    refused = 0
    for path in places(value):
        if path[0] in FREE and len(path) > 3:
            continue
        for new in VALUES:
            try:
                read(replaced(value, path, new))
            except (FormatError, IncompatibleFormatError, CorruptSegmentError):
                refused += 1
            else:
                assert same_type(at(value, path), new, path), (path, new)
    return refused


def _slot(value: Any) -> object:
    return record_text.decode_record(record_text.seal(value), seq=5, run=RUN, what="slot")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (OPEN, _slot),
        (COMMIT, _slot),
        (FORMAT, lambda value: record_text.decode_format(record_text.seal(value))),
        (REQUEST, lambda value: record_text.decode_request(record_text.seal(value), run=RUN, what="request")),
        (PIN, lambda value: record_text.decode_pin(record_text.seal(value), what="pin")),
    ],
    ids=["open", "commit", "format", "request", "pin"],
)
def test_sealed_texts(value: Any, read: Callable[[Any], object]) -> None:
    assert check(value, read) > 30


def test_folds() -> None:
    path = max((Path(__file__).parents[1] / "golden" / "conformance" / "folded" / "fold").iterdir())
    line, _, columns = zstandard.decompress(path.read_bytes()[len(b"ckptstore fold\n") + 33 :]).partition(b"\n")
    fold = json.loads(line)
    fold |= {"dropped": digest(5), "spent": [3], "tags": {"a": [1, 3]}, "requests": {digest(6): None}, "damage": [2]}
    fold |= {"manifests": [[digest(7), 1, 2]], "unknown": [[3, {"later": 1, "keep": ["last:3"]}]]} | FEATURES
    fold["terms"]["extra"] = {"0": {"closed": True, "lacks": 3, "highest": 4, "reached": 2, "remote": "u", "later": 1}}

    def read(value: Any) -> object:
        frame = zstandard.ZstdCompressor().compress(jsontext.dumps(value) + b"\n" + columns)
        name = xxh3_128(frame)
        data = b"ckptstore fold\n" + name.encode() + b"\n" + frame
        return folds.decode_fold(data, seq=fold["seq"], run=fold["run"], digest16=name[:16], what="fold")

    assert check(fold, read) > 300
    for wrong in ({"tags": {"a": None}}, {"spent": [3, 2]}, {"damage": [2, 2]}, {"manifests": [[digest(7), 0, 2]]}):
        with pytest.raises(FormatError, match=next(iter(wrong))):
            read(fold | wrong)
    for name, cells in (("known", [7]), ("found", [2]), ("term", [0]), ("term", [2])):
        column = [*cells, *fold["terms"][name][1:]]
        with pytest.raises(FormatError):
            read(fold | {"terms": fold["terms"] | {name: column}})
    for rows in ({"5": {}}, {"00": {}}, {"-0": {}}, {"x": {}}):
        with pytest.raises(FormatError, match="extra"):
            read(fold | {"terms": fold["terms"] | {"extra": rows}})


def _parted(name: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, document and data of a golden segment."""
    data = (GOLDEN / name).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["ckptstore"]), data[end:]


def _read(header: dict[str, Any], document: Any, rest: bytes) -> object:
    text = jsontext.dumps(header | {"__metadata__": {"format": "pt", "ckptstore": json.dumps(document)}})
    size = padded(8 + len(text))
    data = struct.pack("<Q", size - 8) + text.ljust(size - 8) + rest
    return segment.parse(data[:size], len(data), "segment", lambda at, length: data[at : at + length])


@pytest.mark.parametrize("name", ["plain-every-dtype", "plain-shards", "packed-batch"])
def test_documents(name: str) -> None:
    header, document, rest = _parted(f"segment-1-{name}.safetensors")
    step = document["steps"][0]
    document |= {"rank": [[step, 1]], "ranks": [[step, [1, 2]]]}
    assert check(document, lambda value: _read(header, value, rest)) > 100
    for member in ("dtypes", "shards"):
        if member in document:
            with pytest.raises(FormatError, match=member):
                _read(header, document | {member: document[member][:1] * 2}, rest)


def test_an_index() -> None:
    header, document, rest = _parted("segment-1-packed-batch.safetensors")
    end = header["ckptstore/payload"]["data_offsets"][1]

    def read(value: Any) -> object:
        text = jsontext.dumps(value)
        stored = zstandard.ZstdCompressor().compress(text)
        place = {"dtype": "U8", "shape": [len(stored)], "data_offsets": [end, end + len(stored)]}
        pointer = {"codec": "zstd", "length": len(text), "hash": xxh3_128(stored)}
        return _read(header | {"ckptstore/index": place}, document | {"index": pointer}, rest[:end] + stored)

    assert check(json.loads(zstandard.decompress(rest[end:])), read) > 300
