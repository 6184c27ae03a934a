"""Concatenating: the stored chunks of several encodings, copied as they are into one packed segment.

Entries describe themselves, so any codec may be copied: deltas, optimizer steps, sparse gradients. Only the places of
the chunks change. Memory is one chunk and the stream's blocks, besides the descriptions. Where steps have shards the
segments are as many as a tensor has shards of one step (`portions`); what lay in one segment stays together, because an
optimizer step moves what lies beside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptSegmentError, UsageError
from ckptstore.formats import jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.layout import ALIGN, CHUNK, HEADER_LIMIT
from ckptstore.formats.records import Encoding, Node, SegmentEntry, ref_of
from ckptstore.formats.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_steps import Part, StepEncoding
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.host.progress import Advance
from ckptstore.maintenance.merge.checkpoint_portions import numbered
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.packed_segments import shares, write_stream
from ckptstore.segments.segment_reader import SegmentReader, read_chunk
from ckptstore.segments.write_session import SegmentSession

__all__ = ["copied_bytes", "copy_encodings", "merged_draft"]

_OF_RANKS: Final = frozenset({"rank", "ranks"})
"""Members that tell the segments of many ranks apart (SPEC 5.1): what is written anew here has neither."""

_INDEX_BYTES: Final = HEADER_LIMIT // 2
"""Estimated bytes of an index at which the next segment begins."""

_Entries = tuple[tuple[str, TensorEntry], ...]
"""Tensors and shards, each with the id of the segment that has its bytes."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One step as its segments hold it: its entries, by the segment that each is to be copied to."""

    edge: Encoding
    tree: Any
    portions: tuple[_Entries, ...]
    extra: Mapping[str, Any]

    @property
    def stored(self) -> int:
        return sum(self.stored_in(number) for number in range(len(self.portions)))

    def stored_in(self, number: int) -> int:
        return sum(entry.stored for _, entry in self.portions[number])

    @property
    def index(self) -> int:
        """About the bytes of its part of the index."""
        entries = [entry for portion in self.portions for _, entry in portion]
        chunks = sum(len(entry.chunks) for entry in entries)
        return len(jsontext.dumps(self.tree)) + 60 * chunks + 100 * len(entries)


def copied_bytes(backend: Backend, catalog: Catalog, edges: Sequence[Encoding]) -> int:
    """About the bytes that `copy_encodings` would write: chunks and headers. Reads the segments' descriptions."""
    pieces = [_described(backend, catalog, edge) for edge in edges]
    return ALIGN * _count(pieces) + sum(piece.stored for piece in pieces)


def copy_encodings(
    session: SegmentSession,
    backend: Backend,
    catalog: Catalog,
    edges: Sequence[Encoding],
    *,
    run: str,
    term: int,
    limit: int | None = None,
) -> tuple[list[SegmentEntry], list[Encoding]]:
    """Copy encodings into one segment (several, where one would exceed `limit`), and make it durable.

    Of steps with tensors in shards it is one for each shard that a tensor has.

    Args:
        session: what they are written with; told the stored bytes of every chunk copied.
        backend: where they are.
        edges: ascending by step, of one term.
        run, term: what the new segments belong to.

    Returns:
        The segments, and the encodings that they are read by: those of `edges`, each in its new place.

    Raises:
        UsageError: a segment says that this version must not rewrite it.
        CorruptSegmentError: a chunk is not what was written.
        StorageError: the medium failed.
    """
    written: list[SegmentEntry] = []
    encodings: list[Encoding] = []
    most = session.backend.segment_bytes if limit is None else limit
    for group in _groups([_described(backend, catalog, edge) for edge in edges], most):
        ids = [uuid.uuid4().hex for _ in range(_count(group))]
        extra = _common(group)
        costs: dict[Node, int] = dict.fromkeys((piece.edge.checkpoint for piece in group), 0)
        for number in range(len(ids)):
            own = [piece for piece in group if number < len(piece.portions)]
            draft = replace(_draft(own, catalog, run, term, ids, number), extra=extra)
            entry = _copy_portion(session, backend, catalog, own, draft, number)
            written.append(entry)
            for piece, cost in zip(own, shares(entry.size, [one.stored_in(number) for one in own]), strict=True):
                costs[piece.edge.checkpoint] += cost
        encodings += [
            replace(piece.edge, segments=tuple(ids[: len(piece.portions)]), bytes=costs[piece.edge.checkpoint])
            for piece in group
        ]
    return written, encodings


def _count(pieces: Sequence[_Piece]) -> int:
    """How many segments take them."""
    return max((len(piece.portions) for piece in pieces), default=1)


def _draft(own: Sequence[_Piece], catalog: Catalog, run: str, term: int, ids: Sequence[str], number: int) -> SegmentDoc:
    """What segment `number` of `ids` says of itself, which holds that portion of each of `own`."""
    draft = merged_draft([piece.edge for piece in own], catalog, run, term)
    counts = {piece.edge.checkpoint[1]: len(piece.portions) for piece in own}
    return replace(
        draft,
        segment=ids[number],
        encodings={
            step: replace(told, part=Part(ids[0], number, counts[step]) if counts[step] > 1 else None)
            for step, told in draft.encodings.items()
        },
        trees={} if number else {piece.edge.checkpoint[1]: piece.tree for piece in own},
    )


