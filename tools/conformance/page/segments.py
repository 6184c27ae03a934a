"""SPEC.md 5.1 to 5.3: the description of a segment, and the places of its chunks."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import xxhash
import zstandard

from tools.conformance.page.codecs import RefusedError

ITEM = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8}
ITEM |= {"I64": 8, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
ITEM |= {"F4_E2M1_X2": 1, "C32": 4, "C64": 8, "C128": 16}


def cells(column: str) -> list[str | None]:
    return [None if column[at] == "-" else column[at : at + 16] for at in range(0, len(column), 16)]


def known_cells(column: str) -> list[str | None]:
    """The cells of a column in which no hash may be missing."""
    found = cells(column)
    require(None not in found)
    return found


def lengths(nbytes: int) -> list[int]:
    return [min(1 << 24, nbytes - start) for start in range(0, nbytes, 1 << 24)]


def parsed(text: bytes) -> Any:
    """Parse JSON. Section 1: a high surrogate and a low one behind it are one character, however each is written."""
    return joined(json.loads(text.decode("utf-8", "surrogatepass")))


def joined(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(value, list):
        return [joined(one) for one in value]
    if isinstance(value, dict):
        members = {joined(name): joined(one) for name, one in value.items()}
        require(len(members) == len(value))
        return members
    return value


def require(holds: bool) -> None:
    if not holds:
        raise RefusedError("a segment")


def known(dtype: str) -> str:
    if dtype not in ITEM:
        raise RefusedError("a dtype")  # 11: of this segment
    return dtype


def entry(name: str, dtype: str, shape: list[int], chunks: list[Any], **more: Any) -> dict[str, Any]:
    found = {"name": name, "dtype": dtype, "shape": shape, "chunks": chunks, "codec": "raw", "params": {}}
    return found | {"global_shape": None, "offset": None, "digest": None} | more


def check_name(name: str) -> None:
    """5.3: names that no entry of a segment may have."""
    require(name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name))


def as_number(cell: str | None) -> int | None:
    return None if cell is None else int(cell, 16)


def read_plain(members: dict[str, Any], document: dict[str, Any], start: int) -> dict[str, Any]:
    logical = dict(document.pop("dtypes", []))
    shards = {place: {"global_shape": whole, "offset": at} for place, whole, at in document.pop("shards", [])}
    hashes = iter(known_cells(document.pop("hashes")))
    digests = cells(document.pop("digests", "-" * 16 * len(members)))
    tensors = {}
    require("uses" not in document)
    for place, (name, info) in enumerate(members.items()):
        check_name(name)
        begin, end = info["data_offsets"]
        dtype = known(logical.get(place, info["dtype"]))
        chunks, at = [], start + begin
        for length in lengths(end - begin):
            cell = next(hashes)
            chunks.append(
                {"offset": at, "length": length, "logical": length, "stored_hash": cell, "decoded_hash": cell}
            )
            at += length
        shape = info["shape"][:-1] if dtype.startswith("C") else info["shape"]
        more = shards.get(place, {})
        tensors[name] = entry(name, dtype, shape, chunks, digest=as_number(digests[place]), **more)
    require(next(hashes, None) is None)
    return {str(document["steps"][0]): tensors}


def read_packed(document: dict[str, Any], index: dict[str, Any], start: int) -> dict[str, Any]:
    tensor_rows, codec_rows = index.pop("tensors"), index.pop("codecs")
    rules = [params["rule"] for _, params in codec_rows if isinstance(params.get("rule"), dict)]
    uses = {code for code, _ in codec_rows} | {rule["rule"] for rule in rules if isinstance(rule.get("rule"), str)}
    for name, dtype, *_ in tensor_rows:
        check_name(name)
        known(dtype)
    require(document.pop("uses", sorted(uses)) == sorted(uses))
    stored_lengths, counts = index.pop("length"), index.pop("counts")
    offsets = [start + sum(stored_lengths[:row]) for row in range(len(stored_lengths))]
    stored, decoded = iter(known_cells(index.pop("stored"))), iter(cells(index.pop("decoded")))
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
            require(code != "raw" or length == logical)
            cell = next(stored) if length else xxhash.xxh3_64_hexdigest(b"")
            found = {"offset": offsets[row], "length": length, "logical": logical, "stored_hash": cell}
            chunks.append(found | {"decoded_hash": cell if code == "raw" else next(decoded)})
        more = {"global_shape": shard[0], "offset": shard[1]} if shard else {}
        made = entry(name, dtype, shape, chunks, codec=code, params=params, digest=as_number(digest), **more)
        tensors.setdefault(str(step), {})[name] = made
    return {str(step): tensors.get(str(step), {}) for step in document["steps"]}


def encodings(document: dict[str, Any]) -> dict[str, Any]:
    """The columns of the document, by step."""
    parts = {
        step: {"first": first, "number": number, "count": count} for step, first, number, count in document.pop("parts")
    }
    names, lossy = {"terms": "term", "kinds": "kind", "bases": "base", "times": "time"}, document.pop("lossy")
    columns = {one: document.pop(many) for many, one in names.items()}
    return {
        str(step): {name: column[row] for name, column in columns.items()}
        | {"lossy": step in lossy, "part": parts.get(step)}
        for row, step in enumerate(document.pop("steps"))
    }


def read(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length
    members = parsed(data[8:start])
    document = parsed(members.pop("__metadata__")["ckptstore"].encode("utf-8", "surrogatepass"))
    if document["form"] == "plain":
        tensors = read_plain(members, document, start)
    else:
        names = set(document)
        begin, end = members["ckptstore/index"]["data_offsets"]
        stored, pointer = data[start + begin : start + end], document.pop("index")
        require(xxhash.xxh3_128_hexdigest(stored) == pointer["hash"])
        index = parsed(zstandard.decompress(stored, max_output_size=pointer["length"]))
        require(not names & index.keys())
        tensors = read_packed(document, index, start)
        document |= index
    known = ["run", "term", "segment", "generation", "trees", "incompat", "ro_compat"]
    doc = {name: document.pop(name) for name in known} | {"tensors": tensors, "encodings": encodings(document)}
    check_parents(document["parents"])
    doc["parents"] = {str(term): parent for term, parent in document.pop("parents")}
    require((document.pop("version"), document.pop("form")) in [(1, "plain"), (1, "packed")])
    require(not doc["incompat"])
    check_ranks(document, [int(step) for step in doc["encodings"]])
    return doc | {"extra": document}


def check_parents(rows: list[Any]) -> None:
    """5.1: parents ascend by term, and each is of an earlier term."""
    terms = [term for term, _ in rows]
    require(all(type(term) is int and 1 <= term <= 9999999999 for term in terms) and terms == sorted(set(terms)))
    require(all(parent is None or 1 <= parent[0] < term for term, parent in rows))


def check_ranks(document: dict[str, Any], steps: list[int]) -> None:
    """5.1: segments of many ranks."""
    for name in ("rank", "ranks"):
        rows = document.get(name, [])
        require(isinstance(rows, list) and all(isinstance(row, list) and len(row) == 2 for row in rows))
        counts = [
            count for _, told in rows for count in (told if name == "ranks" and isinstance(told, list) else [told])
        ]
        require(all(type(count) is int and 0 <= count <= 1 << 53 for count in counts))
        require(name == "rank" or all(isinstance(told, list) for _, told in rows))
        found = [step for step, _ in rows]
        require(all(type(step) is int and step in steps for step in found) and found == sorted(set(found)))
