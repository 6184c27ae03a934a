"""The fuzz targets. Checksums would hide everything behind them, so most targets seal the input first."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import zstandard

from ckptstore.errors import (
    CheckpointNotFoundError,
    CorruptLogError,
    CorruptSegmentError,
    FormatError,
    UsageError,
)
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.history import folds, record_text
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import (
    CommitRecord,
    OpenRecord,
    fold_key,
    fold_of,
    request_of,
    slot_key,
    slot_of,
)
from ckptstore.formats.segment_files.layout import ALIGN, TensorSpec
from ckptstore.formats.segment_files.segment import (
    SegmentDoc,
    encode_packed,
    encode_plain,
    header_length,
    parse,
    plan_packed,
    plan_plain,
    raw_entry,
)
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.state import flatten, select, tensor_names, unflatten
from ckptstore.log import refs
from tools.fuzz import seeds
from tools.fuzz.codecs import CODECS
from tools.fuzz.files import WEIGHTFILES
from tools.fuzz.guard import Target, Violation
from tools.fuzz.optimizers import OPTIMIZERS
from tools.fuzz.torchfiles import TORCHFILES

__all__ = ["TARGETS"]

RUN: Final = seeds.RUN
_LONGEST_DATA: Final = 1 << 50


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def _json(data: bytes) -> Any:
    """The JSON of an input, which a harness then passes on; None for no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# ------------------------------------------------------------------------------------------------ segments


def _framed(text: bytes) -> bytes:
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def _header(entries: dict[str, Any], document: Any) -> bytes:
    metadata = {"format": "pt", "ckptstore": json.dumps(document, separators=(",", ":"))}
    return _framed(json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode())


def _read_nothing(offset: int, length: int) -> bytes:
    raise CorruptSegmentError(f"the file has no {length} bytes at {offset}")


def _segment(data: bytes) -> bool:
    """``{"tensors": safetensors entries, "document": ours, "size": bytes}`` as a plain segment; else a file's bytes."""
    given = _json(data)
    if not isinstance(given, dict) or not isinstance(given.get("tensors"), dict):
        return _segment_file(data)
    header = _header(given["tensors"], given.get("document"))
    ends = [entry.get("data_offsets") for entry in given["tensors"].values() if isinstance(entry, dict)]
    numbers = [end[-1] for end in ends if isinstance(end, list) and end and type(end[-1]) is int]
    size = given.get("size", max([0, *numbers]))
    size = len(header) + (size if type(size) is int and 0 <= size < _LONGEST_DATA else 0)
    doc = parse(header, size, "fuzz", _read_nothing)
    _check_doc(doc, len(header), size)
    specs = [TensorSpec(e.name, e.dtype, e.shape, e.global_shape, e.offset) for e in doc.tensors[doc.steps[0]].values()]
    # Written again in this order (ours may differ), it has the same meaning.
    again = _relaid(doc, specs)
    _require(again == doc, "a plain segment that was read is written as another")
    return True


def _relaid(doc: SegmentDoc, specs: list[TensorSpec]) -> SegmentDoc:
    layout = plan_plain(specs, doc)
    old = doc.tensors[doc.steps[0]]
    new = {
        spec.name: raw_entry(layout, spec, [c.stored_hash for c in old[spec.name].chunks], old[spec.name].digest)
        for spec in layout.specs
    }
    header = encode_plain(layout, replace(doc, tensors={doc.steps[0]: new}))
    read = parse(header, layout.size, "again", _read_nothing)
    back = {
        name: replace(
            entry,
            chunks=tuple(
                replace(chunk, offset=before.offset)
                for chunk, before in zip(entry.chunks, old[name].chunks, strict=True)
            ),
        )
        for name, entry in read.tensors[doc.steps[0]].items()
    }
    return replace(read, tensors={doc.steps[0]: {name: back[name] for name in old}})


def _segment_file(data: bytes) -> bool:
    header = header_length(data, len(data), "fuzz")
    doc = parse(data[:header], len(data), "fuzz", lambda offset, length: data[offset : offset + length])
    _check_doc(doc, header, len(data))
    return True


def _check_doc(doc: SegmentDoc, header: int, size: int) -> None:
    for tensors in doc.tensors.values():
        for entry in tensors.values():
            _require(sum(chunk.logical for chunk in entry.chunks) == entry.nbytes, "chunks that are not the tensor")
            for chunk in entry.chunks:
                _require(header <= chunk.offset and chunk.offset + chunk.length <= size, "a chunk outside the file")
                _require(len(chunk.stored_hash) == 16, "a chunk without a hash")
    covered = sum(chunk.length for chunk in _distinct(doc))
    _require(header + covered <= size, "chunks that overlap")
    for tree in doc.trees.values():
        jsontext.dumps(tree)


