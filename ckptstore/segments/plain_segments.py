"""Writes a state as plain segments: uncompressed bytes, hashed and digested by several threads.

Tensors in arbitrary memory pass through staging blocks, and nothing else is allocated; a medium that takes a segment as
a whole sends them without a copy. A state that has the layout of its segments is written from its own memory, and so is
a state that arrives in units (`staged_units`). `segment_writers` chooses the way and does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.layout import Layout, TensorSpec, spec_of, split
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry, plan_plain
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState
from ckptstore.host.pages import BLOCK
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.segments.block_stream import BlockWrites
from ckptstore.segments.packed_segments import drafts
from ckptstore.segments.segment_writers import MakeDataWriter, TensorSums, data_writers
from ckptstore.segments.staged_units import StagedState
from ckptstore.segments.write_session import Sealing, SegmentSession

__all__ = ["WrittenState", "plain_nbytes", "write_full", "write_plain"]


@dataclass(frozen=True, slots=True)
class WrittenState:
    """Durable segments that no record names yet, with the hash and the totals of their state."""

    segments: tuple[SegmentEntry, ...]
    state: str
    nbytes: int
    tensors: int

    @property
    def stored(self) -> int:
        """Bytes on the medium."""
        return sum(segment.size for segment in self.segments)


def write_full(
    session: SegmentSession,
    flat: FlatState,
    draft: SegmentDoc,
    *,
    limit: int | None = None,
) -> WrittenState:
    """Write `flat` as one or more uncompressed full segments and make them durable (COMMIT step 1).

    Args:
        session: every staging block must be able to hold a chunk.
        flat: the state; its tensors must not change until this returns. A `LaidOutState` is not copied, nor is an
            `StagedState`.
        draft: the document of its segments; see `packed_segments.drafts`.
        limit: maximum bytes of tensors per segment; None: what the medium prefers. For an `StagedState` its plan
            decides.

    Raises:
        StorageError: the state does not fit, which is checked before anything is written, or the medium failed; what
            was written is removed as far as possible.
    """
    segments, sums = _write(session, flat, partial(drafts, draft, flat.tree), limit)
    hashes = [
        (spec.name, spec.dtype, spec.shape, checksums.tensor_hash(own))
        for one in sums
        for spec, own in zip(one.layout.specs, one.hashes, strict=True)
    ]
    state = checksums.state_hash(jsontext.dumps(flat.tree), hashes)
    return WrittenState(segments, state, sum(spec.nbytes for one in sums for spec in one.layout.specs), len(hashes))


def write_plain(
    session: SegmentSession,
    flat: FlatState,
    documents: Callable[[int], Sequence[SegmentDoc]],
    *,
    limit: int | None = None,
) -> tuple[tuple[SegmentEntry, ...], list[TensorEntry]]:
    """Write the tensors of `flat`, whole ones and shards, as plain segments and make them durable.

    Args:
        documents: returns the documents, without tensors, of this number of segments.
        session, flat, limit: as for `write_full`. The tree is not used.

    Returns:
        the segments, and the entries of all tensors.

    Raises:
        the errors of `write_full`.
    """
    segments, sums = _write(session, flat, documents, limit)
    return segments, [entry for one in sums for entry in one.entries()]


def _write(
    session: SegmentSession,
    flat: FlatState,
    documents: Callable[[int], Sequence[SegmentDoc]],
    limit: int | None,
) -> tuple[tuple[SegmentEntry, ...], list[TensorSums]]:
    """`write_plain` -> the segments, and the sums of the tensors of each."""
    written: list[SegmentEntry] = []
    sums: list[TensorSums] = []
    divided = _divided(flat, session.backend.segment_bytes if limit is None else limit)
    docs = documents(len(divided))
    layouts = [plan_plain(members, doc, digests=True) for members, doc in zip(divided, docs, strict=True)]
    session.backend.check_space(_blocks(layouts))
    with session.sealing(len(divided)) as seal:
        for doc, layout, passing in zip(docs, layouts, data_writers(flat, divided), strict=True):
            entry, own = _write_plain(session, doc, layout, passing, seal)
            written.append(entry)
            sums.append(own)
    return tuple(written), sums


def _divided(flat: FlatState, limit: int) -> Sequence[Sequence[TensorSpec]]:
    """The tensors of each segment, in access order."""
    if isinstance(flat, StagedState):
        # Units that were copied already belong to the segments that they were planned for.
        return [members for members, _, _ in flat.plan.segments]
    if isinstance(flat, LaidOutState) and flat.limit == limit:
        return [region.specs for region in flat.regions]
    return split(_specs(flat), limit)


def plain_nbytes(
    backend: Backend, flat: FlatState, documents: Callable[[int], Sequence[SegmentDoc]], limit: int | None = None
) -> int:
    """The bytes that `write_plain` would take for `flat`, in whole blocks. Arguments as for `write_plain`."""
    divided = _divided(flat, backend.segment_bytes if limit is None else limit)
    docs = documents(len(divided))
    return _blocks([plan_plain(members, doc, digests=True) for members, doc in zip(divided, docs, strict=True)])


def _blocks(layouts: Sequence[Layout]) -> int:
    return sum(-(-layout.size // BLOCK) * BLOCK for layout in layouts)


def _specs(flat: FlatState) -> list[TensorSpec]:
    return [
        spec_of(name, source.dtype, tuple(source.shape), *place_of(source)) for name, source in flat.tensors.items()
    ]


def _write_plain(
    session: SegmentSession, doc: SegmentDoc, layout: Layout, passing: MakeDataWriter, seal: Sealing
) -> tuple[SegmentEntry, TensorSums]:
    sums: list[TensorSums] = []

    def data(sink: SegmentSink) -> tuple[bytes, int]:
        with BlockWrites(sink, session.blocks, session.staging.blocks) as writes:
            sums.append(passing(session, layout, writes).run())
            writes.wait()
            writes.check()
        return sums[0].header(doc), layout.size

    entry = session.write_segment(doc, layout.size, data, seal=seal)
    return entry, sums[0]
