"""The golden segments: both forms, and everything that a document and an index can say.

Everything is derived from fixed numbers, so a second run writes the same bytes (the compressed index of packed segments
depends on the zstd library; its version is noted).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import zstandard

from ckptstore.formats import jsontext
from ckptstore.formats.checksums import chunk_hash, header_hash, state_hash, xxh3_128
from ckptstore.formats.digest import digest
from ckptstore.formats.dtypes import DTYPES
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_extents
from ckptstore.formats.segment_files.segment import (
    Chunk,
    SegmentDoc,
    TensorEntry,
    encode_packed,
    encode_plain,
    plan_packed,
    plan_plain,
    raw_entry,
)
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding

RUN = "00112233445566778899aabbccddeeff"
TIME = 1763793293.125
FULL = StepEncoding(3, "full")
PARENTS = {3: CheckpointId(2, 40, "2" * 32)}


def data_of(spec: TensorSpec) -> bytes:
    """The bytes of a golden tensor: a fixed pattern; only 0 and 1 for booleans."""
    seed = len(spec.name)
    values = ((37 * place + 11 * seed) % 256 for place in range(spec.nbytes))
    return bytes(value & 1 for value in values) if spec.dtype == "BOOL" else bytes(values)


def plain(doc: SegmentDoc, specs: Sequence[TensorSpec], *, digests: bool) -> tuple[bytes, SegmentDoc]:
    """A plain segment of `specs` and its document."""
    layout = plan_plain(specs, doc, digests=digests)
    tensors = {}
    for spec in layout.specs:
        data = data_of(spec)
        hashes = [chunk_hash(data[start : start + length]) for start, length in chunk_extents(spec.nbytes)]
        tensors[spec.name] = raw_entry(layout, spec, hashes, digest(data) if digests else None)
    doc = replace(doc, tensors={doc.steps[0]: tensors})
    return encode_plain(layout, doc) + b"".join(map(data_of, layout.specs)), doc


def packed(doc: SegmentDoc, steps: Mapping[int, Sequence[tuple[TensorEntry, bytes]]]) -> tuple[bytes, SegmentDoc]:
    """A packed segment. Entries come with the stored bytes of their chunks, which are laid end to end."""
    header_size = plan_packed(doc)
    payload = b"".join(stored for pairs in steps.values() for _, stored in pairs)
    tensors: dict[int, dict[str, TensorEntry]] = {step: {} for step in doc.steps}
    position = header_size
    for step, pairs in steps.items():
        for entry, _ in pairs:
            chunks = []
            for chunk in entry.chunks:
                chunks.append(replace(chunk, offset=position))
                position += chunk.length
            tensors[step][entry.name] = replace(entry, chunks=tuple(chunks))
    doc = replace(doc, tensors=tensors)
    header, index = encode_packed(doc, len(payload), header_size)
    return header + payload + index, doc


def state_of(doc: SegmentDoc) -> str:
    """The state hash of the one checkpoint that a segment holds."""
    (step,) = doc.steps
    tensors = [(name, entry.dtype, entry.shape, entry.hash) for name, entry in doc.tensors[step].items()]
    return state_hash(jsontext.dumps(doc.trees[step]), tensors)


def every_dtype() -> tuple[bytes, SegmentDoc]:
    """Every dtype; 0-d and empty tensors; names that JSON has to escape; a tree with tags."""
    specs = [TensorSpec(f"all.{name}", name, (2, 3)) for name in DTYPES]
    specs += [
        TensorSpec("aligned", "BF16", (8, 16)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("empty", "F64", (0, 5)),
        TensorSpec('näme "quoted" \\ \U0001f600\n', "U8", (7,)),
        TensorSpec("scalar.complex", "C128", ()),
    ]
    tree = {
        "model": {spec.name: {"$t": spec.name} for spec in specs},
        "step": 100,
        "lr": 0.001,
        "betas": {"$tuple": [0.9, 0.95]},
        "odd": {"$float": "nan"},
    }
    doc = SegmentDoc(RUN, 3, "a" * 32, {100: replace(FULL, time=TIME)}, parents=PARENTS, trees={100: tree})
    return plain(doc, specs, digests=True)


def shards() -> tuple[bytes, SegmentDoc]:
    """A further segment of a sharded checkpoint, in a recycled file, written by a newer version."""
    specs = [
        TensorSpec("w", "F32", (2, 8), (16, 8), (4, 0)),
        TensorSpec("z", "C64", (3,), (9,), (6,)),
        TensorSpec("replicated", "I64", (2,)),
    ]
    doc = SegmentDoc(
        RUN,
        3,
        "b" * 32,
        {101: replace(FULL, part=SegmentPart("c" * 32, 1, 2))},
        generation=7,
        ro_compat=("later",),
        extra={"mood": 3, "new": {"a": [1, None]}},
    )
    return plain(doc, specs, digests=False)


def no_tensors() -> tuple[bytes, SegmentDoc]:
    """A state without tensors."""
    return plain(SegmentDoc(RUN, 3, "c" * 32, {102: FULL}, trees={102: {"epoch": 1}}), [], digests=True)


def batch() -> tuple[bytes, SegmentDoc]:
    """Three steps of two terms: everything that a document and an index can say. The codecs are invented."""
    nothing = chunk_hash(b"")

    def entry(name: str, step: int, **more: Any) -> tuple[TensorEntry, bytes]:
        spec = TensorSpec(name, more.pop("dtype", "F32"), (10,))
        stored = bytes((step * place) % 256 for place in range(len(name)))
        chunk = Chunk(0, len(stored), spec.nbytes, chunk_hash(stored), more.pop("decoded", None))
        return TensorEntry(spec.name, spec.dtype, spec.shape, (chunk,), **more), stored

    def predicted(name: str, step: int) -> tuple[TensorEntry, bytes]:
        spec = TensorSpec(name, "F32", (3, 4 << 20), (6, 4 << 20), (3, 0))  # three chunks that take no bytes
        chunks = tuple(
            Chunk(0, 0, length, nothing, f"{step * start:016x}") for start, length in chunk_extents(spec.nbytes)
        )
        whole = {"global_shape": spec.global_shape, "offset": spec.offset}
        params = {"gradient": f"ckptstore/gradient/{name}", "lr": 0.001, "fma": True, "step": step}
        return TensorEntry(name, spec.dtype, spec.shape, chunks, "replay", params, digest=step << 40, **whole), b""

    raw = bytes(range(24))
    verbatim = TensorEntry(
        "raw", "I64", (3,), (Chunk(0, 24, 24, chunk_hash(raw), chunk_hash(raw)),), digest=(1 << 64) - 1
    )
    steps = {
        200: [
            entry("ckptstore/gradient/w", 200, dtype="BF16", codec="sparse", params={"k": 0.01}),
            predicted("w", 200),
            (verbatim, raw),
        ],
        201: [
            entry("ckptstore/gradient/w", 201, dtype="BF16", codec="sparse", params={"k": 1}),
            predicted("w", 201),
            entry("m", 201, codec="sub", params={"base": 0}, decoded="0123456789abcdef"),
        ],
        205: [entry("ckptstore/gradient/w", 205, dtype="BF16", codec="sparse", params={"k": True})],
    }
    steps[205].append(entry("v2", 205, codec="sub"))
    trees = {step: {"step": step, "w": {"$t": "w"}} for step in steps}
    below = CheckpointId(2, 40, "2" * 32)
    told = {
        200: StepEncoding(2, "delta", below, TIME, part=SegmentPart("d" * 32, 0, 2)),
        201: StepEncoding(3, "gradient", CheckpointId(2, 200, "1" * 32), TIME + 0.25, lossy=True),
        205: StepEncoding(3, "full", None, -1.5, lossy=True),
    }
    parents = {2: None, 3: below}
    doc = SegmentDoc(RUN, 3, "d" * 32, told, parents=parents, trees=trees, extra={"later": [1.5]})
    return packed(doc, steps)


def nothing_packed() -> tuple[bytes, SegmentDoc]:
    """A packed segment with a tree and no payload."""
    return packed(SegmentDoc(RUN, 3, "e" * 32, {300: StepEncoding(3, "delta")}, trees={300: [1, 2, 3]}), {300: []})


GOLDEN: Mapping[str, Callable[[], tuple[bytes, SegmentDoc]]] = {
    "segment-1-plain-every-dtype.safetensors": every_dtype,
    "segment-1-plain-shards.safetensors": shards,
    "segment-1-plain-no-tensors.safetensors": no_tensors,
    "segment-1-packed-batch.safetensors": batch,
    "segment-1-packed-no-payload.safetensors": nothing_packed,
}


def describe(data: bytes, doc: SegmentDoc) -> dict[str, Any]:
    """The expected contents of a golden segment."""
    header = int.from_bytes(data[:8], "little") + 8
    doc_json = asdict(doc)
    return {
        "size": len(data),
        "header": header,
        "header_hash": header_hash(data[:header]),
        "hash": xxh3_128(data),
        "doc": doc_json,
    }


def main(folder: Path) -> None:
    """Write every golden segment, and ``segments-1.json`` with their contents, to `folder`."""
    described = {}
    for name, make in GOLDEN.items():
        data, doc = make()
        (folder / name).write_bytes(data)
        described[name] = describe(data, doc)
    zstd = list(zstandard.ZSTD_VERSION)
    text = json.dumps({"zstd": zstd, "segments": described}, indent=1)
    (folder / "segments-1.json").write_text(text + "\n", encoding="ascii")