def _distinct(doc: SegmentDoc) -> list[Any]:
    return [chunk for tensors in doc.tensors.values() for entry in tensors.values() for chunk in entry.chunks]


def _index(data: bytes) -> bool:
    """``{"document": ..., "index": ..., "payload": bytes}`` as a packed segment; else bytes as its stored index."""
    given = _json(data)
    if not isinstance(given, dict) or "index" not in given:
        given = {"document": seeds.packed_document(), "index": None, "payload": 0}
        stored, length = data, len(data)
        length = seeds.claimed_by_frame(data) // 3 or length
    else:
        text = json.dumps(given["index"], separators=(",", ":")).encode()
        stored, length = zstandard.compress(text), len(text)
    payload = given.get("payload")
    payload = payload if type(payload) is int and 0 <= payload < _LONGEST_DATA else 0
    document = given.get("document")
    if isinstance(document, dict):
        pointer = {"codec": "zstd", "length": length, "hash": checksums.xxh3_128(stored)}
        own = document.get("index")
        document = document | {"index": pointer | (own if isinstance(own, dict) else {})}
    end = payload + len(stored)
    entries = {
        "ckptstore/payload": {"dtype": "U8", "shape": [payload], "data_offsets": [0, payload]},
        "ckptstore/index": {"dtype": "U8", "shape": [len(stored)], "data_offsets": [payload, end]},
    }
    header = _header(entries, document)
    size = len(header) + end
    doc = parse(header, size, "fuzz", lambda _offset, _length: stored)
    _check_doc(doc, len(header), size)
    wide = plan_packed(doc)
    moved = _moved(doc, wide - len(header))
    again, index = encode_packed(moved, payload, wide)
    read = parse(again, wide + payload + len(index), "again", lambda _offset, _length: index)
    _require(read == moved, "a packed segment that was read is written as another")
    return True


def _moved(doc: SegmentDoc, distance: int) -> SegmentDoc:
    tensors = {
        step: {
            name: replace(entry, chunks=tuple(replace(chunk, offset=chunk.offset + distance) for chunk in entry.chunks))
            for name, entry in entries.items()
        }
        for step, entries in doc.tensors.items()
    }
    return replace(doc, tensors=tensors)


# ------------------------------------------------------------------------------------------------ the log


def _sealed(data: bytes) -> bytes:
    return data + f"\n{checksums.xxh3_128(data)}\n".encode("ascii")


def _record(data: bytes) -> bool:
    """A slot's text (with ``{"slot": ..., "manifest": ...}`` a slot and the manifest that it points to)."""
    given = _json(data)
    manifest: bytes | None = None
    if isinstance(given, dict) and isinstance(given.get("slot"), dict):
        manifest = _sealed(json.dumps(given.get("manifest"), separators=(",", ":")).encode())
        pointer = {"size": len(manifest), "hash": checksums.xxh3_128(manifest)}
        slot = given["slot"]
        own = slot.get("manifest")
        data = json.dumps(slot | {"manifest": pointer | own if isinstance(own, dict) else own}).encode()
    sealed = _sealed(data)
    record = record_text.decode_record(sealed, seq=7, run=RUN, what="fuzz", fetch=lambda _key, _size: manifest or b"")
    if isinstance(record, OpenRecord):
        again = record_text.encode_open(record, seq=7, run=RUN)
        _require(
            record_text.decode_record(again, seq=7, run=RUN, what="again") == record, "an OPEN reads back as another"
        )
        return True
    _same_commit(record)
    Catalog().apply(record, 7)  # "never fails, whatever the record says"
    return True


def _same_commit(record: CommitRecord) -> None:
    again, moved = record_text.encode_commit(record, seq=7, run=RUN, manifest="e" * 32)
    read = record_text.decode_record(again, seq=7, run=RUN, what="again", fetch=lambda _key, _size: moved or b"")
    assert isinstance(read, CommitRecord)
    _require(replace(read, manifest=record.manifest) == record, "a COMMIT reads back as another")


def _fold(data: bytes) -> bool:
    """The content of a fold's frame (JSON, columns); bytes that begin as a zstd frame are used unchanged."""
    body = data if data[:4] == b"\x28\xb5\x2f\xfd" else zstandard.compress(data)
    digest = checksums.xxh3_128(body)
    text = b"ckptstore fold\n" + digest.encode() + b"\n" + body
    catalog = folds.decode_fold(text, seq=7, run=RUN, digest16=digest[:16], what="fuzz")
    again, name = folds.encode_fold(catalog, run=RUN)
    read = folds.decode_fold(again, seq=7, run=RUN, digest16=name[:16], what="again")
    _require(_comparable(read) == _comparable(catalog), "a fold reads back as another catalog")
    return True


