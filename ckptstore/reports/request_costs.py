"""Computes the requests and bytes that restoring a checkpoint takes from an object store, without restoring it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.costs import Spent
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.restore.chain import Chain
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.restore.selection import select_from
from ckptstore.segments.segment_reader import SegmentReader, extents

__all__ = ["RequestCosts", "request_costs"]

_RANGE: Final = 8 << 20
"""Bytes of a segment that one request reads (`backends.object_store.object_segments.RANGE`)."""
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
        described, nbytes = _descriptions(found)
        requests += described
        received += nbytes
        ranges, nbytes = _tensors([chain for name in names for chain, _ in found.stored(name)])
        requests["range"] += ranges
        ref, received = found.ref, received + nbytes
    return RequestCosts(ref, costs.spent, Spent(dict(requests), 0, received))


def _descriptions(found: OpenCheckpoint) -> tuple[Counter[str], int]:
    """Count the requests for the descriptions of the plan's segments: HEAD, the header, and the index if packed."""
    requests: Counter[str] = Counter()
    received = 0
    for reader in found.readers.values():
        requests["head"] += 1
        for nbytes in reader.described:
            requests["range"] += -(-nbytes // _RANGE)
            received += nbytes
    return requests, received


def _tensors(chains: Sequence[Chain]) -> tuple[int, int]:
    """Count the ranges that restore the tensors, and their bytes."""
    ranges = received = 0
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
                ranges += -(-chunk.length // _RANGE)
                received += chunk.length
    for _, tensors in raw.values():
        for extent in extents(tensors):
            length = extent[-1].chunk.offset + extent[-1].chunk.length - extent[0].chunk.offset
            ranges += -(-length // _RANGE)
            received += length
    return ranges, received
