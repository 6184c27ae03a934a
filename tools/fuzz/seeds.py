"""Valid inputs: the golden files, and one text of every kind with every member in use."""

from __future__ import annotations

import functools
import json
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import zstandard

import ckptstore.formats
from ckptstore.formats import jsontext
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    OpenRecord,
    PinRecord,
    Request,
    SegmentEntry,
)
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.state import flatten

__all__ = [
    "RUN",
    "catalog",
    "claimed_by_frame",
    "fold_texts",
    "formats",
    "indexes",
    "jsontexts",
    "packed_document",
    "pins",
    "records",
    "refs",
    "requests",
    "segments",
    "trees",
]

RUN: Final = "00112233445566778899aabbccddeeff"
_GOLDEN: Final = Path(ckptstore.formats.__file__).parent / "golden"
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def claimed_by_frame(data: bytes) -> int:
    """The allowance for a zstd frame: its content size within the limit of folds, and the objects made from it."""
    if data[:4] != _FRAME_MAGIC:
        return 0
    try:
        size = int(zstandard.get_frame_parameters(data).content_size)
    except zstandard.ZstdError:
        return 0
    return 3 * size if size <= min(folds.FOLD_LIMIT, folds.SLACK + folds.RATIO * len(data)) else 0


def _headers() -> list[tuple[dict[str, Any], dict[str, Any], bytes]]:
    """(safetensors entries, document, file) of every golden segment."""
    found = []
    for path in sorted(_GOLDEN.glob("segment-1-*")):
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        entries = json.loads(data[8 : 8 + length])
        document = json.loads(entries.pop("__metadata__")["ckptstore"])
        found.append((entries, document, data))
    return found


@functools.cache
def packed_document() -> Mapping[str, Any]:
    """A document of the packed form, without its pointer to the index."""
    document = next(document for _, document, _ in _headers() if document["form"] == "packed")
    return {name: value for name, value in document.items() if name != "index"}


def segments() -> list[bytes]:
    """Plain segments taken apart, and whole files."""
    apart = [
        json.dumps({"tensors": entries, "document": document}).encode()
        for entries, document, _ in _headers()
        if document["form"] == "plain"
    ]
    return apart + [data for _, _, data in _headers() if len(data) < 1 << 16]


def indexes() -> list[bytes]:
    """Packed segments taken apart, and their stored indexes."""
    found = []
    for entries, document, data in _headers():
        if document["form"] == "packed":
            (length,) = struct.unpack_from("<Q", data)
            begin, end = entries["ckptstore/index"]["data_offsets"]
            stored = data[8 + length + begin : 8 + length + end]
            index = json.loads(zstandard.decompress(stored))
            del document["index"]
            found.append(json.dumps({"document": document, "index": index, "payload": begin}).encode())
            found.append(stored)
    return found


def _unsealed(data: bytes) -> bytes:
    return data[:-34]


def _open() -> OpenRecord:
    return OpenRecord(2, CheckpointId(1, 3, "c" * 32), "a" * 32, 1.5, {"host": "x", "pid": 3}, extra={"later": [1]})


def _commit() -> CommitRecord:
    return CommitRecord(
        term=1,
        nonce="b" * 32,
        segments=(SegmentEntry("d" * 32, 1, 9000, 4096, "e" * 32, {"more": 1}), _segment(2), _segment(3)),
        checkpoints=(CheckpointEntry(1, 4, "f" * 32, 2.5, 10, 5000, {"k": {}}),),
        encodings=(
            Encoding((1, 4), "full", None, ("d" * 32,), False, 9000),
            Encoding((1, 4), "delta", CheckpointId(1, 3, "c" * 32), (_segment(2).id, _segment(3).id), True, 7),
        ),
        drops=("1" * 32,),
        retires=((1, 2),),
        tags={"best": (1, 4), "old/one": None},
        requests={"9" * 32: None, "8" * 32: "refused"},
        swept=("7" * 32,),
        extra={"unknown": True},
    )


def _segment(number: int) -> SegmentEntry:
    return SegmentEntry(f"{number:032x}", 1, 5000 * number, 4096, f"{number + 77:032x}")


def records() -> list[bytes]:
    """Slots: OPEN, COMMITs, and one that points to a manifest."""
    opened = record_text.encode_open(_open(), seq=7, run=RUN)
    commit, _ = record_text.encode_commit(_commit(), seq=7, run=RUN, manifest="e" * 32)
    small, _ = record_text.encode_commit(CommitRecord(3, "0" * 32), seq=7, run=RUN, manifest="e" * 32)
    moved = json.loads(_unsealed(commit))
    slot = {name: moved[name] for name in ("ckptstore", "run", "seq", "term", "nonce")} | {"manifest": {"id": "e" * 32}}
    pointing = json.dumps({"slot": slot, "manifest": moved}).encode()
    return [_unsealed(opened), _unsealed(commit), _unsealed(small), pointing]


