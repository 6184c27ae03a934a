"""A checkpoint that is held in memory, bit for bit: a base of deltas and steps that costs no request.

Its tensors stand in one region of memory, which looks like a segment that holds them uncompressed, each chunk with its
hash. So whatever restores from segments restores from it, and notices when somebody has written to that memory.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ckptstore.backends.base import SegmentSource
from ckptstore.errors import StorageError
from ckptstore.formats.records import CheckpointId, SegmentEntry
from ckptstore.formats.segment import RAW, Chunk, SegmentDoc, TensorEntry
from ckptstore.host.buffers import Bytes
from ckptstore.restore.chain import Chain
from ckptstore.restore.chain_link import Link
from ckptstore.restore.restore_source import Restorable
from ckptstore.restore.stored_parts import Parts
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["HELD", "HeldState", "layout", "made"]

HELD: Final = "held-in-memory"
"""Stands in the errors of a held checkpoint where others name the segment."""
_LINE: Final = 128


@dataclass(frozen=True)  # no slots: see `Opened`
class HeldState(Restorable):
    """A checkpoint in memory, or those of its tensors that somebody follows.

    Attributes:
        id: which one.
        links: key -> where its bytes are, for every tensor that is held.
        region: the memory that they lie in.
    """

    id: CheckpointId
    links: Mapping[str, Link]
    region: Bytes
    held_parts: Parts
    held_tree: Any
    is_lossy: bool = False

    @property
    def complete(self) -> bool:
        """Whether it is a state that can be handed over, and not only a base."""
        return self.held_tree is not None

    @property
    def ref(self) -> str:
        """See `Restorable.ref`."""
        return self.id.ref

    @property
    def lossy(self) -> bool:
        """See `Restorable.lossy`."""
        return self.is_lossy

    @property
    def merged(self) -> Any:
        """See `Restorable.merged`."""
        return self.held_tree

    @property
    def parts(self) -> Parts:
        """See `Restorable.parts`: of the tensors that are held."""
        return self.held_parts

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """See `Restorable.chains`."""
        return {key: Chain((link,)) for key, link in self.links.items()}


def layout(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, int], int]:
    """key -> where its image begins in a region, and how long the region is."""
    places, at = {}, 0
    for key, tensor in tensors.items():
        places[key] = at
        at += -(-tensor.nbytes // _LINE) * _LINE
    return places, at


def made(
    identity: CheckpointId,
    tensors: Mapping[str, TensorEntry],
    region: Bytes,
    parts: Parts,
    tree: Any,
    *,
    lossy: bool = False,
) -> HeldState:
    """A checkpoint whose tensors lie in `region` as `layout` says.

    Args:
        tensors: key -> as the last encoding describes it, with the hash of every decoded chunk.
        parts: of the tensors that are held.
        tree: of the whole state, as it is stored.
    """
    places, _ = layout(tensors)
    reader = _Reader(identity, region)
    links = {key: Link(_raw(tensor, places[key]), reader, identity.step) for key, tensor in tensors.items()}
    return HeldState(identity, links, region, parts, tree, lossy)


def _raw(tensor: TensorEntry, at: int) -> TensorEntry:
    """The same tensor, uncompressed from `at` on."""
    chunks = []
    for chunk in tensor.chunks:
        assert chunk.decoded_hash is not None, tensor.name  # or its state would have had no hash
        chunks.append(Chunk(at, chunk.logical, chunk.logical, chunk.decoded_hash, chunk.decoded_hash))
        at += chunk.logical
    return replace(tensor, chunks=tuple(chunks), codec=RAW, params={})


class _Reader(SegmentReader):
    """The region as an open segment."""

    def __init__(self, identity: CheckpointId, region: Bytes) -> None:  # nothing is opened, and no header read
        self.entry = SegmentEntry(HELD, identity.term, len(region), 0, "")
        self.source: SegmentSource = _Region(region)
        self.doc = SegmentDoc("", identity.term, HELD, {})


class _Region(SegmentSource):
    def __init__(self, region: Bytes) -> None:
        self._region = region
        self.size = len(region)

    def read_into(self, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        view[:] = self._region.data[offset : offset + len(view)]  # `_raw` asks for nothing outside

    def map(self) -> memoryview | None:
        raise StorageError(errno.EOPNOTSUPP, "what is held in memory is not mapped", HELD)

    def close(self) -> None:
        """Nothing is open."""
