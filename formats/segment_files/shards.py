"""Shards: boxes of a tensor that are stored as separate entries (SPEC.md 5.1).

Each segment of an encoding has at most one shard of a tensor, under the tensor's own name. When the entries of all
segments are combined, each shard is identified by its `ShardKey` instead of that name. So code that restores tensors by
name also restores shards, and a delta builds on the same shard of its base.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.segment_files.boxes import Box, gap, overlapping
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_extents
from ckptstore.formats.segment_files.segment_doc import Chunk, TensorEntry
from ckptstore.formats.segment_files.step_codec import StepGroup

__all__ = [
    "ShardKey",
    "ShardedEntry",
    "box_of",
    "check_cover",
    "combine_shards",
    "group_with_keys",
    "key_of",
    "name_of",
    "shard_key",
    "shards_hash",
    "state_parts",
    "with_key",
]

_MARK = "\udfff"  # a tensor name has no surrogates, so no key is equal to a name


class ShardKey(str):
    """Name of a shard that is unique among all shards and tensors of a state. In errors it shows tensor and box.

    Attributes:
        tensor: name of the tensor.
        box: the shard's part of the tensor.
    """

    __slots__ = ("box", "tensor")

    tensor: str
    box: Box

    def __repr__(self) -> str:
        return f"{self.tensor!r} {self.box}"


def shard_key(name: str, shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int]) -> ShardKey:
    """Return the key of a shard. Two keys are equal if tensor, global shape, offset and shape are."""
    box = Box(tuple(offset), tuple(shape))
    key = ShardKey(f"{name}{_MARK}{box} of {list(global_shape)}")
    key.tensor, key.box = name, box
    return key


def key_of(entry: TensorEntry | TensorSpec) -> str:
    """Return what identifies an entry among those of all segments: its name, or the key if it is a shard."""
    if entry.offset is None or entry.global_shape is None:
        return entry.name
    return shard_key(name_of(entry.name), entry.shape, entry.global_shape, entry.offset)


def name_of(key: str) -> str:
    """Return the tensor's name for a key or a name."""
    return key.tensor if isinstance(key, ShardKey) else key


def box_of(entry: TensorEntry | TensorSpec) -> Box:
    """Return an entry's part of its tensor, which is the whole tensor if the entry is not a shard."""
    return Box.whole(entry.shape) if entry.offset is None else Box(entry.offset, entry.shape)


def with_key(entry: TensorEntry, key: str) -> TensorEntry:
    """Return an entry named by its key (`key_of`). A derived shard then refers to that shard of the other tensor."""
    if entry.offset is None or entry.global_shape is None:
        return entry
    params = entry.params
    if entry.codec == "derive" and isinstance(master := params.get("of"), str):
        params = {**params, "of": shard_key(master, entry.shape, entry.global_shape, entry.offset)}
    return replace(entry, name=key, params=params)


def group_with_keys(group: StepGroup, keys: dict[str, str]) -> StepGroup:
    """Return a group whose tensors are named by keys. `keys` maps names in the segment to keys."""
    return replace(group, members=tuple(tuple(keys[name] for name in member) for member in group.members))


@dataclass(frozen=True, slots=True)
class ShardedEntry(TensorEntry):
    """A tensor that is stored in shards, described as if it were whole.

    Its chunks have lengths but no hashes, because they store nothing. `codec` is the codec of the shards, or ``mixed``
    if they differ.

    Attributes:
        shards: the entries of the shards, ordered by offset.
    """

    shards: tuple[TensorEntry, ...] = ()

    @property
    def stored(self) -> int:
        """Stored bytes of all shards."""
        return sum(shard.stored for shard in self.shards)


def combine_shards(shards: Sequence[TensorEntry]) -> ShardedEntry:
    """Combine all shards of one tensor (see `check_cover`) into one entry."""
    first = shards[0]
    assert first.global_shape is not None
    spec = TensorSpec(name_of(first.name), first.dtype, first.global_shape)
    chunks = tuple(Chunk(0, 0, length, "", None) for _, length in chunk_extents(spec.nbytes))
    codecs = {shard.codec for shard in shards}
    codec = codecs.pop() if len(codecs) == 1 else "mixed"
    return ShardedEntry(spec.name, spec.dtype, spec.shape, chunks, codec, shards=tuple(shards))


def check_cover(shards: Sequence[TensorEntry], places: Sequence[str]) -> None:
    """Check that each element of a tensor is in exactly one of its shards.

    Args:
        shards: at least one; all of one tensor.
        places: the segment of each shard, for errors.

    Raises:
        CorruptSegmentError: shards differ in dtype or global shape, one has no elements, two overlap, or some elements
            are in none of them. The error names tensor and segments.
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
    """Return what replaces the tensor hash in a state's hash for a sharded tensor (SPEC.md 4): a longer hex string.

    Raises:
        FormatError: the hash of a decoded chunk is missing.
    """
    parts = []
    for shard in sorted(shards, key=lambda one: one.offset or ()):
        box = box_of(shard)
        parts.append(struct.pack(f"<{2 * len(box.shape)}Q", *box.offset, *box.shape).hex() + shard.hash)
    return "".join(parts)


def state_parts(entries: Iterable[TensorEntry]) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Return the argument of `checksums.state_hash`: (name, dtype, shape, hash) of every tensor, whole or in shards.

    Args:
        entries: the entries of all tensors of a state, each a whole tensor or a shard.

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
