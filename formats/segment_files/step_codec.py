"""Codec ``step``: one payload restores several tensors of a state, as an optimizer step changed them (SPEC.md 5.5).

A *group* is one parameter, or several small ones laid end to end. Each parameter has slots (`optim.Rule.slots`: the
weight and the optimizer's state for it), which are fp32 and have one shape. Chunk k of the group's payload computes
chunk k of every slot from chunk k of the previous step. The weight of the first parameter is the group's *leader*: its
chunks are the payload. The entries of the other tensors have no bytes; they name the leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import optim
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.segment_files.segment_doc import TensorEntry
from ckptstore.formats.segment_files.step_tensors import StepTensors

__all__ = ["STEP", "StepGroup", "follower_params", "groups_of"]

STEP: Final = "step"
_ENCODINGS: Final = get_args(optim.Encoding)


@dataclass(frozen=True, slots=True)
class StepGroup:
    """The tensors that one payload restores.

    Attributes:
        encoding: how the payload was made.
        rule: the step's arithmetic.
        members: for each parameter, the names of its slots in the order of ``rule.slots``.
        names: names of all tensors of the group.
    """

    encoding: optim.Encoding
    rule: optim.Rule
    members: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(name for member in self.members for name in member))

    @property
    def leader(self) -> str:
        """Name of the tensor whose chunks are the payload."""
        return self.members[0][0]

    @property
    def params(self) -> dict[str, Any]:
        """The leader's codec parameters."""
        return {
            "encoding": self.encoding,
            "rule": self.rule.params,
            "members": [list(member) for member in self.members],
        }


def follower_params(leader: str) -> dict[str, Any]:
    """Return the codec parameters of a tensor of the group other than the leader."""
    return {"leader": leader}


def groups_of(tensors: Mapping[str, TensorEntry], where: str) -> list[StepGroup]:
    """Return the groups among the tensors of one step in one segment.

    Raises:
        IncompatibleFormatError: a rule of arithmetic that this version does not know.
        FormatError: invalid parameters, or ones that this version does not know.
        CorruptSegmentError: a group is incomplete, or its tensors do not fit together; the error names one of them.
    """
    if isinstance(tensors, StepTensors) and isinstance(checked := tensors.rows.groups, _CheckedGroups):
        again = checked.again(tensors, where)
        if again is not None:
            return again
    found = [
        _read(tensor, where) for tensor in tensors.values() if tensor.codec == STEP and "leader" not in tensor.params
    ]
    leaders: dict[str, str] = {}
    for group in found:
        for name in group.names:
            if name in leaders:
                raise CorruptSegmentError(f"{where}: tensor {name!r} is moved twice in one step")
            leaders[name] = group.leader
        _check(group, tensors, where)
    for name, tensor in tensors.items():
        if tensor.codec == STEP and name not in leaders:
            raise CorruptSegmentError(f"{where}: tensor {name!r}: its group {tensor.params.get('leader')!r} is missing")
    if isinstance(tensors, StepTensors):
        tensors.rows.groups = _CheckedGroups.of(tensors, found)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedGroups:
    """The groups of a step, which were checked. A step of the same tensors with the same groups needs no more checks.

    Attributes:
        roles: for each entry what its codec and parameters make of it (`_roles`).
        followers: whether each entry is a tensor of a group other than its leader.
        groups: the groups, each with its ``members`` as they are in the parameters.
    """

    roles: list[str | bool | None]
    followers: npt.NDArray[np.bool_]
    groups: list[tuple[StepGroup, Any]]

    @classmethod
    def of(cls, tensors: StepTensors, groups: Sequence[StepGroup]) -> _CheckedGroups:
        """Remember `groups`, all that `tensors` has."""
        roles = _roles(tensors)
        followers = np.array([type(role) is str for role in roles], bool)
        return cls(roles, followers, [(group, tensors[group.leader].params["members"]) for group in groups])

    def again(self, tensors: StepTensors, where: str) -> list[StepGroup] | None:
        """The groups of another step of the same tensors; None: it needs all checks.

        Raises:
            FormatError: as `groups_of`.
        """
        if _roles(tensors) != self.roles or tensors.stored_chunks[self.followers].any():
            return None
        leaders = [(tensors[group.leader], group, members) for group, members in self.groups]
        if any(leader.params.get("members") != members for leader, _, members in leaders):
            return None
        return [_read(leader, where, group.members) for leader, group, _ in leaders]


def _roles(tensors: StepTensors) -> list[str | bool | None]:
    """Return of each entry its leader's name, if it follows one; True if it leads; False if it is in no group.

    None if it has other parameters than these: no step that has passed the checks has such an entry.
    """
    rows = [_role(codec, params) for codec, params in tensors.columns.codecs]
    own = slice(tensors.start, tensors.start + len(tensors))
    return [rows[row] for row in tensors.columns.codec[own].tolist()]


def _role(codec: str, params: Mapping[str, Any]) -> str | bool | None:
    if codec != STEP or "leader" not in params:
        return codec == STEP
    name = params["leader"]
    return name if type(name) is str and len(params) == 1 else None


def _read(leader: TensorEntry, where: str, known: tuple[tuple[str, ...], ...] | None = None) -> StepGroup:
    """Read the group of a leader. `known`: its members, if the same ones were read before."""
    what = f"{where}: tensor {leader.name!r}"
    params = leader.params
    encoding, rule, members = params.get("encoding"), params.get("rule"), params.get("members")
    if params.keys() != {"encoding", "rule", "members"} or encoding not in _ENCODINGS or not isinstance(rule, Mapping):
        raise FormatError(f"{what}: parameters of an unknown optimizer step")
    if known is None and (not _is_table(members) or not members or members[0][0] != leader.name):
        raise FormatError(f"{what}: not the names of a group's tensors")
    try:
        arithmetic = optim.rule(rule)
        if encoding in optim.SCALED:
            optim.scaled.check(arithmetic)
    except FormatError as error:
        raise type(error)(f"{what}: {error}") from error
    group = StepGroup(cast("optim.Encoding", encoding), arithmetic, known or _as_tuples(members))
    if any(len(member) != len(arithmetic.slots) for member in group.members):
        raise FormatError(f"{what}: a parameter has the slots {', '.join(arithmetic.slots)}")
    return group


def _as_tuples(members: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(member) for member in members)


def _is_table(members: object) -> bool:
    return isinstance(members, Sequence) and all(
        isinstance(member, list | tuple) and member and all(isinstance(name, str) for name in member)
        for member in members
    )


def _check(group: StepGroup, tensors: Mapping[str, TensorEntry], where: str) -> None:
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
