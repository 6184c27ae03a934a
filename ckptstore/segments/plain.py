"""Writing a state as plain segments: its bytes as they are, hashed and summed up by several threads.

Tensors anywhere pass through staging blocks, and nothing else is allocated; a state that is laid out as its segments
will be is written from its own memory. Where every byte goes is known beforehand, so that several threads work at
once, each on bytes of its own:

- A *unit* is a run of neighbouring chunks, up to 16 MiB: what one job copies, hashes and sends.
- Chunks begin and end anywhere in a page of the file, and pages are what is written. A page belongs to the unit that
  begins it: that one copies to the page's end, and the next one hashes what is its own there and sends it no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import xxhash

from ckptstore.backends.base import SegmentSink
from ckptstore.formats import digest, hashing, jsontext
from ckptstore.formats.layout import (
    CHUNK,
    HEADER_LIMIT,
    SEGMENT_LIMIT,
    Layout,
    TensorSpec,
    chunk_extents,
    padded,
    split,
)
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry, encode_plain, plan_plain, raw_entry
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK
from ckptstore.segments.packed import drafts
from ckptstore.segments.regions import LaidOutState
from ckptstore.segments.session import SegmentSession
from ckptstore.segments.stream import BlockWrites

__all__ = ["WrittenState", "write_full"]

_PIECE: Final = 1 << 20
"""Bytes copied, hashed and summed up while they are still in the core's cache: memory is read once."""

