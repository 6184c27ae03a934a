"""SPEC.md holds: its limits are the code's, and a reader written from it alone reads the golden segments."""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

import ckptstore.formats

FORMATS = Path(ckptstore.formats.__file__).parent
SPEC = (FORMATS / "SPEC.md").read_text(encoding="utf-8")
EXPECTED = json.loads((FORMATS / "golden" / "segments-1.json").read_text())["segments"]

LIMITS = re.findall(r"^\|[^|]+\| (\d+) \| `(\w+)\.(\w+)` \|$", SPEC, re.MULTILINE)


def test_the_table_of_limits_was_found() -> None:
    assert len(LIMITS) >= 16


@pytest.mark.parametrize(("value", "module", "name"), LIMITS, ids=[name for _, _, name in LIMITS])
def test_limits_are_those_of_the_code(value: str, module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"ckptstore.formats.{module}"), name) == int(value)


def test_dtypes_are_those_of_the_code() -> None:
    from ckptstore.formats.dtypes import DTYPES

    rows = re.findall(r"^\| (`\w+`[^|]*)\| ([\d, ]+) \| ([^|]+) \|$", section("2 Element types"), re.MULTILINE)
    named: dict[str, tuple[int, str]] = {}
    for names, sizes, stored in rows:
        codes = re.findall(r"`([A-Z]\w+)`", names)
        widths = [int(size) for size in sizes.split(",")] * (1 if "," in sizes else len(codes))
        targets = codes if "itself" in stored else re.findall(r"`(\w+)`", stored)
        named |= {code: (width, target) for code, width, target in zip(codes, widths, targets, strict=True)}
    assert named == {dtype.name: (dtype.itemsize, dtype.storage) for dtype in DTYPES.values()}


def test_tags_are_those_of_the_code() -> None:
    from ckptstore.formats import state, tree, values

    told = set(re.findall(r"`(\$\w+)`", section("3.1 The tree")))
    source = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (state, tree, values))
    assert told == set(re.findall(r'"(\$[a-z]+)"', source))


def test_links_lead_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", SPEC, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", SPEC)) <= headings


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ ", SPEC.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


# ---- a reader that knows the page and nothing else -------------------------------------------------------------------

ITEM = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8}
ITEM |= {"I64": 8, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
ITEM |= {"F4_E2M1_X2": 1, "C32": 4, "C64": 8, "C128": 16}


def cells(column: str) -> list[str | None]:
    return [None if column[at] == "-" else column[at : at + 16] for at in range(0, len(column), 16)]


def lengths(nbytes: int) -> list[int]:
    return [min(1 << 24, nbytes - start) for start in range(0, nbytes, 1 << 24)]


def entry(name: str, dtype: str, shape: list[int], chunks: list[Any], **more: Any) -> dict[str, Any]:
    found = {"name": name, "dtype": dtype, "shape": shape, "chunks": chunks, "codec": "raw", "params": {}}
    return found | {"global_shape": None, "offset": None, "digest": None} | more


def as_number(cell: str | None) -> int | None:
    return None if cell is None else int(cell, 16)


def read_plain(members: dict[str, Any], document: dict[str, Any], start: int) -> dict[str, Any]:
    logical = dict(document.pop("dtypes", []))
    shards = {place: {"global_shape": whole, "offset": at} for place, whole, at in document.pop("shards", [])}
    hashes = iter(cells(document.pop("hashes")))
    digests = cells(document.pop("digests", "-" * 16 * len(members)))
    tensors = {}
    for place, (name, info) in enumerate(members.items()):
        begin, end = info["data_offsets"]
        dtype = logical.get(place, info["dtype"])
        chunks, at = [], start + begin
        for length in lengths(end - begin):
            cell = next(hashes)
            chunk = {"offset": at, "length": length, "logical": length, "stored_hash": cell, "decoded_hash": cell}
            chunks.append(chunk | {"params": {}})
            at += length
        shape = info["shape"][:-1] if dtype.startswith("C") else info["shape"]
        more = shards.get(place, {})
        tensors[name] = entry(name, dtype, shape, chunks, digest=as_number(digests[place]), **more)
    assert next(hashes, None) is None
    return {str(document["steps"][0]): tensors}


def read_packed(document: dict[str, Any], index: dict[str, Any], start: int) -> dict[str, Any]:
    tensor_rows, codec_rows = index.pop("tensors"), index.pop("codecs")
    stored_lengths, counts = index.pop("length"), index.pop("counts")
    running = [sum(stored_lengths[:row]) for row in range(len(stored_lengths))]
    offsets, own = index.pop("offset", running), index.pop("params", [{}])
    noted = index.pop("chunk_params", [0] * len(stored_lengths))
    stored, decoded = iter(cells(index.pop("stored"))), iter(cells(index.pop("decoded")))
    columns = list(zip(index.pop("tensor"), index.pop("codec"), strict=True))
    digests = cells(index.pop("digests", "-" * 16 * len(columns)))
    chunk = iter(range(len(stored_lengths)))
    tensors: dict[str, Any] = {}
    steps = [step for step, count in zip(document["steps"], counts, strict=True) for _ in range(count)]
    for step, (tensor, codec), digest in zip(steps, columns, digests, strict=True):
        (name, dtype, shape, *shard), (code, params) = tensor_rows[tensor], codec_rows[codec]
        chunks = []
        for logical in lengths(math.prod(shape) * ITEM[dtype]):
            row = next(chunk)
            length = stored_lengths[row]
            cell = next(stored) if length else xxhash.xxh3_64_hexdigest(b"")
            found = {"offset": start + offsets[row], "length": length, "logical": logical, "stored_hash": cell}
            chunks.append(found | {"decoded_hash": cell if code == "raw" else next(decoded), "params": own[noted[row]]})
        more = {"global_shape": shard[0], "offset": shard[1]} if shard else {}
        made = entry(name, dtype, shape, chunks, codec=code, params=params, digest=as_number(digest), **more)
        tensors.setdefault(str(step), {})[name] = made
    return {str(step): tensors.get(str(step), {}) for step in document["steps"]}


def read(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length
    members = json.loads(data[8:start])
    document = json.loads(members.pop("__metadata__")["ckptstore"])
    if document["form"] == "plain":
        tensors = read_plain(members, document, start)
    else:
        begin, end = members["ckptstore/index"]["data_offsets"]
        stored, pointer = data[start + begin : start + end], document.pop("index")
        assert xxhash.xxh3_128_hexdigest(stored) == pointer["hash"]
        index = json.loads(zstandard.decompress(stored, max_output_size=pointer["length"]))
        tensors = read_packed(document, index, start)
        document |= index
    known = [
        "run",
        "term",
        "segment",
        "kind",
        "steps",
        "generation",
        "bases",
        "trees",
        "lossy",
        "incompat",
        "ro_compat",
    ]
    doc = {name: document.pop(name) for name in known} | {"tensors": tensors}
    assert (document.pop("version"), document.pop("form")) in [(1, "plain"), (1, "packed")]
    return doc | {"extra": document}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_reader_made_from_the_page_reads_the_golden_segments(name: str) -> None:
    data = (FORMATS / "golden" / name).read_bytes()
    assert read(data) == EXPECTED[name]["doc"]
    header = EXPECTED[name]["header"]
    assert xxhash.xxh3_128_hexdigest(data[:header]) == EXPECTED[name]["header_hash"]