@functools.cache
def catalog() -> Catalog:
    """A catalog with something in every table."""
    builder = CatalogBuilder()
    builder.apply(OpenRecord(1, None, "a" * 32, 0.5, {"host": "x"}), 0)
    builder.apply(_commit(), 1)
    builder.mark_damaged(2)
    builder.apply(_open(), 3)
    number = 40
    for step in (5, 6):
        number += 1
        builder.apply(
            CommitRecord(
                2,
                "c" * 32,
                segments=(SegmentEntry(f"{number:032x}", 2, 4096, 4096, "2" * 32),),
                checkpoints=(CheckpointEntry(2, step, "3" * 32, 9, 1, 1),),
                encodings=(Encoding((2, step), "full", None, (f"{number:032x}",), False, 4096),),
                tags={"best": (2, step)},
                requests={f"{step:032x}": None},
                drops=(f"{step + 100:032x}",),
                manifest="6" * 32,
                ro_compat=("later",),
            ),
            step - 1,
        )
    builder.apply(CommitRecord(2, "d" * 32, retires=((2, 5),)), 6)
    builder.catalog.next_seq = 8
    return builder.catalog


def fold_texts() -> list[bytes]:
    """JSON and columns of a fold, and its frame."""
    data, _ = folds.encode_fold(catalog(), run=RUN)
    frame = data[len(b"ckptstore fold\n") + 33 :]
    return [zstandard.decompress(frame), frame]


def formats() -> list[bytes]:
    """FORMAT texts."""
    return [
        _unsealed(record_text.encode_format(FormatFile(RUN))),
        _unsealed(
            record_text.encode_format(FormatFile(RUN, anchor_every=4, features={"write": ("x",)}, extra={"n": 1}))
        ),
    ]


def pins() -> list[bytes]:
    """Pin texts."""
    return [_unsealed(record_text.encode_pin(PinRecord("a" * 32, ("b" * 32, "c" * 32), {"host": "x"}, {"later": 1})))]


def requests() -> list[bytes]:
    """Request texts."""
    commit = _commit()
    request = Request(
        "a" * 32, 1, "merge", commit.segments, commit.encodings, commit.drops, commit.retires, commit.tags, {"n": 1}
    )
    return [_unsealed(record_text.encode_request(request, run=RUN))]


def trees() -> list[bytes]:
    """Typed trees with every tag."""
    shared = np.arange(6, dtype=np.float32)
    state = {
        "a": shared,
        "tied": [shared, shared],
        "b.c": np.zeros(3),
        "b": {"c": np.ones((2, 2), np.int8)},
        "$dollar": 1,
        3: [None, True, 2**60, -(2**53), 1.5, float("nan"), float("-inf"), complex(1, float("inf"))],
        (1, ("x", None)): {1, "two", (3, frozenset({4}))},
        "o": OrderedDict([("k", 1), (2, 3)]),
        "counter": Counter("hello"),
        "bytes": b"\0\xff",
        "array": bytearray(b"xyz"),
        "text": "\ud800 lone",
        "np": [np.float32(1.5), np.int64(-3), ml_dtypes.bfloat16(2), np.bool_(True), np.complex64(1j)],
        "random": random.Random(1).getstate(),
        "frozen": frozenset(),
        "tuple": (1, (2, ()), []),
    }
    few = {"tied": [shared], "o": OrderedDict([(2, shared)]), 3: shared, "tuple": (shared, 1, 2, 3), "text": None}
    ranks = [state, few, dict(reversed(state.items())) | {"own": np.ones(2)}]
    extra = {"size": {"$size": [2, 3]}, "dtype": {"$dtype": "float32"}, "device": {"$device": "cuda:0"}}
    return [
        jsontext.dumps(flatten(state).tree),
        jsontext.dumps({"m": {"$t": "w"}, "n": [{"$t": "w"}]}),
        json.dumps(extra).encode(),
        jsontext.dumps(rank_trees.merge([flatten(one).tree for one in ranks])),
        jsontext.dumps({"a": rank_trees.merge([{"x": {"$t": "a.x"}}, [{"$t": "a.0"}], None])}),
    ]


def jsontexts() -> list[bytes]:
    """JSON of all shapes."""
    return [
        *trees(),
        b'{"a":[1,-2,3.5e10,true,null,"\\ud83d\\ude00\\u0000"],"b":{"":{}}}',
        b"[" * 200 + b"]" * 200,
        b'["' + b"[{" * 300 + b'"]',
        ('{"a":1}').encode("utf-16"),
        b"\xef\xbb\xbf[1]",
        b"[1e400,-0.0,12345678901234567890123]",
    ]


def refs() -> list[bytes]:
    """REFs and keys."""
    words = ["latest", "6", "6@2", "tag:best", " 5@2 ", "tag:old/one", "0" * 19 + "7", "0" * 20 + "-" + "a" * 16]
    words += ["0000000002-" + "a" * 32, "log/" + "0" * 20, "fold/" + "0" * 20 + "-" + "f" * 16, "٣", "6@" + "9" * 12]
    return [word.encode() for word in words]
