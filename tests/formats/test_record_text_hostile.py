"""Sealed texts with a valid checksum and invalid contents: one error for every check of a member."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ckptstore.errors import FormatError, IncompatibleFormatError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import CommitRecord
from tools.fuzz import seeds

OPEN, COMMIT, SMALL = (json.loads(data) for data in seeds.records()[:3])
FORMAT = json.loads(seeds.formats()[1])
PIN = json.loads(seeds.pins()[0])
REQUEST = json.loads(seeds.requests()[0])
HEX = "a" * 32
BEYOND = 2**53 + 1


def sealed(document: Any) -> bytes:
    data = json.dumps(document).encode()
    return data + f"\n{xxh3_128(data)}\n".encode()


def record(document: Any) -> Any:
    return record_text.decode_record(sealed(document), seq=7, run=seeds.RUN, what="here")


def changed(document: Any, path: str, value: Any) -> Any:
    document = copy.deepcopy(document)
    holder = document
    *parents, last = path.split(".")
    for key in parents:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    if isinstance(holder, list):
        holder[int(last)] = value
    else:
        holder[last] = value
    return document


NUMBERS = (-1, BEYOND, 1.0, True, "1", None)
DIGESTS = ("", HEX[1:], HEX + "a", HEX.upper(), "g" * 32, 1, None, ["a"] * 32)
TIMES = ("1", True, None, 1e300, -1e300, BEYOND, -BEYOND)
IDENTITIES = (
    *([], [1, 3], [1, 3, HEX, 4], {"term": 1}, "abc", 7, [0, 3, HEX], [-1, 3, HEX], [1, -3, HEX]),
    *([1, BEYOND, HEX], [1, 3, "x"], [1.0, 3, HEX], [1, True, HEX], [1, 3, None]),
)
NODES = (
    {},
    "ab",
    [1],
    [[1]],
    [[1, 2, 3]],
    [[0, 1]],
    [[-1, 1]],
    [[1, -1]],
    [[1, "1"]],
    [{"1": 2}],
    [[True, 1]],
    [[1, BEYOND]],
)
IDS = ({}, HEX, [1], [HEX[1:]], [HEX.upper()], [None], [["a"] * 32])

OPEN_LIES = [
    *[("run", value) for value in DIGESTS] + [("run", "f" * 32)],
    *[("nonce", value) for value in DIGESTS],
    *[("seq", value) for value in (*NUMBERS, 8)],
    *[("term", value) for value in (*NUMBERS, 0)],
    *[("time", value) for value in TIMES],
    *[("parent", value) for value in IDENTITIES],
    *[("writer", value) for value in ([], "x", 1)],
    *[("ckptstore", value) for value in (None, 1, ["open"])],
    *[("ro_compat", value) for value in ([1], "x", {}, [None])],
    *[("incompat", value) for value in ([1], "x", {})],
]
COMMIT_LIES = [
    *[("term", 0), ("nonce", "x"), ("segments", {}), ("segments.0", []), ("checkpoints.0", 1), ("encodings.0", None)],
    *[(f"segments.0.{name}", value) for name in ("size", "header") for value in NUMBERS],
    *[(f"segments.0.{name}", value) for name in ("id", "hash") for value in DIGESTS],
    *[(f"checkpoints.0.{name}", value) for name in ("step", "tensors", "bytes") for value in NUMBERS],
    *[("checkpoints.0.state", value) for value in DIGESTS],
    *[("checkpoints.0.time", value) for value in TIMES],
    *[
        ("encodings.0.checkpoint", value)
        for value in (None, [], [1], [0, 1], [1, -1], [[1, 1]], "11", {"1": 1}, [1, 1, 1])
    ],
    *[("encodings.1.base", value) for value in IDENTITIES],
    *[("encodings.0.kind", value) for value in (None, 1, ["full"])],
    *[("encodings.0.lossy", value) for value in (0, 1, "no", None)],
    *[("encodings.0.bytes", value) for value in NUMBERS],
    *[("encodings.0.segments", value) for value in ([], None, *IDS)],
    *[("drops", value) for value in IDS],
    *[("swept", value) for value in IDS],
    *[("retires", value) for value in NODES],
    *[
        ("tags", value)
        for value in ([], {"x": 1}, {"x": [0, 1]}, {"x": [1]}, {"": [1, 1]}, {"no tag!": None}, {"x": False})
    ],
    *[("tags", {"x" * 129: [1, 1]}), ("tags", {"x\n": [1, 1]}), ("tags", {"-x": [1, 1]}), ("tags", {"é": None})],
    *[
        ("requests", value)
        for value in ([], {HEX[1:]: None}, {HEX.upper(): None}, {HEX: 1}, {HEX: False}, {HEX: ["no"]})
    ],
    *[("manifest", value) for value in ([1], "x", {"id": HEX}, {"id": HEX, "size": 5, "hash": HEX})],
    *[("ro_compat", [1])],
]
FORMAT_LIES = [
    *[("ckptstore", value) for value in ("commit", None, 1)],
    *[("run", value) for value in DIGESTS],
    *[("major", value) for value in NUMBERS],
    *[("anchor_every", value) for value in (*NUMBERS, 0)],
    *[("features", value) for value in ([], "x", {"write": "x"}, {"write": [1]}, {"read": {}})],
]
PIN_LIES = [
    *[("ckptstore", value) for value in ("commit", None, 1)],
    *[("nonce", value) for value in DIGESTS],
    *[("segments", value) for value in IDS],
    *[("reader", value) for value in ([], "x", 1)],
]
REQUEST_LIES = [
    *[("ckptstore", value) for value in ("commit", None, 1)],
    *[("run", value) for value in (*DIGESTS, "f" * 32)],
    *[("id", value) for value in DIGESTS],
    *[("term", value) for value in (*NUMBERS, 0)],
    *[("what", value) for value in (None, 1)],
    *[("segments.0.size", -1), ("encodings.0.segments", []), ("drops", [1]), ("retires", [[1]]), ("tags", {"x": 1})],
]


def cases(*tables: tuple[str, Any, list[tuple[str, Any]]]) -> list[Any]:
    return [
        pytest.param(kind, document, path, value, id=f"{kind}-{path}={value!r:.30}".encode("ascii", "replace").decode())
        for kind, document, lies in tables
        for path, value in lies
    ]


@pytest.mark.parametrize(
    ("kind", "document", "path", "value"),
    cases(
        ("open", OPEN, OPEN_LIES),
        ("commit", COMMIT, COMMIT_LIES),
        ("format", FORMAT, FORMAT_LIES),
        ("pin", PIN, PIN_LIES),
        ("request", REQUEST, REQUEST_LIES),
    ),
)
def test_a_lie(kind: str, document: Any, path: str, value: Any) -> None:
    if value is None and path in ("parent", "encodings.1.base"):
        return
    data = sealed(changed(document, path, value))
    decode = {
        "format": lambda: record_text.decode_format(data, what="here"),
        "pin": lambda: record_text.decode_pin(data, what="here"),
        "request": lambda: record_text.decode_request(data, run=seeds.RUN, what="here"),
    }.get(kind, lambda: record_text.decode_record(data, seq=7, run=seeds.RUN, what="here"))
    with pytest.raises(FormatError, match="here"):
        decode()


def test_unknown_features_and_kinds() -> None:
    for document, decode in (
        (OPEN, record),
        (COMMIT, record),
        (REQUEST, lambda value: record_text.decode_request(sealed(value), run=seeds.RUN, what="here")),
    ):
        with pytest.raises(IncompatibleFormatError, match="later"):
            decode({**document, "incompat": ["later"]})
    with pytest.raises(IncompatibleFormatError, match="kind"):
        record({**OPEN, "ckptstore": "merge"})
    with pytest.raises(IncompatibleFormatError, match="later"):
        record_text.decode_format(sealed({**FORMAT, "features": {"read": ["later"]}}), what="here")
    with pytest.raises(IncompatibleFormatError, match="version 2"):
        record_text.decode_format(sealed({**FORMAT, "major": 2}), what="here")


def manifest(slot: dict[str, Any], held: Any, beside: dict[str, Any] | None = None, **pointer: Any) -> Any:
    data = sealed(held) if isinstance(held, dict) else held
    pointing = {"id": HEX, "size": len(data), "hash": xxh3_128(data), **pointer}
    common = {name: slot[name] for name in ("ckptstore", "run", "seq", "previous", "term", "nonce")}
    document = common | {"manifest": pointing} | (beside or {})
    return record_text.decode_record(
        sealed(document), seq=7, run=seeds.RUN, what="here", fetch=lambda _key, _size: data
    )


def test_manifests() -> None:
    found = manifest(COMMIT, COMMIT)
    assert isinstance(found, CommitRecord)
    assert found.manifest == HEX
    held = sealed(COMMIT)
    for wrong in (
        lambda: manifest(COMMIT, COMMIT, size=len(held) - 1),
        lambda: manifest(COMMIT, COMMIT, size=record_text.MANIFEST_LIMIT + 1),
        lambda: manifest(COMMIT, COMMIT, hash=HEX),
        lambda: manifest(COMMIT, COMMIT, id="x"),
        lambda: manifest(COMMIT, held[:-1], size=len(held) - 1),
        lambda: manifest(COMMIT, {**COMMIT, "term": 2}),
        lambda: manifest(COMMIT, {**COMMIT, "nonce": HEX}),
        lambda: manifest(COMMIT, {**COMMIT, "previous": HEX}),
        lambda: manifest(COMMIT, {**COMMIT, "seq": 8}),
        lambda: manifest(COMMIT, {**COMMIT, "run": HEX}),
        lambda: manifest(COMMIT, {**COMMIT, "ckptstore": "merge"}),
        lambda: manifest({**COMMIT, "ckptstore": "commit"}, {**COMMIT, "incompat": ["later"]}),
        # Bytes whose hash is right and that are not sealed text.
        lambda: manifest(COMMIT, json.dumps(COMMIT).encode()),
    ):
        with pytest.raises(FormatError, match="here"):
            wrong()
    # The right bytes, longer than the slot states: the hash covers the promised ones.
    with pytest.raises(FormatError, match="checksum"):
        manifest(COMMIT, held + b" ", size=len(held), hash=xxh3_128(held + b" "))


@pytest.mark.parametrize(
    "beside", [{"drops": []}, {"tags": {}}, {"retires": [[1, 3]]}, {"closed": True}, {"highest": 3}, {"keep": []}]
)
def test_members_beside_a_manifest_are_not_ignored(beside: dict[str, Any]) -> None:
    assert isinstance(manifest(COMMIT, COMMIT, {"later": 1}), CommitRecord)
    with pytest.raises(FormatError, match=rf"here: has a manifest, and also the member '{next(iter(beside))}'"):
        manifest(COMMIT, COMMIT, beside)


@pytest.mark.parametrize("where", [("slot",), ("manifest",), ("slot", "manifest")])
def test_required_features_count_in_the_slot_and_in_its_manifest(where: tuple[str, ...]) -> None:
    def decoded(**wrong: Any) -> Any:
        held = sealed(COMMIT | {"ro_compat": ["of manifest"]} if "manifest" in where else COMMIT)
        pointer = {"id": HEX, "size": len(held), "hash": xxh3_128(held)}
        own = {"ro_compat": ["of slot"]} if "slot" in where else {}
        common = {name: COMMIT[name] for name in ("ckptstore", "run", "seq", "previous", "term", "nonce")}
        slot = sealed(common | {"manifest": pointer} | own | wrong)
        return record_text.decode_record(slot, seq=7, run=seeds.RUN, what="here", fetch=lambda _key, _size: held)

    assert set(decoded().ro_compat) == {f"of {one}" for one in where}
    with pytest.raises(FormatError, match="ro_compat"):
        decoded(ro_compat="later")


def test_a_manifest_beyond_its_limit_is_not_fetched() -> None:
    def fetch(key: str, size: int) -> bytes:
        raise AssertionError(f"{key}, of {size} bytes, was asked for")

    document = SMALL | {"manifest": {"id": HEX, "size": record_text.MANIFEST_LIMIT + 1, "hash": HEX}}
    with pytest.raises(FormatError, match="a manifest of"):
        record_text.decode_record(sealed(document), seq=7, run=seeds.RUN, what="here", fetch=fetch)


def test_a_manifest_is_refused_where_none_can_be_fetched() -> None:
    document = SMALL | {"manifest": {"id": HEX, "size": 5, "hash": HEX}}
    with pytest.raises(FormatError, match="manifest of 5 bytes"):
        record_text.decode_record(sealed(document), seq=7, run=seeds.RUN, what="here")


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"x" * 34, b"{}" + b"\n" + b"0" * 32 + b"\n", sealed(OPEN)[:-1], sealed(OPEN) + b"\n"]
)
def test_unsealed_texts(data: bytes) -> None:
    with pytest.raises(FormatError, match="checksum"):
        record_text.unseal(data, what="here")


def test_every_byte_of_a_sealed_text_counts() -> None:
    data = sealed(PIN)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(FormatError):
            record_text.unseal(bytes(damaged), what="here")
    with pytest.raises(FormatError, match="at most"):
        record_text.unseal(data, what="here", max_bytes=len(data) - 1)