def _copy_portion(
    session: SegmentSession,
    backend: Backend,
    catalog: Catalog,
    own: Sequence[_Piece],
    draft: SegmentDoc,
    number: int,
) -> SegmentEntry:
    def fill(stream: BlockStream) -> dict[int, dict[str, TensorEntry]]:
        return {
            piece.edge.checkpoint[1]: _copied(backend, catalog, piece.portions[number], stream, session.advance)
            for piece in own
        }

    return write_stream(session, draft, sum(piece.stored_in(number) for piece in own), fill)


def merged_draft(edges: Sequence[Encoding], catalog: Catalog, run: str, term: int) -> SegmentDoc:
    """The document of a segment that restores these checkpoints, without what is known last."""
    terms = {term, *(edge.checkpoint[0] for edge in edges)}
    return SegmentDoc(
        run=run,
        term=term,
        segment=uuid.uuid4().hex,
        encodings={edge.checkpoint[1]: _told(catalog, edge) for edge in edges},
        parents={number: catalog.terms[number].parent for number in sorted(terms) if _is_known(catalog, number)},
    )


def _told(catalog: Catalog, edge: Encoding) -> StepEncoding:
    entry = catalog.find(edge.checkpoint)
    assert entry is not None, edge.checkpoint  # it has an encoding
    return StepEncoding(entry.term, edge.kind, edge.base, entry.time, edge.lossy)


def _is_known(catalog: Catalog, term: int) -> bool:
    """Whether the term's OPEN is intact."""
    return term in catalog.terms and catalog.terms[term].known


def _described(backend: Backend, catalog: Catalog, edge: Encoding) -> _Piece:
    """One step, from the segments of its encoding."""
    step = edge.checkpoint[1]
    trees: list[Any] = []
    held: dict[str, dict[str, TensorEntry]] = {}
    extra: dict[str, Any] = {}
    for segment in edge.segments:
        with closing(SegmentReader(backend, catalog.segments[segment])) as reader:
            doc = reader.doc
            if doc.ro_compat:
                raise UsageError(
                    f"{reader.entry.key}: only a version that knows {', '.join(doc.ro_compat)} may rewrite it"
                )
            if step in doc.trees:
                trees.append(doc.trees[step])
            held[segment] = dict(doc.tensors.get(step, {}))
            extra |= {name: value for name, value in doc.extra.items() if name not in _OF_RANKS}
    if len(trees) != 1:
        raise CorruptSegmentError(f"{_keys(catalog, edge)}: {len(trees)} trees of step {step}, there has to be one")
    places = numbered(held.values())
    portions: list[list[tuple[str, TensorEntry]]] = [[] for _ in range(max(places, default=0) + 1)]
    for place, (segment, tensors) in zip(places, held.items(), strict=True):
        portions[place] += [(segment, entry) for entry in tensors.values()]
    return _Piece(edge, trees[0], tuple(map(tuple, portions)), extra)


def _common(group: Sequence[_Piece]) -> dict[str, Any]:
    """Members that this version does not know and that all of them agree on.

    What they disagree on cannot be said of the whole: it is not this version's to merge.
    """
    found: dict[str, Any] = {}
    for piece in group:
        for name, value in piece.extra.items():
            if found.setdefault(name, value) != value:
                raise UsageError(
                    f"the segments of {ref_of(piece.edge.checkpoint)} say {name!r}, which this "
                    "version does not know and must not lose: merge them with a newer one"
                )
    return found


def _groups(pieces: Sequence[_Piece], limit: int) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    stored = index = 0
    for piece in pieces:
        if group and (stored + piece.stored > limit or index + piece.index > _INDEX_BYTES):
            yield group
            group, stored, index = [], 0, 0
        group.append(piece)
        stored += piece.stored
        index += piece.index
    if group:
        yield group


def _copied(
    backend: Backend, catalog: Catalog, entries: _Entries, stream: BlockStream, advance: Advance
) -> dict[str, TensorEntry]:
    """Append the chunks of one step -> its entries in their new place."""
    made: dict[str, TensorEntry] = {}
    scratch = aligned(CHUNK + SLACK)
    for segment in dict.fromkeys(segment for segment, _ in entries):
        with closing(SegmentReader(backend, catalog.segments[segment])) as reader:
            for owner, entry in entries:
                if owner == segment:
                    chunks = tuple(_append(reader, entry, chunk, stream, scratch, advance) for chunk in entry.chunks)
                    made[entry.name] = replace(entry, chunks=chunks)
    return made


def _append(
    reader: SegmentReader, entry: TensorEntry, chunk: Chunk, stream: BlockStream, scratch: Bytes, advance: Advance
) -> Chunk:
    payload = read_chunk(reader, entry, chunk, scratch)
    at = stream.position
    stream.append(payload)
    advance(chunk.length)
    return replace(chunk, offset=at)


def _keys(catalog: Catalog, edge: Encoding) -> str:
    return ", ".join(catalog.segments[segment].key for segment in edge.segments)
