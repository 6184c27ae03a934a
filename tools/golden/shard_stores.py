"""Stores whose tensors are stored in shards, made of segments as many ranks would write them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.formats import codecs, dtypes
from ckptstore.formats.checksums import chunk_hash, header_hash, state_hash
from ckptstore.formats.digest import digest
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, CommitRecord, Encoding, SegmentEntry
from ckptstore.formats.jsontext import dumps
from ckptstore.formats.segment_files.boxes import Box
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
from ckptstore.formats.segment_files.shards import state_parts
from ckptstore.formats.states.state import tensor_names
from ckptstore.log.term import Term, open_term
from ckptstore.store import Store

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Piece:
    """A tensor or shard of one rank. `of` and `base`: the tensors that an encoded one refers to."""

    name: str
    data: Array
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    codec: codecs.Codec | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    base: Array | None = None

    @property
    def spec(self) -> TensorSpec:
        dtype = dtypes.from_numpy(self.data.dtype).name
        return TensorSpec(self.name, dtype, self.data.shape, self.global_shape, self.offset)

    @property
    def image(self) -> bytes:
        return np.ascontiguousarray(self.data).tobytes()


def cut(name: str, whole: Array, boxes: Sequence[Box], **more: Any) -> list[Piece]:
    """The shards of a tensor; `base`, if given, is the whole tensor of the base."""
    base = more.pop("base", None)
    found = []
    for box in boxes:
        index = box.within(Box.whole(whole.shape))
        below = None if base is None else base[index]
        found.append(Piece(name, whole[index].copy(), whole.shape, box.offset, base=below, **more))
    return found


class ShardStore:
    """A store of one term that accepts segments as given."""

    def __init__(self, store: Store | str | None = None) -> None:
        """Write to a store without terms, or to a new one at a URL."""
        if not isinstance(store, Store):
            store = ckptstore.open(store or f"memory://{uuid.uuid4().hex}", create=True)
        self.store = store
        self.term: Term = open_term(self.store.journal, None, {"host": "test"})
        self.states: dict[int, CheckpointId] = {}

    @property
    def backend(self) -> Backend:
        return self.store.backend

    def commit(
        self,
        step: int,
        ranks: Sequence[Sequence[Piece]],
        tree: Any = None,
        base: int | None = None,
        packed: bool = False,
    ) -> str:
        """Store a checkpoint: the pieces of each rank in a separate segment. The first one has the tree."""
        below = None if base is None else self.states[base]
        names = dict.fromkeys(piece.name for pieces in ranks for piece in pieces)
        named = [name for name in names if not name.startswith("ckptstore/")]
        tree = {name: {"$a": name} for name in named} if tree is None else tree
        first = uuid.uuid4().hex
        entries: list[SegmentEntry] = []
        tensors: list[TensorEntry] = []
        for rank, pieces in enumerate(ranks):
            part = SegmentPart(first, rank, len(ranks)) if len(ranks) > 1 else None
            told = StepEncoding(self.term.number, "full" if below is None else "delta", below, 1.0 * step, part=part)
            doc = SegmentDoc(
                self.store.run,
                self.term.number,
                uuid.uuid4().hex if rank else first,
                {step: told},
                parents={self.term.number: None},
                trees={} if rank else {step: tree},
            )
            made = _packed if packed or any(piece.codec for piece in pieces) else _plain
            data, header, found = made(doc, pieces)
            entry = SegmentEntry(doc.segment, doc.term, len(data), header, header_hash(data[:header]))
            self.backend.open_sink(entry.key, len(data)).abort()
            sink = self.backend.open_sink(entry.key, len(data))
            sink.write(0, memoryview(data))
            sink.seal(len(data))
            entries.append(entry)
            tensors += found
        wanted = set(tensor_names(tree))
        own = [tensor for tensor in tensors if tensor.name in wanted]
        state = state_hash(dumps(tree), state_parts(own))
        nbytes = sum(tensor.nbytes for tensor in own)
        checkpoint = CheckpointEntry(self.term.number, step, state, 1.0 * step, len(wanted), nbytes)
        kind = "full" if below is None else "delta"
        size = sum(entry.size for entry in entries)
        edge = Encoding(checkpoint.node, kind, below, tuple(entry.id for entry in entries), False, size)
        self.term.commit(
            CommitRecord(self.term.number, segments=tuple(entries), checkpoints=(checkpoint,), encodings=(edge,))
        )
        self.states[step] = checkpoint.id
        return state


def _plain(doc: SegmentDoc, pieces: Sequence[Piece]) -> tuple[bytes, int, list[TensorEntry]]:
    (step,) = doc.steps
    layout = plan_plain([piece.spec for piece in pieces], doc)
    images = {piece.name: piece.image for piece in pieces}
    tensors = {}
    for spec in layout.specs:
        image = images[spec.name]
        hashes = [chunk_hash(image[start : start + length]) for start, length in chunk_extents(spec.nbytes)]
        tensors[spec.name] = raw_entry(layout, spec, hashes, digest(image))
    header = encode_plain(layout, replace(doc, tensors={step: tensors}))
    return header + b"".join(images[spec.name] for spec in layout.specs), len(header), list(tensors.values())


def _packed(doc: SegmentDoc, pieces: Sequence[Piece]) -> tuple[bytes, int, list[TensorEntry]]:
    (step,) = doc.steps
    size = plan_packed(doc)
    payload = b""
    tensors = {}
    for piece in pieces:
        image, spec = np.frombuffer(piece.image, np.uint8), piece.spec
        base = None if piece.base is None else np.frombuffer(np.ascontiguousarray(piece.base).tobytes(), np.uint8)
        ratio = 0 if piece.codec is None else piece.codec.base_ratio
        chunks = []
        for start, length in chunk_extents(spec.nbytes):
            decoded = image[start : start + length]
            below = None if base is None or not ratio else base[ratio * start : ratio * (start + length)]
            stored = decoded.tobytes() if piece.codec is None else codecs.encode(piece.codec, decoded, below).tobytes()
            chunks.append(
                Chunk(size + len(payload), len(stored), length, chunk_hash(stored), chunk_hash(decoded.tobytes()))
            )
            payload += stored
        name, params = (
            ("raw", {}) if piece.codec is None else (piece.codec.name, {**piece.codec.params, **piece.params})
        )
        tensors[piece.name] = TensorEntry(
            spec.name,
            spec.dtype,
            spec.shape,
            tuple(chunks),
            name,
            params,
            spec.global_shape,
            spec.offset,
            digest(image),
        )
    header, index = encode_packed(replace(doc, tensors={step: tensors}), len(payload), size)
    return header + payload + index, len(header), list(tensors.values())


def by_rank(*tensors: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of several tensors over ranks: each rank has at most one of each."""
    count = max(map(len, tensors))
    return [[pieces[rank] for pieces in tensors if rank < len(pieces)] for rank in range(count)]


