"""Codec ``step``: several tensors of a state that one payload restores together, as an optimizer moved them.

A *group* is one parameter, or several small ones laid end to end: for each its slots (`optim.Rule.slots`: the weight
and what the optimizer keeps for it), fp32 and of one shape. Chunk k of the group's payload makes chunk k of every slot
out of chunk k of the step before. The weight of the first parameter is the group's *leader*: the payload is its chunks.
The entries of the other tensors have no bytes; they name the leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import optim
from ckptstore.formats.layout import CHUNK
from ckptstore.formats.segment_doc import TensorEntry

__all__ = ["STEP", "Group", "follower_params", "groups_of"]

STEP: Final = "step"
_ENCODINGS: Final = ("predicted", "replayed", "sparse")


@dataclass(frozen=True, slots=True)
class Group:
    """What one payload restores.

    Attributes:
        encoding: how the payload was made.
        rule: the step's arithmetic.
        members: for each parameter the names of its slots, in the order of ``rule.slots``.
    """

    encoding: optim.Encoding
    rule: optim.Rule
    members: tuple[tuple[str, ...], ...]

    @property
    def leader(self) -> str:
        """The tensor whose chunks are the payload."""
        return self.members[0][0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor of the group."""
        return tuple(name for member in self.members for name in member)

    @property
    def params(self) -> dict[str, Any]:
        """The leader's codec parameters."""
        return {
            "encoding": self.encoding,
            "rule": self.rule.params,
            "members": [list(member) for member in self.members],
        }


def follower_params(leader: str) -> dict[str, Any]:
    """Codec parameters of the other tensors of a group."""
    return {"leader": leader}


def groups_of(tensors: Mapping[str, TensorEntry], where: str) -> list[Group]:
    """The groups among the tensors of one step in one segment.

    Raises:
        IncompatibleFormatError: arithmetic that this version does not know.
        FormatError: parameters that this version does not understand.
        CorruptSegmentError: a group that is not whole, or whose tensors do not fit together; names one of them.
    """
    found = [
        _read(tensor, where) for tensor in tensors.values() if tensor.codec == STEP and "leader" not in tensor.params
    ]
    taken: dict[str, str] = {}
    for group in found:
        for name in group.names:
            if name in taken:
                raise CorruptSegmentError(f"{where}: tensor {name!r} is moved twice in one step")
            taken[name] = group.leader
        _check(group, tensors, where)
    for name, tensor in tensors.items():
        if tensor.codec == STEP and name not in taken:
            raise CorruptSegmentError(f"{where}: tensor {name!r}: its group {tensor.params.get('leader')!r} is missing")
    return found


def _read(leader: TensorEntry, where: str) -> Group:
    what = f"{where}: tensor {leader.name!r}"
    params = leader.params
    encoding, rule, members = params.get("encoding"), params.get("rule"), params.get("members")
    if params.keys() != {"encoding", "rule", "members"} or encoding not in _ENCODINGS or not isinstance(rule, Mapping):
        raise FormatError(f"{what}: parameters of an unknown optimizer step")
    if not _is_table(members) or not members or members[0][0] != leader.name:
        raise FormatError(f"{what}: not the names of a group's tensors")
    try:
        known = optim.rule(rule)
    except FormatError as error:
        raise type(error)(f"{what}: {error}") from error
    group = Group(cast("optim.Encoding", encoding), known, tuple(tuple(member) for member in members))
    if any(len(member) != len(known.slots) for member in group.members):
        raise FormatError(f"{what}: a parameter has the slots {', '.join(known.slots)}")
    return group


def _is_table(members: object) -> bool:
    return isinstance(members, Sequence) and all(
        isinstance(member, list | tuple) and member and all(isinstance(name, str) for name in member)
        for member in members
    )


def _check(group: Group, tensors: Mapping[str, TensorEntry], where: str) -> None:
    total = 0
    for member in group.members:
        first: TensorEntry | None = None
        for name in member:
            entry = tensors.get(name)
            if entry is None or entry.codec != STEP or not entry.nbytes:
                raise CorruptSegmentError(f"{where}: tensor {name!r} of the group {group.leader!r} is missing")
            first = first or entry
            if entry.dtype != "F32" or entry.shape != first.shape:
                raise CorruptSegmentError(f"{where}: tensor {name!r}: {entry.dtype} {list(entry.shape)} in a group")
            if (entry.global_shape, entry.offset) != (first.global_shape, first.offset):
                raise CorruptSegmentError(f"{where}: tensor {name!r}: a shard of another place than {first.name!r}'s")
            if name != group.leader and (
                entry.params != follower_params(group.leader) or any(chunk.length for chunk in entry.chunks)
            ):
                raise CorruptSegmentError(f"{where}: tensor {name!r} does not belong to the group {group.leader!r}")
        assert first is not None
        total += first.nbytes
    if len(group.members) > 1 and total > CHUNK:
        raise CorruptSegmentError(f"{where}: the group {group.leader!r} lays {total} bytes end to end")
