"""Splits a stored checkpoint into portions that can be rewritten one by one.

A segment has each name once, so it can contain only one shard of a tensor (SPEC 5.1). A checkpoint of many ranks
therefore has as many portions as a tensor has shards; whole tensors of different ranks share a portion. Shards stay cut
as they are: the state's hash depends on them (SPEC 4), and deltas build on the same shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckptstore.formats import checksums, dtypes, jsontext
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.layout import CHUNK, TensorSpec, split
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.shards import name_of, state_parts
from ckptstore.formats.sources import BoxSource, Bytes, Origin, TensorSource, place_of
from ckptstore.formats.states.state import FlatState
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.packed_segments import drafts
from ckptstore.segments.plain_segments import WrittenState
from ckptstore.segments.write_session import SegmentSession

__all__ = ["ChainSource", "Portion", "numbered", "portions_of", "write_portions"]

Write = Callable[
    [int, Callable[[int], Sequence[SegmentDoc]]],
    tuple[tuple[SegmentEntry, ...], list[TensorEntry]],
]
"""Writes the portion of this number, and gets a function that makes its documents, as `plain_segments.write_plain`."""


class ChainSource:
    """A tensor or shard of a stored checkpoint as a `TensorSource`. Its chunks are decoded when they are read."""

    origin: Origin = "numpy"

    def __init__(self, state: StoredBase, name: str) -> None:
        """Read `name` of `state`. The threads of `state` keep the last decoded chunk."""
        spec = state.spec(name)
        assert spec is not None, name
        self.dtype, self.shape = spec
        self.nbytes = dtypes.nbytes(dtypes.get(self.dtype), self.shape)
        self.identity = (id(state), name)
        self._state = state
        self._name = name

    def view(self) -> Bytes | None:
        """Return None: it is not in memory."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """See `TensorSource.read`. Raises `CorruptSegmentError`, `StorageError`."""
        if offset < 0 or offset + len(out) > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + len(out)} of {self._name!r}, which has {self.nbytes}")
        done = 0
        while done < len(out):
            at = offset + done
            length = min(len(out) - done, CHUNK - at % CHUNK)
            out[done : done + length] = self._state.read(self._name, at, length)
            done += length


@dataclass(frozen=True, slots=True)
class Portion:
    """Tensors and shards that fit in one segment.

    Attributes:
        flat: tensors by name, in the order of the tree, decoded when they are read.
        keys: name -> its key among the tensors of all portions (`shards.key_of`).
    """

    flat: FlatState
    keys: Mapping[str, str]

    def base(self, below: OpenCheckpoint) -> StoredBase:
        """Return the same tensors and shards of another checkpoint, under the same names, without those cut otherwise.

        The caller that opened `below` closes it.
        """
        chains = {name: below.chains[key] for name, key in self.keys.items() if key in below.chains}
        return StoredBase(below.entry.id, chains, _nothing)

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors to lay out."""
        return [
            TensorSpec(name, one.dtype, tuple(one.shape), *place_of(one)) for name, one in self.flat.tensors.items()
        ]


def numbered(names: Iterable[Collection[str]]) -> list[int]:
    """Assign each of several segments to the first portion that has none of its names. Return the portions' numbers."""
    taken: list[set[str]] = []
    found = []
    for own in names:
        number = next((place for place, there in enumerate(taken) if there.isdisjoint(own)), len(taken))
        if number == len(taken):
            taken.append(set())
        taken[number].update(own)
        found.append(number)
    return found


def portions_of(found: OpenCheckpoint) -> list[Portion]:
    """Split a stored checkpoint into as few portions as possible, at least one.

    Raises:
        CorruptSegmentError: the stored data is not what was saved.
    """
    held = found.encodings[-1]
    segments: dict[str, list[str]] = {segment: [] for segment in found.plan.encodings[-1].segments}
    for key in found.keys:
        segments[held[key].reader.entry.id].append(key)
    places = numbered([name_of(key) for key in keys] for keys in segments.values())
    number_of = dict(zip(segments, places, strict=True))
    keys: list[dict[str, str]] = [{} for _ in range(max(places, default=0) + 1)]
    for key in found.keys:
        keys[number_of[held[key].reader.entry.id]][name_of(key)] = key
    return [_portion(found, own) for own in keys]


def _portion(found: OpenCheckpoint, keys: Mapping[str, str]) -> Portion:
    state = StoredBase(found.entry.id, {name: found.chains[key] for name, key in keys.items()}, _nothing)
    sources: dict[str, TensorSource] = {}
    for name, key in keys.items():
        entry, source = found.chains[key].tensor, ChainSource(state, name)
        whole = entry.offset is None
        sources[name] = source if whole else BoxSource(source, source.shape, 0, entry.global_shape, entry.offset)
    return Portion(FlatState(found.merged, sources), keys)


def write_portions(
    session: SegmentSession, portions: Sequence[Portion], draft: SegmentDoc, write: Write
) -> WrittenState:
    """Rewrite a checkpoint, portion by portion, as one encoding.

    Args:
        session: the session that `write` writes with.
        draft: the description that its segments get; see `packed_segments.drafts`.
        write: writes one portion.

    Raises:
        as `write`.
    """
    tree = portions[0].flat.tree
    counts = [len(split(portion.specs, session.backend.segment_bytes)) for portion in portions]
    documents = iter(drafts(draft, tree, sum(counts)))
    segments: list[SegmentEntry] = []
    entries: list[TensorEntry] = []
    for number, count in enumerate(counts):
        own = [next(documents) for _ in range(count)]
        written, tensors = write(number, partial(_given, own))
        segments += written
        entries += tensors
    parts = state_parts(entries)
    state = checksums.state_hash(jsontext.dumps(tree), parts)
    return WrittenState(tuple(segments), state, sum(entry.nbytes for entry in entries), len(parts))


def _given(documents: Sequence[SegmentDoc], _count: int) -> Sequence[SegmentDoc]:
    return documents


def _nothing() -> None:
    """Do nothing: the caller that opened the segments closes them."""
