"""Holds a checkpoint in memory, bit for bit, as a base of deltas and steps that costs no request.

Its tensors are in one region of memory, which looks like a segment that holds them uncompressed, each chunk with its
hash. So all code that restores from segments restores from it, and detects that the memory was overwritten.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ckptstore.backends.base import SegmentSource
from ckptstore.errors import StorageError
from ckptstore.formats.history.records import CheckpointId, SegmentEntry
from ckptstore.formats.segment_files.segment import RAW, Chunk, SegmentDoc, TensorEntry
from ckptstore.host.buffers import Bytes
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.stored_parts import Parts
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["RESIDENT", "ResidentCheckpoint", "layout", "make_resident"]

RESIDENT: Final = "held-in-memory"
"""Used in the errors of a checkpoint in memory instead of a segment's name."""
_LINE: Final = 128


@dataclass(frozen=True)  # no slots: see `Opened`
class ResidentCheckpoint(RestoreSource):
    """A checkpoint in memory, or those of its tensors that are followed.

    Attributes:
        id: its identity.
        links: key -> position of its bytes, for every tensor that is held.
        region: the memory that holds them.
    """

    id: CheckpointId
    links: Mapping[str, TensorLink]
    region: Bytes
    held_parts: Parts
    held_tree: Any
    is_lossy: bool = False

    @property
    def complete(self) -> bool:
        """Whether it is a state that can be returned, and not only a base."""
        return self.held_tree is not None

    @property
    def ref(self) -> str:
        """See `RestoreSource.ref`."""
        return self.id.ref

    @property
    def lossy(self) -> bool:
        """See `RestoreSource.lossy`."""
        return self.is_lossy

    @property
    def merged(self) -> Any:
        """See `RestoreSource.merged`."""
        return self.held_tree

    @property
    def parts(self) -> Parts:
        """See `RestoreSource.parts`: only the tensors that are held."""
        return self.held_parts

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """See `RestoreSource.chains`."""
        return {key: Chain((link,)) for key, link in self.links.items()}


def layout(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, int], int]:
    """key -> start of its image in a region, and the length of the region."""
    places, at = {}, 0
    for key, tensor in tensors.items():
        places[key] = at
        at += -(-tensor.nbytes // _LINE) * _LINE
    return places, at


def make_resident(
    identity: CheckpointId,
    tensors: Mapping[str, TensorEntry],
    region: Bytes,
    parts: Parts,
    tree: Any,
    *,
    lossy: bool = False,
) -> ResidentCheckpoint:
    """A checkpoint whose tensors are in `region`, at the positions of `layout`.

    Args:
        tensors: key -> its entry in the last encoding, with the hash of every decoded chunk.
        parts: the parts of the tensors that are held.
        tree: the stored tree of the whole state.
    """
    places, _ = layout(tensors)
    reader = _RegionReader(identity, region)
    links = {key: TensorLink(_raw(tensor, places[key]), reader, identity.step) for key, tensor in tensors.items()}
    return ResidentCheckpoint(identity, links, region, parts, tree, lossy)


def _raw(tensor: TensorEntry, at: int) -> TensorEntry:
    """The same tensor, uncompressed from `at` on."""
    chunks = []
    for chunk in tensor.chunks:
        assert chunk.decoded_hash is not None, tensor.name  # otherwise its state would have had no hash
        chunks.append(Chunk(at, chunk.logical, chunk.logical, chunk.decoded_hash, chunk.decoded_hash))
        at += chunk.logical
    return replace(tensor, chunks=tuple(chunks), codec=RAW, params={})


class _RegionReader(SegmentReader):
    """The region in the form of an open segment."""

    def __init__(self, identity: CheckpointId, region: Bytes) -> None:  # nothing is opened, and no header read
        self.entry = SegmentEntry(RESIDENT, identity.term, len(region), 0, "")
        self.source: SegmentSource = _RegionSource(region)
        self.doc = SegmentDoc("", identity.term, RESIDENT, {})


class _RegionSource(SegmentSource):
    def __init__(self, region: Bytes) -> None:
        self._region = region
        self.size = len(region)

    def read_into(self, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        view[:] = self._region.data[offset : offset + len(view)]  # `_raw` never reads outside of it

    def map(self) -> memoryview | None:
        raise StorageError(errno.EOPNOTSUPP, "a checkpoint in memory cannot be mapped", RESIDENT)

    def close(self) -> None:
        """Does nothing: nothing is open."""
