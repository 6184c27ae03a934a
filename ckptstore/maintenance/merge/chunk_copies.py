"""Copies the stored chunks of several encodings unchanged into one packed segment (concatenation).

Entries describe themselves, so any codec can be copied: deltas, optimizer steps, sparse gradients. Only the offsets of
the chunks change. Memory is one chunk and the stream's blocks, plus the descriptions. If steps have shards, there are
as many segments as a tensor has shards of one step (`checkpoint_portions`). What was in one segment stays together,
because an optimizer step encodes the tensors beside it, too.
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
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, Node, SegmentEntry, ref_of
from ckptstore.formats.segment_files.layout import ALIGN, CHUNK, HEADER_LIMIT
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.host.progress import Advance
from ckptstore.maintenance.merge.checkpoint_portions import numbered
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.packed_segments import shares, write_stream
from ckptstore.segments.segment_reader import SegmentReader, read_chunk
from ckptstore.segments.write_session import SegmentSession

__all__ = ["copied_bytes", "copy_encodings", "merged_draft"]

_OF_RANKS: Final = frozenset({"rank", "ranks"})
"""Members that distinguish the segments of many ranks (SPEC 5.1). Rewritten segments have neither."""

_INDEX_BYTES: Final = HEADER_LIMIT // 2
"""Estimated bytes of an index at which the next segment begins."""

_Entries = tuple[tuple[str, TensorEntry], ...]
"""Tensors and shards, each with the id of the segment that contains its bytes."""


@dataclass(frozen=True, slots=True)
class _StepCopy:
    """One step as its segments store it: its entries, grouped by the segment to copy them to."""

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
        """Estimated bytes of its part of the index."""
        entries = [entry for portion in self.portions for _, entry in portion]
        chunks = sum(len(entry.chunks) for entry in entries)
        return len(jsontext.dumps(self.tree)) + 60 * chunks + 100 * len(entries)


def copied_bytes(backend: Backend, catalog: Catalog, edges: Sequence[Encoding]) -> int:
    """Estimate the bytes that `copy_encodings` would write: chunks and headers. Reads the segments' descriptions."""
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
    """Copy encodings into one segment (several, if one would exceed `limit`), and make it durable.

    Steps with tensors in shards take one segment for each shard of a tensor.

    Args:
        session: the session to write with; its callback gets the stored bytes of every copied chunk.
        backend: the medium of the encodings.
        edges: ascending by step, of one term.
        run, term: the run and term of the new segments.

    Returns:
        The segments, and the encodings that read them: those of `edges`, each in its new place.

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


def _count(pieces: Sequence[_StepCopy]) -> int:
    """Return the number of segments that they take."""
    return max((len(piece.portions) for piece in pieces), default=1)


def _draft(
    own: Sequence[_StepCopy], catalog: Catalog, run: str, term: int, ids: Sequence[str], number: int
) -> SegmentDoc:
    """Return the description of segment `number` of `ids`, which contains that portion of each of `own`."""
    draft = merged_draft([piece.edge for piece in own], catalog, run, term)
    counts = {piece.edge.checkpoint[1]: len(piece.portions) for piece in own}
    return replace(
        draft,
        segment=ids[number],
        encodings={
            step: replace(told, part=SegmentPart(ids[0], number, counts[step]) if counts[step] > 1 else None)
            for step, told in draft.encodings.items()
        },
        trees={} if number else {piece.edge.checkpoint[1]: piece.tree for piece in own},
    )


def _copy_portion(
    session: SegmentSession,
    backend: Backend,
    catalog: Catalog,
    own: Sequence[_StepCopy],
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
    """Return the document of a segment that restores these checkpoints, without the parts that are known last."""
    terms = {term, *(edge.checkpoint[0] for edge in edges)}
    return SegmentDoc(
        run=run,
        term=term,
        segment=uuid.uuid4().hex,
        encodings={edge.checkpoint[1]: _step_encoding(catalog, edge) for edge in edges},
        parents={number: catalog.terms[number].parent for number in sorted(terms) if _is_known(catalog, number)},
    )


def _step_encoding(catalog: Catalog, edge: Encoding) -> StepEncoding:
    entry = catalog.find(edge.checkpoint)
    assert entry is not None, edge.checkpoint  # it has an encoding
    return StepEncoding(entry.term, edge.kind, edge.base, entry.time, edge.lossy)


def _is_known(catalog: Catalog, term: int) -> bool:
    """Tell whether the term's OPEN is intact."""
    return term in catalog.terms and catalog.terms[term].known


def _described(backend: Backend, catalog: Catalog, edge: Encoding) -> _StepCopy:
    """Read one step from the segments of its encoding."""
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
    return _StepCopy(edge, trees[0], tuple(map(tuple, portions)), extra)


def _common(group: Sequence[_StepCopy]) -> dict[str, Any]:
    """Return the members that this version does not know and that all pieces agree on.

    Raises:
        UsageError: they disagree on one: this version cannot merge it.
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


def _groups(pieces: Sequence[_StepCopy], limit: int) -> Iterator[list[_StepCopy]]:
    group: list[_StepCopy] = []
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
    """Append the chunks of one step. Return its entries in their new place."""
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
