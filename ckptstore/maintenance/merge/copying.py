"""Concatenating: the stored chunks of several encodings, copied as they are into one packed segment.

Entries describe themselves, so any codec may be copied: deltas, optimizer steps, sparse gradients. Only the places of
the chunks change. Memory is one chunk and the stream's blocks, besides the descriptions.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptSegmentError, UsageError
from ckptstore.formats import jsontext
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.layout import ALIGN, CHUNK, HEADER_LIMIT
from ckptstore.formats.records import Encoding, SegmentEntry, ref_of
from ckptstore.formats.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_steps import StepEncoding
from ckptstore.host.buffers import SLACK, Bytes, aligned
from ckptstore.host.progress import Advance
from ckptstore.segments.packed import shares, write_stream
from ckptstore.segments.reading import SegmentReader, read_chunk
from ckptstore.segments.session import SegmentSession
from ckptstore.segments.stream import BlockStream

__all__ = ["copied_bytes", "copy_encodings", "merged_draft", "refuse_shards"]

_OF_RANKS: Final = frozenset({"rank", "ranks"})
"""Members that tell the segments of many ranks apart (SPEC 5.1): one that has all of their tensors has neither."""

_INDEX_BYTES: Final = HEADER_LIMIT // 2
"""Estimated bytes of an index at which the next segment begins."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One step as its segments hold it: the entries, each with the segment that has its bytes."""

    edge: Encoding
    tree: Any
    entries: tuple[tuple[str, TensorEntry], ...]  # segment id, entry
    extra: Mapping[str, Any]

    @property
    def stored(self) -> int:
        return sum(entry.stored for _, entry in self.entries)

    @property
    def index(self) -> int:
        """About the bytes of its part of the index."""
        chunks = sum(len(entry.chunks) for _, entry in self.entries)
        return len(jsontext.dumps(self.tree)) + 60 * chunks + 100 * len(self.entries)


def copied_bytes(backend: Backend, catalog: Catalog, edges: Sequence[Encoding]) -> int:
    """About the bytes that `copy_encodings` would write: chunks and a header. Reads the segments' descriptions."""
    return ALIGN + sum(_described(backend, catalog, edge).stored for edge in edges)


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

    Args:
        session: what they are written with; told the stored bytes of every chunk copied.
        backend: where they are.
        edges: ascending by step, of one term.
        run, term: what the new segments belong to.

    Returns:
        The segments, and the encodings that they are read by: those of `edges`, each in its new place.

    Raises:
        UsageError: a segment says that this version must not rewrite it, or has shards.
        CorruptSegmentError: a chunk is not what was written.
        StorageError: the medium failed.
    """
    written: list[SegmentEntry] = []
    encodings: list[Encoding] = []
    most = session.backend.segment_bytes if limit is None else limit
    for group in _groups([_described(backend, catalog, edge) for edge in edges], most):
        draft = merged_draft([piece.edge for piece in group], catalog, run, term)
        draft = replace(
            draft,
            trees={piece.edge.checkpoint[1]: piece.tree for piece in group},
            extra=_common(group),
        )

        def fill(stream: BlockStream, group: Sequence[_Piece] = group) -> dict[int, dict[str, TensorEntry]]:
            return {
                piece.edge.checkpoint[1]: _copied(backend, catalog, piece, stream, session.advance) for piece in group
            }

        entry = write_stream(session, draft, sum(piece.stored for piece in group), fill)
        written.append(entry)
        costs = shares(entry.size, [piece.stored for piece in group])
        encodings += [
            replace(piece.edge, segments=(entry.id,), bytes=cost) for piece, cost in zip(group, costs, strict=True)
        ]
    return written, encodings


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
    entries: list[tuple[str, TensorEntry]] = []
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
            tensors = list(doc.tensors.get(step, {}).values())
            if any(entry.offset is not None for entry in tensors):
                refuse_shards(ref_of(edge.checkpoint))
            entries += [(segment, entry) for entry in tensors]
            extra |= {name: value for name, value in doc.extra.items() if name not in _OF_RANKS}
    if len(trees) != 1:
        raise CorruptSegmentError(f"{_keys(catalog, edge)}: {len(trees)} trees of step {step}, there has to be one")
    return _Piece(edge, trees[0], tuple(entries), extra)


def refuse_shards(ref: str) -> NoReturn:
    """Raises `UsageError`: a segment has a name once, and shards of one tensor have the same."""
    raise UsageError(
        f"checkpoint {ref} is stored in shards, which cannot be merged: one segment holds one shard of a tensor; "
        "retire steps instead of merging them"
    )


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
    backend: Backend, catalog: Catalog, piece: _Piece, stream: BlockStream, advance: Advance
) -> dict[str, TensorEntry]:
    """Append the chunks of one step -> its entries in their new place."""
    made: dict[str, TensorEntry] = {}
    scratch = aligned(CHUNK + SLACK)
    for segment in dict.fromkeys(segment for segment, _ in piece.entries):
        with closing(SegmentReader(backend, catalog.segments[segment])) as reader:
            for owner, entry in piece.entries:
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
