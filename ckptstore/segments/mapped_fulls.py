"""Copies the tensors of a full straight into mapped segments of the medium (LightCheck-D), without another buffer.

The segments are opened, and their data regions mapped, before anything is copied. Once all tensors are copied, they
are hashed in place and made durable, and the header is written last, as in any segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final

import numpy as np
import xxhash

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.formats import checksums, digest, jsontext
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.layout import (
    Layout,
    TensorSpec,
    chunk_extents,
    padded,
    place,
    split,
)
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry, encode_plain, plan_plain, raw_entry
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.segments.aligned_regions import LaidOutState, SegmentRegion
from ckptstore.segments.packed_segments import drafts
from ckptstore.segments.plain_segments import WrittenState
from ckptstore.segments.write_session import SegmentSession

__all__ = ["MappedSegment", "MappedState", "map_segments", "regions_of", "write_direct"]

_PIECE: Final = 1 << 20
_SLACK: Final = 64 << 10
"""A header may grow by this many bytes and a quarter after its segment was opened: the state's values change."""


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """An open segment whose data region is mapped into memory.

    Attributes:
        id: its uuid.
        layout: the positions of its tensors, after a header that has space to grow.
        memory: the data region, page-aligned, padded to whole pages; invalid once the sink is sealed or aborted.
    """

    id: str
    layout: Layout
    sink: SegmentSink
    memory: Bytes


@dataclass(frozen=True, slots=True)
class MappedState(LaidOutState):
    """A state whose tensors are in mapped segments.

    Attributes:
        mapped: one for each segment, in order.
        begun: ids of the segments that are, or were, being completed: the code that completes them drops them.
    """

    mapped_directly: ClassVar[bool] = True
    mapped: tuple[MappedSegment, ...] = ()
    begun: list[str] = field(default_factory=list)

    def abort(self) -> list[str]:
        """Abort the segments that are not sealed -> ids of those whose completion was never started.

        The tensors must not be used any more.
        """
        _abort(self.mapped)
        return [segment.id for segment in self.mapped if segment.id not in self.begun]


def map_segments(
    backend: Backend, flat: FlatState, draft: SegmentDoc, limit: int | None = None
) -> tuple[MappedSegment, ...] | None:
    """Open and map the segments of a full of the tensors of `flat`; None: the medium cannot map segments.

    Args:
        draft: their document as it is now, which may still grow; see `packed_segments.drafts`.
        limit: maximum bytes of tensors per segment; None: what the medium prefers.

    Raises:
        StorageError: the medium failed, or is full; the segments are removed as far as possible.
    """
    specs = [TensorSpec(name, source.dtype, tuple(source.shape)) for name, source in flat.tensors.items()]
    divided = split(specs, backend.segment_bytes if limit is None else limit)
    docs = drafts(draft, flat.tree, len(divided))
    layouts = [_with_slack(plan_plain(members, doc)) for members, doc in zip(divided, docs, strict=True)]
    backend.check_space(sum(layout.header_size + padded(layout.size - layout.header_size) for layout in layouts))
    found: list[MappedSegment] = []
    try:
        for doc, layout in zip(docs, layouts, strict=True):
            length = padded(layout.size - layout.header_size)
            sink = backend.open_sink(SegmentEntry(doc.segment, doc.term, 0, 0, "").key, layout.header_size + length)
            found.append(MappedSegment(doc.segment, layout, sink, np.empty(0, np.uint8)))
            memory = sink.map(layout.header_size, length) if length else None
            if memory is None:
                _abort(found)
                return None
            found[-1] = replace(found[-1], memory=np.frombuffer(memory, np.uint8))
    except BaseException:
        _abort(found)
        raise
    return tuple(found)


