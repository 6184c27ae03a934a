"""Writes a batch of compressed steps as one packed segment, or as few segments as its size allows.

Every step of a batch is a separate checkpoint: it has its tree, its tensors with their hashes, and an encoding that
names the previous step as its base.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ckptstore.formats import checksums
from ckptstore.formats.history.records import Encoding, SegmentEntry
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_index import MAX_ENTRIES
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.host.pages import BLOCK
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.packed_segments import INDEX_ENTRY, shares, write_stream
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.steps.step_encoding import EncodedStep, EncodedTensor

__all__ = ["KIND", "RankShare", "write_batch"]

KIND: Final = "gradient"

Unit = tuple[EncodedTensor, ...]


@dataclass(frozen=True, slots=True)
class RankShare:
    """The rank whose share of the state is written, if many ranks save together. One of the ranks writes the trees.

    Attributes:
        rank: the number of the rank.
        tree: uuid of the segment that holds the trees of all steps.
    """

    rank: int
    tree: str


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one step in one segment.

    Attributes:
        stored: the bytes of its payloads.
    """

    step: EncodedStep
    units: tuple[Unit, ...]
    first: bool
    stored: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", sum(tensor.stored for unit in self.units for tensor in unit))


def write_batch(
    session: SegmentSession,
    steps: Sequence[EncodedStep],
    draft: SegmentDoc,
    *,
    times: Sequence[float],
    digests: Mapping[str, int] | None = None,
    limit: int | None = None,
    share: RankShare | None = None,
) -> tuple[tuple[SegmentEntry, ...], tuple[Encoding, ...]]:
    """Write compressed steps and make them durable (COMMIT step 1) -> the segments, and the encoding of each step.

    Args:
        steps: ascending, each compressed against the previous one.
        draft: the fields that its segments share; their uuids and steps are filled in.
        times: when each of the steps was made.
        digests: state digests of the last step's tensors, by name.
        limit: payload bytes of a segment; None: the size that the medium prefers.
        share: one rank wrote the steps. Then the segments hold no trees, and the encodings name only these segments.

    Raises:
        StorageError: the medium failed; the written segments are removed as far as possible.
    """
    written: list[SegmentEntry] = []
    divided = [(uuid.uuid4().hex, parts) for parts in _split(steps, limit or session.backend.segment_bytes)]
    used: dict[int, list[str]] = {step.step: [] for step in steps}
    for segment, parts in divided:
        for part in parts:
            used[part.step.step].append(segment)
    _claim(session, steps)
    moments = dict(zip(used, times, strict=True))
    costs = dict.fromkeys(used, 0)
    for segment, parts in divided:
        doc = replace(
            draft,
            segment=segment,
            encodings={
                part.step.step: StepEncoding(
                    draft.term,
                    KIND,
                    part.step.base,
                    moments[part.step.step],
                    part.step.lossy,
                    _place(segment, used[part.step.step], share),
                )
                for part in parts
            },
            trees={} if share else {part.step.step: part.step.tree for part in parts if part.first},
        )
        if share is not None:
            doc = replace(doc, extra={**doc.extra, "rank": [[part.step.step, share.rank] for part in parts]})
        entry = _write_segment(session, doc, parts, digests or {}, steps[-1].step)
        written.append(entry)
        for part, cost in zip(parts, shares(entry.size, [part.stored for part in parts]), strict=True):
            costs[part.step.step] += cost
    encodings = tuple(
        Encoding((draft.term, step.step), KIND, step.base, tuple(used[step.step]), step.lossy, costs[step.step])
        for step in steps
    )
    return tuple(written), encodings


def _claim(session: SegmentSession, steps: Sequence[EncodedStep]) -> None:
    if (bound := session.backend.bound) is not None:
        bound.admit(sum(step.stored + INDEX_ENTRY * step.tensors + BLOCK for step in steps))


def _place(segment: str, every: Sequence[str], share: RankShare | None) -> SegmentPart | None:
    """Which part of a step is in `segment`, one of the segments in `every` (SPEC.md 5.1). None: all of the step."""
    number = every.index(segment)
    if share is not None:
        return SegmentPart(share.tree, 1 + number, 1 + len(every))
    return None if len(every) == 1 else SegmentPart(every[0], number, len(every))


def _split(steps: Sequence[EncodedStep], limit: int) -> Iterator[list[_Part]]:
    """Divide steps among segments of at most `limit` bytes -> the parts in each. A step may have several parts.

    A unit (tensors that are encoded together) is never divided, so a segment of one unit may exceed `limit`.
    """
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
    session: SegmentSession,
    draft: SegmentDoc,
    parts: Sequence[_Part],
    digests: Mapping[str, int],
    last: int,
) -> SegmentEntry:
    """Write one segment."""

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

    return write_stream(session, draft, sum(part.stored for part in parts), fill)


def _append(stream: BlockStream, tensor: EncodedTensor, digest: int | None) -> TensorEntry:
    chunks = []
    for coded in tensor.chunks:
        at = stream.position
        stream.append(coded.payload)
        stored = checksums.chunk_hash(coded.payload.data)
        chunks.append(Chunk(at, len(coded.payload), coded.logical, stored, coded.decoded_hash))
    spec = tensor.spec
    return TensorEntry(
        spec.name,
        spec.dtype,
        spec.shape,
        tuple(chunks),
        tensor.codec,
        tensor.params,
        spec.global_shape,
        spec.offset,
        digest,
    )