def _comparable(catalog: Catalog) -> Any:
    return {field.name: getattr(catalog, field.name) for field in fields(catalog) if field.compare}


def _text(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Callable[[bytes], bool]:
    def run(data: bytes) -> bool:
        found = decode(_sealed(data))
        _require(decode(encode(found)) == found, "a text reads back as another")
        return True

    return run


_format = _text(record_text.decode_format, record_text.encode_format)
_pin = _text(lambda data: record_text.decode_pin(data, what="fuzz"), record_text.encode_pin)
_request = _text(
    lambda data: record_text.decode_request(data, run=RUN, what="fuzz"),
    lambda found: record_text.encode_request(found, run=RUN),
)


# ------------------------------------------------------------------------------------------------ texts


def _jsontext(data: bytes) -> bool:
    try:
        found = jsontext.loads(data, what="fuzz", max_bytes=1 << 16)
    finally:
        jsontext.loads(b"[1]", what="the next text", max_bytes=10)
    _require(repr(found) == repr(json.loads(data.decode("utf-8", "surrogatepass"))), "JSON read as something else")
    written = jsontext.dumps(found)
    _require(repr(jsontext.loads(written, what="again", max_bytes=1 << 24)) == repr(found), "JSON written as another")
    return True


def _tree(data: bytes) -> bool:
    stored = jsontext.loads(data, what="fuzz", max_bytes=1 << 16)
    hidden = set(rank_trees.left_out(stored))
    tree = rank_trees.of_rank(stored, None)  # of many ranks, the union of all
    names = tensor_names(tree)
    _require(hidden.isdisjoint(names), "a tensor is in the union, and said to be left out")
    _require(hidden | set(names) <= set(tensor_names(stored)), "a tensor of a union comes from nowhere")
    select(tree, set(names[::2]))
    arrays: dict[tuple[str, str], Any] = {}

    def resolve(name: str, origin: str) -> Any:
        return arrays.setdefault((name, origin), np.full(3, len(arrays), np.int16))

    state = unflatten(tree, resolve)
    first = flatten(state)
    second = flatten(unflatten(first.tree, lambda name, _origin: first.tensors[name].array))  # type: ignore[attr-defined]
    _require(jsontext.dumps(second.tree) == jsontext.dumps(first.tree), "a state is written in two ways")
    _require(list(second.tensors) == list(first.tensors), "a state's tensors are named in two ways")
    _require(len(first.tensors) == len(names), "a tensor got lost")
    return True


def _ref(data: bytes) -> bool:
    """A REF, or a key in a listing."""
    text = data.decode("utf-8", "replace")
    catalog = seeds.catalog()
    for key, number in ((text, slot_of(text)), (f"log/{text}", slot_of(f"log/{text}"))):
        _require(number is None or slot_key(number) == key, f"{key!r} is taken for slot {number}")
    for key in (text, f"fold/{text}"):
        place = fold_of(key)
        _require(place is None or fold_key(place[0], place[1] + "0" * 16) == key, f"{key!r} is taken for a fold")
    for key in (text, f"req/{text}"):
        asked = request_of(key)
        _require(asked is None or f"req/{asked[0]:010d}-{asked[1]}" == key, f"{key!r} is taken for a request")
    entry = refs.resolve(catalog, text)
    _require(entry == catalog.checkpoints.get(entry.node), "a REF names what is not there")
    return True


TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (
        Target("segment", _segment, seeds.segments),
        Target("index", _index, seeds.indexes, declared=seeds.claimed_by_frame),
        Target("record", _record, seeds.records),
        Target("fold", _fold, seeds.fold_texts, declared=seeds.claimed_by_frame),
        Target("format", _format, seeds.formats),
        Target("pin", _pin, seeds.pins),
        Target("request", _request, seeds.requests),
        Target("tree", _tree, seeds.trees, refusals=(FormatError,)),
        Target("jsontext", _jsontext, seeds.jsontexts, refusals=(FormatError,)),
        Target("ref", _ref, seeds.refs, refusals=(UsageError, CheckpointNotFoundError, CorruptLogError)),
        CODECS,
        OPTIMIZERS,
        WEIGHTFILES,
        TORCHFILES,
    )
}
"""Every target by name."""
