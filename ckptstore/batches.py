"""Writing a batch of coded steps as one packed segment, or as few as its size allows.

Every step of a batch stays a checkpoint of its own: it has its tree, its tensors with their hashes, and an encoding
that names the step before it as base.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.blocks import BlockStream
from ckptstore.diffing import EncodedStep, EncodedTensor
from ckptstore.formats import hashing
from ckptstore.formats.layout import HEADER_LIMIT, SEGMENT_LIMIT
from ckptstore.formats.records import Encoding, SegmentEntry
from ckptstore.formats.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_index import MAX_ENTRIES
from ckptstore.packing import write_stream
from ckptstore.staging import Staging

__all__ = ["KIND", "write_batch"]

KIND: Final = "gradient"

Unit = tuple[EncodedTensor, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one segment holds of one step."""

    step: EncodedStep
    units: tuple[Unit, ...]
    first: bool


def write_batch(
    backend: Backend,
    steps: Sequence[EncodedStep],
    *,
    run: str,
    term: int,
    staging: Staging,
    pool: ThreadPoolExecutor,
    begun: Callable[[str], None],
    digests: Mapping[str, int] | None = None,
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> tuple[tuple[SegmentEntry, ...], tuple[Encoding, ...]]:
    """Write coded steps and make them durable (COMMIT step 1) -> the segments, and for each step the edge to it.

    Args:
        steps: ascending, each coded against the one before it.
        staging: memory of the stream; `pool`: threads that write blocks.
        begun: called with the id of every segment before it exists.
        digests: state digests of the last step's tensors, by name.
        limit: payload bytes of a segment.

    Raises:
        StorageError: the medium failed; what was written is removed as far as possible.
    """
    written: list[SegmentEntry] = []
    used: dict[int, list[str]] = {step.step: [] for step in steps}
    overhead = 0
    for parts in _split(steps, limit):
        draft = SegmentDoc(
            run=run,
            term=term,
            segment=uuid.uuid4().hex,
            kind=KIND,
            steps=tuple(part.step.step for part in parts),
            bases=tuple(part.step.base for part in parts),
            trees={part.step.step: part.step.tree for part in parts if part.first},
            lossy=any(part.step.lossy for part in parts),
        )
        begun(draft.segment)
        entry, payload = _write_segment(backend, draft, parts, staging, pool, digests or {}, steps[-1].step)
        written.append(entry)
        overhead += entry.size - payload
        for part in parts:
            used[part.step.step].append(entry.id)
    share, left = divmod(overhead, len(steps))
    encodings = tuple(
        Encoding(
            checkpoint=(term, step.step),
            kind=KIND,
            base=step.base,
            segments=tuple(used[step.step]),
            lossy=step.lossy,
            bytes=step.stored + share + (left if step is steps[-1] else 0),
        )
        for step in steps
    )
    return tuple(written), encodings


def _split(steps: Sequence[EncodedStep], limit: int) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    filled = entries = 0
    for step in steps:
        units: list[Unit] = []
        first = True
        for unit in step.units:
            stored = sum(tensor.stored for tensor in unit)
            if (parts or units) and (filled + stored > limit or entries + len(unit) > MAX_ENTRIES // 4):
                if units or first:
                    parts.append(_Part(step, tuple(units), first))
                yield parts
                parts, units, first, filled, entries = [], [], False, 0, 0
            units.append(unit)
            filled += stored
            entries += len(unit)
        if units or first:
            parts.append(_Part(step, tuple(units), first))
    if parts:
        yield parts


def _write_segment(
    backend: Backend,
    draft: SegmentDoc,
    parts: Sequence[_Part],
    staging: Staging,
    pool: ThreadPoolExecutor,
    digests: Mapping[str, int],
    last: int,
) -> tuple[SegmentEntry, int]:
    """Write one segment -> its entry, and how many bytes of it are payload."""
    nbytes = sum(tensor.stored for part in parts for unit in part.units for tensor in unit)

    def fill(stream: BlockStream) -> dict[int, dict[str, TensorEntry]]:
        tensors: dict[int, dict[str, TensorEntry]] = {}
        for part in parts:
            known = digests if part.step.step == last else {}
            tensors[part.step.step] = {
                tensor.spec.name: _append(stream, tensor, known.get(tensor.spec.name))
                for unit in part.units
                for tensor in unit
            }
        return tensors

    return write_stream(backend, draft, nbytes, fill, staging, pool), nbytes


def _append(stream: BlockStream, tensor: EncodedTensor, digest: int | None) -> TensorEntry:
    chunks = []
    for coded in tensor.chunks:
        at = stream.position
        stream.append(coded.payload)
        stored = hashing.chunk_hash(coded.payload.data)
        chunks.append(Chunk(at, len(coded.payload), coded.logical, stored, coded.decoded_hash))
    spec = tensor.spec
    return TensorEntry(spec.name, spec.dtype, spec.shape, tuple(chunks), tensor.codec, tensor.params, digest=digest)
