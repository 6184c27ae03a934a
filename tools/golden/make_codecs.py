"""Golden payloads of every codec but ``step``: a plain segment with the state of one checkpoint, a packed segment with
the next one as deltas against it, and ``codecs-1.json`` with the expected tensors of the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from ckptstore.formats import codecs
from ckptstore.formats.checksums import chunk_hash
from ckptstore.formats.codecs import rounding
from ckptstore.formats.digest import digest
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry, encode_plain, plan_plain, raw_entry
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from tools.golden.golden_set import GoldenSet, write
from tools.golden.make_segments import RUN, packed, state_of

BASE = "segment-1-codecs-base.safetensors"
DELTA = "segment-1-codecs-delta.safetensors"


@dataclass(frozen=True)
class Example:
    """One tensor of the second checkpoint, its codec, and the same tensor of the first."""

    name: str
    dtype: str
    data: np.ndarray
    codec: codecs.Codec
    base: np.ndarray | None = None
    level: int = codecs.FAST
    of: str | None = None


def _weights(seed: int, count: int, kind: type, moved: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the same a step later, as bytes."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.02, count)
    return codecs.as_bytes(old.astype(kind)), codecs.as_bytes((old + rng.normal(0, moved, count)).astype(kind))


def _specials() -> np.ndarray:
    """fp32 patterns: NaN payloads, infinities, zeros, subnormal numbers, ties of rounding, and weights."""
    edges = [0, 1, 0x7FFFFF, 0x33000000, 0x33000001, 0x38800000, 0x387FFFFF, 0x477FF000, 0x3F808000, 0x3F818000]
    edges += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    signed = np.array([pattern | sign for pattern in edges for sign in (0, 1 << 31)], "<u4")
    return np.concatenate([signed, _weights(20, 2000, np.float32, 0)[0].view("<u4")])


def _without_base() -> Iterator[Example]:
    rng = np.random.default_rng(1)
    weights = _weights(2, 4000, np.float32, 0)[0]
    signed = codecs.as_bytes((rng.geometric(0.1, 4000) * rng.choice([1, -1], 4000)).astype("<i2"))
    skewed = codecs.as_bytes(np.minimum(rng.geometric(0.8, 6000) - 1, 40).astype(np.uint8))
    wider = codecs.as_bytes(np.minimum(rng.geometric(0.65, 6000) - 1, 40).astype(np.uint8))
    rare = codecs.as_bytes(np.where(rng.random(6000) < 0.01, 7, 0).astype(np.uint8))
    halves = rng.integers(0, 1 << 16, 34_000).astype("<u4") | np.where(rng.random(34_000) < 0.04, 1 << 16, 0).astype(
        "<u4"
    )
    narrow = np.where(rng.random(5000) < 0.01, 70_000, np.minimum(rng.geometric(0.35, 5000) - 1, 15)).astype("<u4")
    yield Example("raw", "U8", codecs.as_bytes(np.arange(100, dtype=np.uint8)), codecs.Raw())
    yield Example("planes.rotate", "F32", weights, codecs.Planes(4, "rotate"))
    yield Example("planes.fold", "I16", signed, codecs.Planes(2, "fold"))
    yield Example("planes.small", "U8", skewed, codecs.Planes(1), level=codecs.THRIFTY)
    yield Example("planes.wider", "U8", wider, codecs.Planes(1), level=codecs.THRIFTY)
    yield Example("planes.sparse", "U8", rare, codecs.Planes(1))
    yield Example("planes.constant", "F64", codecs.as_bytes(np.full(700, 0.1)), codecs.Planes(8))
    yield Example("planes.halves", "U32", codecs.as_bytes(halves), codecs.Planes(4), level=codecs.THRIFTY)
    yield Example("planes.narrow", "U32", codecs.as_bytes(narrow), codecs.Planes(4))
    yield Example(
        "planes.zstd", "U8", codecs.as_bytes(np.tile(np.arange(50, dtype=np.uint8), 60)), codecs.Planes(1), level=9
    )
    yield Example("planes.odd", "U8", codecs.as_bytes(np.arange(17, dtype=np.uint8)), codecs.Planes(4))
    yield Example("prefix.9", "F32", weights, codecs.Prefix(4, 9))
    yield Example("prefix.groups", "F32", weights, codecs.Prefix(4, 9, 256))
    yield Example("prefix.12", "BF16", codecs.as_bytes(weights.view("<u4").astype("<u2")), codecs.Prefix(2, 12))


def _with_base() -> Iterator[Example]:
    for name, dtype, kind, count, moved in (
        ("f32", "F32", np.float32, 4000, 1e-6),
        ("f64", "F64", np.float64, 1500, 1e-9),
        ("bf16", "BF16", ml_dtypes.bfloat16, 6000, 1e-5),
    ):
        base, data = _weights(count, count, kind, moved)
        word = codecs.word_size(dtype)
        yield Example(f"xor.{name}", dtype, data, codecs.Xor(word), base)
        yield Example(f"diff.{name}", dtype, data, codecs.Sub(word), base, codecs.THRIFTY)
    base, data = _weights(5, 20_000, ml_dtypes.bfloat16, 1e-4)
    large = base.view("<u2") << 1 >> 8 >= 121  # the class of the largest did not change
    data.view("<u2")[large] = base.view("<u2")[large]
    yield Example("diff.context", "BF16", data, codecs.Sub(2, codecs.Context(7, 115, 122)), base, codecs.THRIFTY)
    base, data = _weights(6, 3000, np.float32, 0)
    yield Example("diff.unchanged", "F32", data, codecs.Sub(4), base)
    few = base.copy().view("<u4")
    few[[5, 700, 2999]] += np.array([1, 300, 70_000], "<u4")
    yield Example("diff.few", "F32", codecs.as_bytes(few), codecs.Sub(4), base)


def _derived() -> Iterator[Example]:
    master = _specials()
    yield Example("master", "F32", codecs.as_bytes(master), codecs.Planes(4, "rotate"))
    for to, rounded in (("BF16", rounding.to_bfloat16), ("F16", rounding.to_float16)):
        copy = np.empty(len(master), "<u2")
        rounded(master, copy)
        yield Example(
            f"derive.{to}", to, codecs.as_bytes(copy), codecs.Derive(to), codecs.as_bytes(master), of="master"
        )
    copy[1000] ^= 1
    yield Example(
        "derive.exception", "F16", codecs.as_bytes(copy), codecs.Derive("F16"), codecs.as_bytes(master), of="master"
    )


def examples() -> list[Example]:
    """Every codec, with all kinds of parameters, groups and pieces."""
    return [*_without_base(), *_with_base(), *_derived()]


def base_segment(found: list[Example]) -> bytes:
    """A plain segment with the tensors that deltas are made against."""
    return _base(found)[0]


def _base(found: list[Example]) -> tuple[bytes, SegmentDoc]:
    bases = {e.name: e.base for e in found if e.base is not None and e.of is None}
    specs = [TensorSpec(e.name, e.dtype, _shape(e)) for e in found if e.name in bases]
    trees = {10: {name: {"$t": name} for name in bases}}
    doc = SegmentDoc(RUN, 1, "a" * 32, {10: StepEncoding(1, "full")}, parents={1: None}, trees=trees)
    layout = plan_plain(specs, doc, digests=True)
    entries = {s.name: raw_entry(layout, s, [chunk_hash(bases[s.name])], digest(bases[s.name])) for s in layout.specs}
    doc = replace(doc, tensors={10: entries})
    return encode_plain(layout, doc) + b"".join(bases[spec.name].tobytes() for spec in layout.specs), doc


def delta_segment(found: list[Example]) -> bytes:
    """A packed segment with every example."""
    entries = []
    for e in found:
        stored = codecs.encode(e.codec, e.data, e.base, level=e.level).tobytes()
        chunk = Chunk(0, len(stored), len(e.data), chunk_hash(stored), chunk_hash(e.data))
        params = e.codec.params | ({"of": e.of} if e.of else {})
        entries.append(
            (TensorEntry(e.name, e.dtype, _shape(e), (chunk,), e.codec.name, params, digest=digest(e.data)), stored)
        )
    trees = {11: {e.name: {"$t": e.name} for e in found}}
    told = {11: StepEncoding(1, "delta", CheckpointId(1, 10, state_of(_base(found)[1])))}
    doc = SegmentDoc(RUN, 1, "b" * 32, told, parents={1: None}, trees=trees)
    return packed(doc, {11: entries})[0]


def _shape(example: Example) -> tuple[int, ...]:
    return (len(example.data) // codecs.word_size(example.dtype),)


SETS: tuple[GoldenSet[Example], ...] = (GoldenSet("codecs-1.json", BASE, DELTA, examples),)
"""The golden files of all codecs. The files of a set that is here never change: a later codec gets a row of its own."""


def main(folder: Path) -> None:
    """Write the files of each set to `folder`."""
    for one in SETS:
        found = list(one.examples())
        segments = {one.base: base_segment(found), one.change: delta_segment(found)}
        write(folder, one.listing, segments, ((e.name, e.data.tobytes()) for e in found))
