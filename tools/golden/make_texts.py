"""Golden texts of the log: slots, a manifest, FORMAT, requests, pins and folds, and the outcome of reading each.

``texts-1.json`` has cases: ``name``; ``kind`` (``slot``, ``format``, ``request``, ``pin``, ``fold``); of slots and
folds ``seq``; the bytes, as ``text`` or ``base64``; of a slot that points to one, its manifest as ``manifest_zstd``; of
a fold the first digits of its hash, as its key has them, the JSON that it ``holds``, and its ``columns``. ``outcome``
is ``read``, ``incompatible`` (an unknown feature, version or kind) or ``damaged``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

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
    Record,
    Request,
    SegmentEntry,
)
from tools.golden.make_segments import RUN

Case = dict[str, Any]

PARENT = CheckpointId(1, 3, "c" * 32)
OPEN = OpenRecord(
    2,
    PARENT,
    "a" * 32,
    1.5,
    {"host": "golden", "pid": 3},
    extra={"remote": "s3://golden/run", "reached": 4, "later": [1]},
)
COMMIT = CommitRecord(
    term=1,
    nonce="b" * 32,
    segments=tuple(SegmentEntry(f"{n:032x}", 1, 5000 * n, 4096, f"{n + 77:032x}") for n in (1, 2, 3)),
    checkpoints=(CheckpointEntry(1, 3, "c" * 32, 2.25, 9, 4000), CheckpointEntry(1, 4, "f" * 32, 2.5, 10, 5000)),
    encodings=(
        Encoding((1, 3), "full", None, (f"{1:032x}",), False, 5000),
        Encoding((1, 4), "delta", PARENT, (f"{2:032x}", f"{3:032x}"), True, 25_000),
    ),
    drops=("1" * 32,),
    retires=((1, 2),),
    tags={"best": (1, 4), "old/one": None},
    requests={"9" * 32: None, "8" * 32: "refused: it is not so"},
    swept=("7" * 32,),
    extra={"closed": True, "lacks": 9, "highest": 7},
)


def open_text(seq: int) -> bytes:
    """An OPEN with every member."""
    return record_text.encode_open(OPEN, seq=seq, run=RUN)


def commit_text(record: CommitRecord, seq: int) -> tuple[bytes, bytes | None]:
    """A COMMIT: the slot, and the manifest that it points to, if it does not fit into the slot."""
    return record_text.encode_commit(record, seq=seq, run=RUN, manifest="e" * 32)


def _many() -> CommitRecord:
    """More entries than a slot holds."""
    segments = tuple(SegmentEntry(f"{n:032x}", 1, 8192 + n, 4096, f"{n * n:032x}") for n in range(2000))
    checkpoint = CheckpointEntry(1, 1, "d" * 32, 0.0, 0, 0)
    edge = Encoding((1, 1), "full", None, tuple(one.id for one in segments), False, 1)
    return CommitRecord(1, "b" * 32, segments=segments, checkpoints=(checkpoint,), encodings=(edge,))


def _changed(text: bytes, **members: Any) -> bytes:
    return record_text.seal(json.loads(text[:-34]) | members)


def _sealed(name: str, kind: str, text: bytes, outcome: str = "read", **more: Any) -> Case:
    return {"name": name, "kind": kind, **more, "text": text.decode("ascii"), "outcome": outcome}


def _slots() -> list[Case]:
    opened, (commit, none) = open_text(7), commit_text(COMMIT, 7)
    small, _ = commit_text(CommitRecord(3, "0" * 32), 7)
    pointing, manifest = commit_text(_many(), 7)
    assert none is None
    assert manifest is not None
    first = record_text.encode_open(OpenRecord(1, None, "a" * 32, 0.0, {}), seq=0, run=RUN)
    packed = base64.b64encode(zstandard.compress(manifest)).decode()
    damaged = commit[:100] + bytes([commit[100] ^ 1]) + commit[101:]
    return [
        _sealed("the first slot", "slot", first, seq=0),
        _sealed("an OPEN with every member", "slot", opened, seq=7),
        _sealed("a COMMIT with every member", "slot", commit, seq=7),
        _sealed("a COMMIT that changes nothing", "slot", small, seq=7),
        _sealed("a manifest", "slot", pointing, seq=7, manifest_zstd=packed),
        _sealed("an unknown member", "slot", _changed(commit, later={"a": [1, None]}), seq=7),
        _sealed("a feature in ro_compat", "slot", _changed(commit, ro_compat=["later"]), seq=7),
        _sealed("a feature in incompat", "slot", _changed(commit, incompat=["later"]), "incompatible", seq=7),
        _sealed("a feature in an OPEN's incompat", "slot", _changed(opened, incompat=["x"]), "incompatible", seq=7),
        _sealed("another kind", "slot", _changed(commit, ckptstore="later"), "incompatible", seq=7),
        _sealed("another run", "slot", _changed(commit, run="0" * 32), "damaged", seq=7),
        _sealed("another slot's text", "slot", commit, "damaged", seq=8),
        _sealed("a wrong bit", "slot", damaged, "damaged", seq=7),
        *(
            _sealed(f"{name} of another type", "slot", _changed(commit, **{name: value}), "damaged", seq=7)
            for name, value in (("closed", 7), ("lacks", "x"), ("highest", -1), ("drops", None), ("tags", []))
        ),
        *(
            _sealed(f"{name} of another type", "slot", _changed(opened, **{name: value}), "damaged", seq=7)
            for name, value in (("remote", 7), ("reached", 1.5), ("writer", None))
        ),
        _sealed("a missing line feed", "slot", commit[:-1], "damaged", seq=7),
    ]


def _formats() -> list[Case]:
    plain = record_text.encode_format(FormatFile(RUN))
    return [
        _sealed("FORMAT", "format", plain),
        _sealed("FORMAT with anchors every 4", "format", record_text.encode_format(FormatFile(RUN, anchor_every=4))),
        _sealed("an unknown member of FORMAT", "format", _changed(plain, later=1)),
        _sealed("a feature for writers", "format", _changed(plain, features={"write": ["later"]})),
        _sealed("a feature for readers", "format", _changed(plain, features={"read": ["later"]}), "incompatible"),
        _sealed("another major", "format", _changed(plain, major=2), "incompatible"),
        _sealed("no anchors", "format", _changed(plain, anchor_every=0), "damaged"),
    ]


def _requests_and_pins() -> list[Case]:
    edge = Encoding((1, 4), "delta", PARENT, (f"{9:032x}",), False, 8192)
    segment = SegmentEntry(f"{9:032x}", 1, 8192, 4096, "2" * 32)
    asked = Request("5" * 32, 1, "merge 3..4", (segment,), (edge,), (f"{2:032x}",), ((1, 3),), {"best": (1, 4)})
    request = record_text.encode_request(asked, run=RUN)
    pin = record_text.encode_pin(PinRecord("6" * 32, (f"{1:032x}", f"{2:032x}"), {"host": "golden"}))
    return [
        _sealed("a request with every member", "request", request),
        _sealed("a request with an unknown feature", "request", _changed(request, incompat=["x"]), "incompatible"),
        _sealed("a pin", "pin", pin),
        _sealed("another kind of pin", "pin", _changed(pin, ckptstore="later"), "damaged"),
    ]


def catalog() -> Catalog:
    """A catalog with something in every table of a fold."""
    builder = CatalogBuilder()
    records: list[tuple[Record, int]] = [
        (OpenRecord(1, None, "a" * 32, 0.5, {"host": "x"}), 0),
        (COMMIT, 1),
        (OPEN, 3),
        (CommitRecord(2, "d" * 32, retires=((1, 3),), ro_compat=("later",), extra={"more": 1}), 4),
    ]
    for record, seq in records:
        if seq == 3:
            builder.mark_damaged(2)
        builder.apply(record, seq)
    return builder.catalog


def _folds() -> list[Case]:
    data, digest = folds.encode_fold(catalog(), run=RUN)
    seq = catalog().next_seq - 1
    line, _, columns = zstandard.decompress(data.split(b"\n", 2)[2]).partition(b"\n")
    held = {"holds": json.loads(line), "columns": base64.b64encode(columns).decode()}
    damaged = data[:-1] + bytes([data[-1] ^ 1])

    def case(name: str, text: bytes, outcome: str = "read") -> Case:
        known = {"name": name, "kind": "fold", "seq": seq, "hash": digest[:16], "outcome": outcome}
        return known | {"base64": base64.b64encode(text).decode()} | (held if outcome == "read" else {})

    return [case("a fold of every table", data), case("a fold with a wrong bit", damaged, "damaged")]


CASES: tuple[Callable[[], list[Case]], ...] = (_slots, _formats, _requests_and_pins, _folds)


def main(folder: Path) -> None:
    """Write ``texts-1.json`` to `folder`."""
    cases = [case for make in CASES for case in make()]
    text = json.dumps({"run": RUN, "zstd": list(zstandard.ZSTD_VERSION), "cases": cases}, indent=1)
    (folder / "texts-1.json").write_text(text + "\n", encoding="ascii")
