"""Shards: boxes of a tensor that are stored as entries of their own (SPEC 5.1).

The segments of one encoding have at most one shard of a tensor each, all under the tensor's own name. Where the entries
of all segments come together, a shard goes by its `ShardKey` instead: so everything that restores tensors by name
restores shards, too, and a delta builds on the same shard of its base.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.boxes import Box, gap, overlapping
from ckptstore.formats.layout import TensorSpec, chunk_extents
from ckptstore.formats.segment_doc import Chunk, TensorEntry
from ckptstore.formats.step_codec import Group

__all__ = [
    "ShardKey",
    "ShardedEntry",
    "box_of",
    "check_cover",
    "key_of",
    "keyed",
    "keyed_group",
    "name_of",
    "shard_key",
    "shards_hash",
    "state_parts",
    "together",
]

_MARK = "\udfff"  # no name has a surrogate: no key is a name


class ShardKey(str):
    """Name of a shard among all shards and tensors of a state. In errors it shows tensor and place.

    Attributes:
        tensor: name of the tensor.
        box: what the shard has of it.
    """

    __slots__ = ("box", "tensor")

    tensor: str
    box: Box

    def __repr__(self) -> str:
        return f"{self.tensor!r} {self.box}"


def shard_key(name: str, shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int]) -> ShardKey:
    """The key of a shard: equal for two that have the same tensor, global shape, offset and shape."""
    box = Box(tuple(offset), tuple(shape))
    key = ShardKey(f"{name}{_MARK}{box} of {list(global_shape)}")
    key.tensor, key.box = name, box
    return key


def key_of(entry: TensorEntry | TensorSpec) -> str:
    """What an entry goes by among those of all segments: its name, or of a shard its key."""
    if entry.offset is None or entry.global_shape is None:
        return entry.name
    return shard_key(name_of(entry.name), entry.shape, entry.global_shape, entry.offset)


def name_of(key: str) -> str:
    """The tensor's name, of a key or a name."""
    return key.tensor if isinstance(key, ShardKey) else key


def box_of(entry: TensorEntry | TensorSpec) -> Box:
    """What an entry has of its tensor, which is all of it unless it is a shard."""
    return Box.whole(entry.shape) if entry.offset is None else Box(entry.offset, entry.shape)


def keyed(entry: TensorEntry, key: str) -> TensorEntry:
    """An entry under its key (`key_of`); what a shard is derived from is that shard of the other tensor."""
    if entry.offset is None or entry.global_shape is None:
        return entry
    params = entry.params
    if entry.codec == "derive" and isinstance(master := params.get("of"), str):
        params = {**params, "of": shard_key(master, entry.shape, entry.global_shape, entry.offset)}
    return replace(entry, name=key, params=params)


def keyed_group(group: Group, keys: dict[str, str]) -> Group:
    """A group by the keys of its tensors, `keys` by their names in the segment."""
    return replace(group, members=tuple(tuple(keys[name] for name in member) for member in group.members))


@dataclass(frozen=True, slots=True)
class ShardedEntry(TensorEntry):
    """A tensor that is stored in shards, described as if it were whole.

    Its chunks have lengths and no hashes, because nothing is stored in them; `codec` is that of its shards, ``mixed``
    if they differ.

    Attributes:
        shards: their entries, by offset.
    """

    shards: tuple[TensorEntry, ...] = ()

    @property
    def stored(self) -> int:
        """Stored bytes of all shards."""
        return sum(shard.stored for shard in self.shards)


def together(shards: Sequence[TensorEntry]) -> ShardedEntry:
    """All shards of one tensor (`check_cover`) as one entry."""
    first = shards[0]
    assert first.global_shape is not None
    spec = TensorSpec(name_of(first.name), first.dtype, first.global_shape)
    chunks = tuple(Chunk(0, 0, length, "", None) for _, length in chunk_extents(spec.nbytes))
    codecs = {shard.codec for shard in shards}
    codec = codecs.pop() if len(codecs) == 1 else "mixed"
    return ShardedEntry(spec.name, spec.dtype, spec.shape, chunks, codec, shards=tuple(shards))


def check_cover(shards: Sequence[TensorEntry], places: Sequence[str]) -> None:
    """Whether each element of a tensor is in exactly one of its shards.

    Args:
        shards: at least one; all are of one tensor.
        places: the segment of each, for errors.

    Raises:
        CorruptSegmentError: they differ in dtype or global shape, one has no elements, two overlap, or elements are in
            none of them; names tensor and segments.
    """
    first = shards[0]
    name = name_of(first.name)
    for shard, place in zip(shards, places, strict=True):
        if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
            raise CorruptSegmentError(
                f"{place}: tensor {name!r}: a shard of {_kind(shard)}, and in {places[0]} one of {_kind(first)}"
            )
        if not box_of(shard).size:
            raise CorruptSegmentError(f"{place}: tensor {name!r}: a shard {box_of(shard)} without elements")
    boxes = [box_of(shard) for shard in shards]
    if (pair := overlapping(boxes)) is not None:
        one, other = pair
        raise CorruptSegmentError(
            f"{places[other]}: tensor {name!r}: its shard {boxes[other]} overlaps {boxes[one]}, in {places[one]}"
        )
    assert first.global_shape is not None
    if (missing := gap(first.global_shape, boxes)) is not None:
        raise CorruptSegmentError(
            f"{places[0]}: tensor {name!r}: elements {missing} of {list(first.global_shape)} are in none of its "
            f"{len(shards)} shards"
        )


def _kind(shard: TensorEntry) -> str:
    return f"{shard.dtype} {list(shard.global_shape or ())}"


def shards_hash(shards: Iterable[TensorEntry]) -> str:
    """What stands in a state's hash in place of a tensor's (SPEC 4): hex digits, longer than a hash.

    Raises:
        FormatError: the hash of a decoded chunk is missing.
    """
    parts = []
    for shard in sorted(shards, key=lambda one: one.offset or ()):
        box = box_of(shard)
        parts.append(struct.pack(f"<{2 * len(box.shape)}Q", *box.offset, *box.shape).hex() + shard.hash)
    return "".join(parts)


def state_parts(entries: Iterable[TensorEntry]) -> list[tuple[str, str, tuple[int, ...], str]]:
    """What `hashing.state_hash` takes: (name, dtype, shape, hash) of every tensor, whole or in shards.

    Args:
        entries: of all tensors of a state: a shard each, or a whole tensor.

    Raises:
        FormatError: the hash of a decoded chunk is missing.
    """
    parts = []
    shards: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if entry.offset is None:
            parts.append((entry.name, entry.dtype, entry.shape, entry.hash))
        else:
            shards.setdefault(name_of(entry.name), []).append(entry)
    for name, own in shards.items():
        parts.append((name, own[0].dtype, own[0].global_shape or (), shards_hash(own)))
    return parts
