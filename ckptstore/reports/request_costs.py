"""Computes the requests and bytes that restoring a checkpoint takes from an object store, without restoring it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.costs import Spent
from ckptstore.backends.object_store import segment_ranges
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.selection import select_from
from ckptstore.segments.segment_reader import SegmentReader, extents

__all__ = ["RequestCosts", "request_costs"]

_AGAIN: Final = {"put": 1, "get": 1, "head": 2, "delete": 1}
"""Creating and removing the pin, and reading the log again (SPEC 10, PINS). A long restore adds a ``put`` per 30 s."""


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """Requests and bytes of an object store.

    Attributes:
        ref: the checkpoint.
        spent: what the caller's store has spent until now, since it was opened.
        restore: what `Store.load` of another handle would spend now.
    """

    ref: str
    spent: Spent
    restore: Spent


def request_costs(
    journal: Journal, ref: str | int = "latest", select: str | Sequence[str] | None = None
) -> RequestCosts | None:
    """See `Store.request_costs`."""
    costs = journal.backend.costs
    if costs is None:
        return None
    before = costs.spent
    journal = Journal(journal.backend)  # reads FORMAT again, as another handle would
    view = read(journal)
    log = costs.spent - before
    requests = Counter(log.requests) + Counter(_AGAIN)
    received = log.received
    with opened(journal, ref, since=view) as found:
        names = select_from(found.tree, select, found.ref).tensors
        segments = {id(reader): _Segment(reader.source.size) for reader in found.readers.values()}
        for reader in found.readers.values():
            for offset, nbytes in reader.described:
                segments[id(reader)].read(offset, nbytes)
        _read_tensors([chain for name in names for chain, _ in found.stored(name)], segments)
        for segment in segments.values():
            requests["range"] += segment.ranges
            received += segment.received
        ref = found.ref
    return RequestCosts(ref, costs.spent, Spent(dict(requests), 0, received))


class _Segment:
    """The requests and bytes of one segment, as `backends.object_store.object_segments` reads it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._whole = size <= segment_ranges.FIRST
        self.ranges = 1
        self.received = segment_ranges.first(size)

    def read(self, offset: int, nbytes: int) -> None:
        """Count a read. Bytes that are at hand cost nothing."""
        if self._whole or offset + nbytes <= segment_ranges.FIRST:
            return
        if segment_ranges.is_small(self._size):
            self._whole = True
            self.ranges += 1
            self.received = self._size
            return
        for _, length in segment_ranges.cuts(offset, nbytes):
            self.ranges += 1
            self.received += length


def _read_tensors(chains: Sequence[Chain], segments: Mapping[int, _Segment]) -> None:
    """Count the reads that restore the tensors."""
    raw: dict[int, tuple[SegmentReader, list[TensorEntry]]] = {}
    seen: set[tuple[int, str, int]] = set()
    for chain in chains:
        if chain.raw:
            raw.setdefault(id(chain.links[0].reader), (chain.links[0].reader, []))[1].append(chain.tensor)
            continue
        for link in chain.sources:
            place = (id(link.reader), link.tensor.name, link.step)
            if place in seen:
                continue
            seen.add(place)
            for chunk in link.tensor.chunks:
                segments[id(link.reader)].read(chunk.offset, chunk.length)
    for number, (_, tensors) in raw.items():
        for extent in extents(tensors):
            begin = extent[0].chunk.offset
            segments[number].read(begin, extent[-1].chunk.offset + extent[-1].chunk.length - begin)