def divided(chance: random.Random, shape: Sequence[int], most: int = 6) -> list[Box]:
    """A way to cut a tensor: non-empty boxes, in any order, not only of a grid."""
    boxes = [Box.whole(shape)]
    for _ in range(chance.randrange(most)):
        splittable = [place for place, box in enumerate(boxes) if max(box.shape, default=1) > 1]
        if not splittable:
            break
        box = boxes.pop(chance.choice(splittable))
        dimension = chance.choice([number for number, length in enumerate(box.shape) if length > 1])
        at = chance.randrange(1, box.shape[dimension])
        offset, first, second = list(box.offset), list(box.shape), list(box.shape)
        first[dimension], second[dimension] = at, box.shape[dimension] - at
        offset[dimension] += at
        boxes += [Box(box.offset, tuple(first)), Box(tuple(offset), tuple(second))]
    chance.shuffle(boxes)
    return boxes


def rows(shape: Sequence[int], count: int) -> list[Box]:
    """Cut like FSDP2: along dimension 0, as torch.chunk does; ranks without rows have nothing."""
    length = -(-shape[0] // count)
    starts = range(0, shape[0], max(length, 1))
    return [Box((at, *[0] * (len(shape) - 1)), (min(length, shape[0] - at), *shape[1:])) for at in starts]


def columns(shape: Sequence[int], count: int) -> list[Box]:
    """Cut like tensor parallelism: along the last dimension."""
    length = -(-shape[-1] // count)
    lead = [0] * (len(shape) - 1)
    return [Box((*lead, at), (*shape[:-1], min(length, shape[-1] - at))) for at in range(0, shape[-1], max(length, 1))]