def _with_slack(planned: Layout) -> Layout:
    slack = padded(_SLACK + (planned.header_size - padded(1)) // 4)
    return place(planned.specs, planned.header_size + slack)


def _abort(segments: Sequence[MappedSegment]) -> None:
    for segment in segments:
        segment.sink.abort()


def regions_of(mapped: Sequence[MappedSegment], flat: FlatState) -> tuple[tuple[SegmentRegion, ...], dict[str, Bytes]]:
    """The regions of mapped segments, padded with zeros, and the position of each tensor of `flat`."""
    places: dict[str, Bytes] = {}
    regions = []
    for segment in mapped:
        layout = segment.layout
        segment.memory[layout.size - layout.header_size :] = 0
        for spec in layout.specs:
            begin = layout.offsets[spec.name] - layout.header_size
            places[spec.name] = segment.memory[begin : begin + spec.nbytes]
        names = {spec.name for spec in layout.specs}
        regions.append(
            SegmentRegion(
                tuple(TensorSpec(n, s.dtype, tuple(s.shape)) for n, s in flat.tensors.items() if n in names),
                segment.memory,
            )
        )
    return tuple(regions), places


def write_direct(session: SegmentSession, flat: MappedState, draft: SegmentDoc) -> WrittenState | None:
    """Complete the segments that the tensors of `flat` are in, and make them durable (COMMIT step 1).

    Returns:
        None if a header no longer fits because the state's values have grown more than expected. Then the state must be
        written in the ordinary way.

    Raises:
        StorageError: the medium failed; what was written is removed as far as possible.
    """
    docs = _docs(flat, draft)
    layouts: list[Layout] = []
    for segment, doc in zip(flat.mapped, docs, strict=True):
        planned = plan_plain(segment.layout.specs, doc)
        if planned.header_size > segment.layout.header_size:
            return None
        layouts.append(replace(segment.layout, header=planned.header))
    written: list[SegmentEntry] = []
    entries: dict[str, TensorEntry] = {}
    for segment, layout, doc in zip(flat.mapped, layouts, docs, strict=True):
        tensors: dict[str, TensorEntry] = {}
        flat.begun.append(segment.id)
        data = partial(_complete, session, segment, layout, doc, tensors)
        written.append(session.write_segment(doc, segment.layout.size, data, segment.sink))
        entries |= tensors
    rows = [(name, entries[name].dtype, entries[name].shape, entries[name].hash) for name in _order(flat)]
    state = checksums.state_hash(jsontext.dumps(flat.tree), rows)
    return WrittenState(tuple(written), state, sum(one.nbytes for one in flat.tensors.values()), len(entries))


def _docs(flat: MappedState, draft: SegmentDoc) -> list[SegmentDoc]:
    """The documents of the segments, with the ids under which they were opened."""
    docs = drafts(draft, flat.tree, len(flat.mapped))
    (step,) = draft.steps
    first = flat.mapped[0].id
    found = []
    for doc, segment in zip(docs, flat.mapped, strict=True):
        known = doc.encodings[step]
        part = known.part if known.part is None else replace(known.part, first=first)
        found.append(replace(doc, segment=segment.id, encodings={step: replace(known, part=part)}))
    return found


def _order(flat: MappedState) -> list[str]:
    """The tensors segment by segment, in the order in which `plain_segments.write_full` hashes them."""
    return [spec.name for segment in flat.mapped for spec in segment.layout.specs]


def _complete(
    session: SegmentSession,
    segment: MappedSegment,
    layout: Layout,
    doc: SegmentDoc,
    tensors: dict[str, TensorEntry],
    sink: SegmentSink,
) -> tuple[bytes, int]:
    """Hash the tensors, and make them durable before the header is written."""
    jobs: list[Callable[[], tuple[str, int]]] = []
    for spec in layout.specs:
        at = layout.offsets[spec.name] - layout.header_size
        jobs += [
            partial(_sums, session, segment.memory[at + begin : at + begin + length], begin)
            for begin, length in chunk_extents(spec.nbytes)
        ]
    sums = session.workers.in_order(jobs)
    for spec in layout.specs:
        found = [next(sums) for _ in chunk_extents(spec.nbytes)]
        number = digest.combine(*(share for _, share in found), nbytes=spec.nbytes)
        tensors[spec.name] = raw_entry(layout, spec, [text for text, _ in found], number)
    sums.close()
    sink.persist(layout.header_size, len(segment.memory))
    return encode_plain(layout, replace(doc, tensors={doc.steps[0]: tensors})), layout.size


def _sums(session: SegmentSession, chunk: Bytes, start: int) -> tuple[str, int]:
    """Hash of the chunk that begins at byte `start` of its tensor, and its share of the tensor's digest."""
    hasher = xxhash.xxh3_64()
    share = 0
    for at in range(0, len(chunk), _PIECE):
        piece = chunk[at : at + _PIECE]
        hasher.update(piece.data)
        share += digest.partial(piece, (start + at) // 4)
        session.advance(len(piece))
    return hasher.hexdigest(), share
