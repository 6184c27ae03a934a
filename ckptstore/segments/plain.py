"""Streaming a state into plain segments: copy, hash and write overlap; nothing but the staging blocks is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from ckptstore.backends.base import SegmentSink
from ckptstore.formats import digest, hashing, jsontext
from ckptstore.formats.layout import HEADER_LIMIT, SEGMENT_LIMIT, Layout, TensorSpec, chunk_extents, split
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry, encode_plain, plan_plain, raw_entry
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.progress import Advance
from ckptstore.segments.packed import drafts
from ckptstore.segments.session import SegmentSession
from ckptstore.segments.stream import BlockStream

__all__ = ["WrittenState", "write_full"]

_PIECE: Final = 1 << 20
"""Bytes copied and then hashed while they are still in the core's cache: the hash then reads no memory."""


@dataclass(frozen=True, slots=True)
class WrittenState:
    """Durable segments that no record names yet, and what they add up to."""

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
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> WrittenState:
    """Write `flat` as one or more uncompressed full segments and make them durable (COMMIT step 1).

    Args:
        flat: the state; its tensors must not change until this returns.
        draft: what its segments say of themselves; see `packed.drafts`.
        limit: bytes of tensors per segment.

    Raises:
        StorageError: the medium failed; what was written is removed as far as possible.
    """
    specs = [TensorSpec(name, source.dtype, source.shape) for name, source in flat.tensors.items()]
    written: list[SegmentEntry] = []
    hashes: list[tuple[str, str, Sequence[int], str]] = []
    divided = split(specs, limit)
    for doc, members in zip(drafts(draft, flat.tree, len(divided)), divided, strict=True):
        entry, tensors = _write_plain(session, doc, members, flat.tensors)
        written.append(entry)
        hashes += [(name, tensor.dtype, tensor.shape, tensor.hash) for name, tensor in tensors.items()]
    state = hashing.state_hash(jsontext.dumps(flat.tree), hashes)
    return WrittenState(tuple(written), state, sum(spec.nbytes for spec in specs), len(specs))


def _write_plain(
    session: SegmentSession, doc: SegmentDoc, specs: Sequence[TensorSpec], sources: Mapping[str, TensorSource]
) -> tuple[SegmentEntry, dict[str, TensorEntry]]:
    layout = plan_plain(specs, doc, digests=True)
    tensors: dict[str, TensorEntry] = {}

    def data(sink: SegmentSink) -> tuple[bytes, int]:
        with BlockStream(sink, session.staging, session.blocks, layout.header_size) as stream:
            for spec in layout.specs:
                tensors[spec.name] = _stream_tensor(stream, layout, spec, sources[spec.name], session.advance)
            assert stream.finish() == layout.size
        return encode_plain(layout, replace(doc, tensors={doc.steps[0]: tensors})), layout.size

    return session.write_segment(doc, layout.size, data), tensors


def _stream_tensor(
    stream: BlockStream, layout: Layout, spec: TensorSpec, source: TensorSource, advance: Advance
) -> TensorEntry:
    """Append one tensor, hashing every chunk, and summing up the state digest, as it passes."""
    assert stream.position == layout.offsets[spec.name], (spec.name, stream.position)
    view = source.view()
    hashes: list[str] = []
    running = digest.Running()
    for start, length in chunk_extents(spec.nbytes):
        hasher = xxhash.xxh3_64()
        done = 0
        while done < length:
            piece = stream.space(min(_PIECE, length - done))
            _copy(source, view, start + done, piece)
            hasher.update(piece.data)
            running.update(piece)
            stream.advance(len(piece))
            advance(len(piece))
            done += len(piece)
        hashes.append(hasher.hexdigest())
    return raw_entry(layout, spec, hashes, running.result())


def _copy(source: TensorSource, view: Bytes | None, offset: int, out: Bytes) -> None:
    if view is not None:
        out[:] = view[offset : offset + len(out)]
    else:
        source.read(offset, out)
