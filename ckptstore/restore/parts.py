"""What is stored of each tensor of a state: the tensor itself, or the shards that make it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.shards import ShardKey, check_cover
from ckptstore.restore.link import Link

__all__ = ["Parts", "stored_parts"]

Parts = dict[str, tuple[str, ...]]
"""Name of a tensor -> keys of what is stored of it: its name, or `ShardKey` for each of its shards, by offset."""


def stored_parts(held: Mapping[str, Link], names: Sequence[str], where: str) -> Parts:
    """What is stored of the tensors `names`, in their order.

    Args:
        held: the tensors of an encoding (`assembly.held_by`).
        where: names the checkpoint in errors.

    Raises:
        CorruptSegmentError: a tensor is missing, is there whole and in shards, or its shards do not make it up; names
            tensor and segment.
    """
    shards: dict[str, list[ShardKey]] = {}
    for key in held:
        if isinstance(key, ShardKey):
            shards.setdefault(key.tensor, []).append(key)
    parts: Parts = {}
    for name in names:
        own = sorted(shards.get(name, ()), key=lambda key: key.box.offset)
        if name in held and own:
            raise CorruptSegmentError(
                f"{held[own[0]].where}: a shard of a tensor that is whole in {held[name].reader.entry.key}"
            )
        if own:
            check_cover([held[key].tensor for key in own], [held[key].reader.entry.key for key in own])
        elif name not in held:
            raise CorruptSegmentError(f"{where}: its segments lack tensor {name!r}")
        parts[name] = tuple(own) or (name,)
    return parts
