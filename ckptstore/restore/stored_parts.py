"""Finds what is stored of each tensor of a state: the tensor itself, or the shards that make it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.segment_files.shards import ShardKey, check_cover, state_parts
from ckptstore.formats.states.state import tensor_names
from ckptstore.restore.chains.chain_link import TensorLink

__all__ = ["Parts", "described_state", "stored_parts"]

Parts = dict[str, tuple[str, ...]]
"""Name of a tensor -> keys of its stored parts: its name, or a `ShardKey` for each of its shards, by offset."""


def stored_parts(held: Mapping[str, TensorLink], names: Sequence[str], where: str) -> Parts:
    """The stored parts of the tensors `names`, in their order.

    Args:
        held: the tensors of an encoding (`assembly.held_by`).
        where: names the checkpoint in errors.

    Raises:
        CorruptSegmentError: a tensor is missing, or is stored both whole and in shards, or its shards do not cover it;
            names tensor and segment.
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


def described_state(held: Mapping[str, TensorLink], tree: Any, where: str) -> str:
    """The hash of the state that segments describe, without decoding anything.

    Args:
        held: the tensors of an encoding (`assembly.held_by`).
        tree: the tree of the state (`assembly.tree_of`).
        where: names the checkpoint in errors.

    Raises:
        CorruptSegmentError: as `stored_parts`.
        FormatError: the hash of a decoded chunk is missing.
    """
    parts = stored_parts(held, tensor_names(tree), where)
    entries = (held[key].tensor for keys in parts.values() for key in keys)
    return checksums.state_hash(jsontext.dumps(tree), state_parts(entries))
