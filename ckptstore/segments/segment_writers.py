"""Writes the bytes of a plain segment into its file: through staging blocks, in place, or from units that arrive.

The position of every byte is known beforehand, so that several threads work at once, each on its own unit (`units`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from typing import Final, TypeAlias

import xxhash

from ckptstore.formats import checksums, digest
from ckptstore.formats.segment_files.layout import Layout, TensorSpec, chunk_count
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry, fill_header, raw_entry
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import ArenaLease
from ckptstore.host.buffers import Bytes
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.segments.block_stream import BlockWrites
from ckptstore.segments.staged_units import StagedState, StagedUnits
from ckptstore.segments.units import Chunk, Fill, Run, SegmentBytes, SegmentUnit, filler, runs_of, units
from ckptstore.segments.write_session import SegmentSession

__all__ = ["MakeDataWriter", "SegmentDataWriter", "TensorSums", "data_writers"]

_PIECE: Final = 1 << 20
"""Bytes that are copied, hashed and digested while they are in the core's cache: memory is read once."""

_Sums: TypeAlias = tuple[str, int]
"""Hash of a chunk, and its share of the tensor's state digest."""
MakeDataWriter: TypeAlias = Callable[[SegmentSession, Layout, BlockWrites], "SegmentDataWriter"]
"""Makes the writer of one segment."""


def data_writers(flat: FlatState, divided: Sequence[Sequence[TensorSpec]]) -> Sequence[MakeDataWriter]:
    """The writer of each segment, chosen by the kind of state."""
    cuts = [tuple(members) for members in divided]
    if isinstance(flat, StagedState):
        return [partial(_UnitWriter, digests=flat.digests, arrivals=flat.arrivals)] * len(cuts)
    if isinstance(flat, LaidOutState) and [region.specs for region in flat.regions] == cuts:
        return [partial(_InPlaceWriter, digests=flat.digests, memory=region.memory) for region in flat.regions]
    # Also for memory that has the layout of other segments.
    digests = bridge.device_digests(flat.tensors)
    return [partial(_CopyWriter, digests=digests, sources=flat.tensors)] * len(cuts)


@dataclass(frozen=True, slots=True)
class TensorSums:
    """The sums of the tensors of a plain segment, in file order.

    Attributes:
        layout: of the segment.
        hashes: of the chunks of each tensor.
        digests: the state digest of each tensor.
    """

    layout: Layout
    hashes: Sequence[Sequence[str]]
    digests: Sequence[int]

    def header(self, doc: SegmentDoc) -> bytes:
        """The header of the segment, whose document is `doc`."""
        return fill_header(self.layout, doc, list(chain.from_iterable(self.hashes)), self.digests)

    def entries(self) -> list[TensorEntry]:
        """The entries of the tensors."""
        rows = zip(self.layout.specs, self.hashes, self.digests, strict=True)
        return [raw_entry(self.layout, spec, own, number) for spec, own, number in rows]


class SegmentDataWriter(ABC):
    """Writes the data of one segment into its file."""

    def __init__(
        self, session: SegmentSession, layout: Layout, writes: BlockWrites, digests: Mapping[str, int]
    ) -> None:
        """
        Args:
            digests: state digests that are already known, by name.
        """
        self.session = session
        self.layout = layout
        self.writes = writes
        self.digests = digests

    def run(self) -> TensorSums:
        """Send everything -> the sums of the tensors. No job is running when this returns or raises."""
        sums = iter(list(chain.from_iterable(self._all(units(self.layout)))))
        hashes: list[list[str]] = []
        digests: list[int] = []
        for spec in self.layout.specs:
            own = list(islice(sums, chunk_count(spec.nbytes)))
            hashes.append([text for text, _ in own])
            known = self.digests.get(spec.name) if self.digests else None
            digests.append(digest.combine(*(share for _, share in own), nbytes=spec.nbytes) if known is None else known)
        found = TensorSums(self.layout, hashes, digests)
        assert next(sums, None) is None
        return found

    def _all(self, own: Sequence[SegmentUnit]) -> list[list[_Sums]]:
        if len(own) == 1:  # a small state: waking a thread takes longer
            return [job() for job in self.jobs(own)]
        with closing(self.session.workers.in_order(self.writes.paced(self.jobs(own)))) as done:
            return list(done)

    def jobs(self, own: Sequence[SegmentUnit]) -> Iterable[Callable[[], list[_Sums]]]:
        """The jobs that send each unit. Threads take them one after the other, when they are free."""
        return (partial(self.send, unit) for unit in own)

    @abstractmethod
    def send(self, unit: SegmentUnit) -> list[_Sums]:
        """Send the pages of a unit -> the sums of its chunks."""

    def sums_of(self, unit: SegmentUnit, place: Bytes, fill: Callable[[TensorSpec], Fill] | None = None) -> list[_Sums]:
        """The sums of a unit's chunks, whose bytes are in `place`."""
        runs = runs_of(unit.chunks, self.digests) if self.digests else unit.runs
        return self._sums_of_runs(runs, place, fill)

    def _sums_of_runs(
        self, runs: Iterable[Run], place: Bytes, fill: Callable[[TensorSpec], Fill] | None
    ) -> list[_Sums]:
        found: list[_Sums] = []
        at = 0
        for run in runs:
            part = place[at : at + run.nbytes]
            at += run.nbytes
            if run.small:
                found += self._small_sums(run, part, fill)
                continue
            for spec, begin, _ in run.chunks:
                found.append(self._sums(spec, part, begin, fill and fill(spec)))
        return found

    def _small_sums(self, run: Run, place: Bytes, fill: Callable[[TensorSpec], Fill] | None) -> list[_Sums]:
        """The sums of whole tensors, filled one after another."""
        if fill is not None:
            at = 0
            for spec, _, length in run.chunks:
                fill(spec)(0, place[at : at + length])
                at += length
        hashes = checksums.chunk_hashes(place.data, run.lengths)
        self.session.advance(run.nbytes)
        return list(zip(hashes, digest.partials(place, run.lengths), strict=True))

    def _sums(self, spec: TensorSpec, place: Bytes, start: int, fill: Fill | None) -> _Sums:
        """The sums of the chunk at `place`, which begins at byte `start` of its tensor and is filled piece by piece."""
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