_Sums: TypeAlias = tuple[str, int]
"""Hash of a chunk, and its share of its tensor's state digest."""
_Fill: TypeAlias = Callable[[int, Bytes], None]
"""Copies bytes of a tensor from an offset on."""


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
        session: every staging block has to hold a chunk.
        flat: the state; its tensors must not change until this returns. A `LaidOutState` is not copied.
        draft: what its segments say of themselves; see `packed.drafts`.
        limit: bytes of tensors per segment.

    Raises:
        StorageError: the medium failed; what was written is removed as far as possible.
    """
    specs = [TensorSpec(name, source.dtype, tuple(source.shape)) for name, source in flat.tensors.items()]
    written: list[SegmentEntry] = []
    hashes: list[tuple[str, str, Sequence[int], str]] = []
    divided = split(specs, limit)
    memories = _memories(flat, divided)
    digests = flat.digests if isinstance(flat, LaidOutState) else bridge.device_digests(flat.tensors)
    for doc, members, memory in zip(drafts(draft, flat.tree, len(divided)), divided, memories, strict=True):
        entry, tensors = _write_plain(session, doc, members, flat.tensors, memory, digests)
        written.append(entry)
        hashes += [(name, tensor.dtype, tensor.shape, tensor.hash) for name, tensor in tensors.items()]
    state = hashing.state_hash(jsontext.dumps(flat.tree), hashes)
    return WrittenState(tuple(written), state, sum(spec.nbytes for spec in specs), len(specs))


def _memories(flat: FlatState, divided: Sequence[Sequence[TensorSpec]]) -> Sequence[Bytes | None]:
    """The memory that is laid out as each segment will be, or None: it was laid out for others, or not at all."""
    if isinstance(flat, LaidOutState) and [region.specs for region in flat.regions] == [*map(tuple, divided)]:
        return [region.memory for region in flat.regions]
    return [None] * len(divided)


def _write_plain(
    session: SegmentSession,
    doc: SegmentDoc,
    specs: Sequence[TensorSpec],
    sources: Mapping[str, TensorSource],
    memory: Bytes | None,
    digests: Mapping[str, int],
) -> tuple[SegmentEntry, dict[str, TensorEntry]]:
    layout = plan_plain(specs, doc, digests=True)
    tensors: dict[str, TensorEntry] = {}

    def data(sink: SegmentSink) -> tuple[bytes, int]:
        with BlockWrites(sink, session.blocks, session.staging.blocks) as writes:
            if memory is None:
                passage: _Passage = _Copying(session, layout, writes, digests, sources)
            else:
                passage = _InPlace(session, layout, writes, digests, memory)
            tensors.update(passage.run())
            writes.wait()
            writes.check()
        return encode_plain(layout, replace(doc, tensors={doc.steps[0]: tensors})), layout.size

    return session.write_segment(doc, layout.size, data), tensors


@dataclass(frozen=True, slots=True)
class _Unit:
    """Neighbouring chunks: tensor, start in it, length; and the range of the file that they are."""

    chunks: tuple[tuple[TensorSpec, int, int], ...]
    begin: int
    end: int

    @property
    def pages(self) -> tuple[int, int]:
        """The range of the file that it sends: from the first page that begins in it to the end of its last."""
        return padded(self.begin), padded(self.end)


def _units(layout: Layout) -> Iterator[_Unit]:
    chunks: list[tuple[TensorSpec, int, int]] = []
    begin = end = layout.header_size
    for spec in layout.specs:
        for start, length in chunk_extents(spec.nbytes):
            if chunks and end + length - begin > CHUNK:
                yield _Unit(tuple(chunks), begin, end)
                chunks, begin = [], end
            chunks.append((spec, start, length))
            end += length
    if chunks:
        yield _Unit(tuple(chunks), begin, end)


class _Passage(ABC):
    """The data of one segment on its way into the file."""

    def __init__(
        self, session: SegmentSession, layout: Layout, writes: BlockWrites, digests: Mapping[str, int]
    ) -> None:
        """
        Args:
            digests: state digests that are known already, by name.
        """
        self.session = session
        self.layout = layout
        self.writes = writes
        self.digests = digests

    def run(self) -> dict[str, TensorEntry]:
        """Send everything -> the entries of the tensors. No job runs any more when this returns or raises."""
        specs = self.layout.specs
        hashes: dict[str, list[str]] = {spec.name: [] for spec in specs}
        shares: dict[str, list[int]] = {spec.name: [] for spec in specs}
        units = list(_units(self.layout))
        for unit, sums in zip(units, self._all(units), strict=True):
            for (spec, _, _), (text, share) in zip(unit.chunks, sums, strict=True):
                hashes[spec.name].append(text)
                shares[spec.name].append(share)
        numbers = {spec.name: digest.combine(*shares[spec.name], nbytes=spec.nbytes) for spec in specs}
        numbers.update((spec.name, self.digests[spec.name]) for spec in specs if spec.name in self.digests)
        return {spec.name: raw_entry(self.layout, spec, hashes[spec.name], numbers[spec.name]) for spec in specs}

    def _all(self, units: Sequence[_Unit]) -> list[list[_Sums]]:
        if len(units) == 1:  # a small state: to wake a thread takes longer
            return [self.send(units[0])]
        with closing(self.session.workers.in_order(partial(self.send, unit) for unit in units)) as done:
            return list(done)

    @abstractmethod
    def send(self, unit: _Unit) -> list[_Sums]:
        """Send the pages of a unit -> the sums of its chunks."""

    def sums(self, spec: TensorSpec, place: Bytes, start: int, fill: _Fill | None = None) -> _Sums:
        """The sums of the chunk at `place`, which begins at byte `start` of its tensor, filled piece by piece."""
        known = spec.name in self.digests
        hasher = xxhash.xxh3_64()
        share = 0
        for at in range(start, start + len(place), _PIECE):
            piece = place[at - start : at - start + _PIECE]
            if fill is not None:
                fill(at, piece)
            hasher.update(piece.data)
            if not known:
                share += digest.partial(piece, at // 4)
            self.session.advance(len(piece))
        return hasher.hexdigest(), share


class _InPlace(_Passage):
    """From memory that is laid out as the file is: it is written while it is hashed."""

    def __init__(
        self,
        session: SegmentSession,
        layout: Layout,
        writes: BlockWrites,
        digests: Mapping[str, int],
        memory: Bytes,
    ) -> None:
        super().__init__(session, layout, writes, digests)
        self._memory = memory

    def send(self, unit: _Unit) -> list[_Sums]:
        start, end = unit.pages
        if start < end:
            self.writes.send(start, self._range(start, end))
        sums = []
        for spec, begin, length in unit.chunks:
            at = self.layout.offsets[spec.name] + begin
            sums.append(self.sums(spec, self._range(at, at + length), begin))
        return sums

    def _range(self, begin: int, end: int) -> Bytes:
        """Bytes of the file."""
        return self._memory[begin - self.layout.header_size : end - self.layout.header_size]


class _Copying(_Passage):
    """From tensors anywhere, through staging blocks."""

    def __init__(
        self,
        session: SegmentSession,
        layout: Layout,
        writes: BlockWrites,
        digests: Mapping[str, int],
        sources: Mapping[str, TensorSource],
    ) -> None:
        super().__init__(session, layout, writes, digests)
        self._sources = sources
        self._ends = [layout.offsets[spec.name] + spec.nbytes for spec in layout.specs]

    def send(self, unit: _Unit) -> list[_Sums]:
        start, end = unit.pages
        first = unit.begin // BLOCK * BLOCK
        self.writes.check()  # before there is more to do in vain
        staging = self.session.staging
        block = staging.take()
        try:
            sums = []
            for spec, begin, length in unit.chunks:
                at = self.layout.offsets[spec.name] + begin - first
                sums.append(self.sums(spec, block[at : at + length], begin, _filler(self._sources[spec.name])))
            self._copy(unit.end, block[unit.end - first : end - first])
        except BaseException:
            staging.give(block)
            raise
        if start < end:
            self.writes.send(start, block[start - first : end - first], lambda: staging.give(block))
        else:
            staging.give(block)
        return sums

    def _copy(self, offset: int, out: Bytes) -> None:
        """What the file has from `offset` on: tensors, and behind the last of them zeros."""
        done = 0
        for spec in self.layout.specs[bisect_right(self._ends, offset) :]:
            if done == len(out):
                return
            begin = max(0, offset - self.layout.offsets[spec.name])
            part = out[done : done + spec.nbytes - begin]
            _filler(self._sources[spec.name])(begin, part)
            done += len(part)
        out[done:] = 0


def _filler(source: TensorSource) -> _Fill:
    """Copies bytes of a tensor, from an offset on."""
    view = source.view()
    if view is None:
        return source.read

    def fill(offset: int, out: Bytes) -> None:
        out[:] = view[offset : offset + len(out)]

    return fill