class _InPlaceWriter(SegmentDataWriter):
    """Writes from memory that has the layout of the file: it is written while it is hashed."""

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

    def send(self, unit: SegmentUnit) -> list[_Sums]:
        start, end = unit.pages
        if start < end and self.writes.refers:
            self.writes.refer(start, self._range(start, end))
        elif start < end:
            self.writes.send(start, self._range(start, end))
        return self.sums_of(unit, self._range(unit.begin, unit.end))

    def _range(self, begin: int, end: int) -> Bytes:
        """Bytes of the file, by their offsets in it."""
        return self._memory[begin - self.layout.header_size : end - self.layout.header_size]


class _UnitWriter(SegmentDataWriter):
    """Writes units that arrive in memory of their own: each is written while it is hashed, then freed."""

    def __init__(
        self,
        session: SegmentSession,
        layout: Layout,
        writes: BlockWrites,
        digests: Mapping[str, int],
        arrivals: StagedUnits,
    ) -> None:
        super().__init__(session, layout, writes, digests)
        self._arrivals = arrivals
        self._arrived: dict[int, ArenaLease] = {}

    def jobs(self, own: Sequence[SegmentUnit]) -> Iterable[Callable[[], list[_Sums]]]:
        """Waits here for the next unit, so that no thread does that others need to free memory for it."""
        for unit in own:
            self._arrived[unit.begin] = self._arrivals.take()
            yield partial(self.send, unit)

    def send(self, unit: SegmentUnit) -> list[_Sums]:
        self.writes.check()  # before more work is done for nothing
        lease = self._arrived.pop(unit.begin)
        start, end = unit.pages
        memory = lease.memory
        both = _AfterBoth(lease.free)
        try:
            if start < end:
                self.writes.send(start, memory[start - unit.first : end - unit.first], both.done)
            else:
                both.done()
            sums = self.sums_of(unit, memory[unit.begin - unit.first : unit.end - unit.first])
        finally:
            both.done()
        return sums


class _AfterBoth:
    """Calls a function when two parties have reported that they are done."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._first = threading.Lock()

    def done(self) -> None:
        """Report that one of the two is done."""
        if not self._first.acquire(blocking=False):
            self._call()


class _CopyWriter(SegmentDataWriter):
    """Copies tensors from any memory through staging blocks."""

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
        self._bytes = SegmentBytes(layout, sources)

    def send(self, unit: SegmentUnit) -> list[_Sums]:
        self.writes.check()  # before more work is done for nothing
        if self.writes.refers:
            return self._refer(unit)
        start, end = unit.pages
        first = unit.first
        block = self.session.staging.take()
        give = partial(self.session.staging.give, block)
        try:
            sums = self.sums_of(unit, block[unit.begin - first : unit.end - first], self._filler)
            self._bytes.copy(unit.end, block[unit.end - first : end - first])
        except BaseException:
            give()
            raise
        if start < end:
            self.writes.send(start, block[start - first : end - first], give)
        else:
            give()
        return sums

    def _refer(self, unit: SegmentUnit) -> list[_Sums]:
        """For a medium that sends memory in place: copies only small chunks and those that cannot be viewed."""
        found: list[_Sums] = []
        at = unit.begin
        for lies, group in groupby(unit.chunks, self._viewable):
            chunks = list(group)
            for run in [[one] for one in chunks] if lies else [chunks]:
                place = self._view(run[0]) if lies else self.writes.block(sum(length for _, _, length in run))
                assert place is not None  # a sink that refers has memory
                found += self._sums_of_runs(runs_of(run, self.digests), place, None if lies else self._filler)
                self.writes.refer(at, place)
                at += len(place)
        return found

    def _viewable(self, chunk: Chunk) -> bool:
        return chunk[2] >= _PIECE and self._view(chunk) is not None

    def _view(self, chunk: Chunk) -> Bytes | None:
        spec, start, length = chunk
        view = self._sources[spec.name].view()
        return None if view is None else view[start : start + length]

    def _filler(self, spec: TensorSpec) -> Fill:
        return filler(self._sources[spec.name])
