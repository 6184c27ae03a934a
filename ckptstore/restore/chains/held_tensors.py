"""The tensors of one encoding by name. Their links are made when they are asked for.

A chain of many steps of many small tensors has a link for each tensor of each step. Restoring it needs few of them:
those of the last step, of the full, and of the leaders of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.step_codec import StepGroup
from ckptstore.formats.segment_files.step_tensors import StepTensors, TensorRows
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["EncodingTensors", "Held", "HeldPart", "LinkRun", "Spec", "same_group", "spec_in", "spec_of"]

Held: TypeAlias = Mapping[str, TensorLink]
"""The tensors of one encoding, by name; shards by their `ShardKey`."""
Spec: TypeAlias = tuple[str, tuple[int, ...]]
"""Logical dtype and shape."""


def spec_of(tensor: TensorEntry | TensorSpec) -> Spec:
    """Logical dtype and shape."""
    return tensor.dtype, tensor.shape


def spec_in(held: Held, name: str) -> Spec:
    """The spec of a tensor of an encoding, without its link if that can be."""
    return held.spec(name) if isinstance(held, EncodingTensors) else spec_of(held[name].tensor)


@dataclass(frozen=True, slots=True, eq=False)
class HeldPart:
    """The tensors that one segment holds of an encoding, none of them a shard.

    Attributes:
        reader: the segment.
        tensors: name -> entry.
        groups: the groups among them, by the names of their tensors.
    """

    reader: SegmentReader
    tensors: Mapping[str, TensorEntry]
    groups: Mapping[str, StepGroup]


class EncodingTensors(Mapping[str, TensorLink]):
    """The tensors of an encoding whose segments hold no shards.

    Attributes:
        rows: which tensors each of its segments holds; None where the segment was not read as columns.
    """

    def __init__(self, step: int, parts: Sequence[HeldPart]) -> None:
        """No tensor may be in two parts."""
        self._step = step
        self._parts = parts
        self._links: dict[str, TensorLink] = {}
        self.rows: tuple[TensorRows | None, ...] = tuple(
            part.tensors.rows if isinstance(part.tensors, StepTensors) else None for part in parts
        )

    def __getitem__(self, name: str) -> TensorLink:
        link = self._links.get(name)
        if link is None:
            for part in self._parts:
                if name in part.tensors:
                    link = TensorLink(part.tensors[name], part.reader, self._step, part.groups.get(name))
                    self._links[name] = link
                    return link
            raise KeyError(name)
        return link

    def __contains__(self, name: object) -> bool:
        return name in self._links or any(name in part.tensors for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part.tensors

    def __len__(self) -> int:
        return sum(len(part.tensors) for part in self._parts)

    def spec(self, name: str) -> Spec:
        """The spec of a tensor, without its link."""
        for part in self._parts:
            if name in part.tensors:
                tensors = part.tensors
                return spec_of(tensors.spec(name) if isinstance(tensors, StepTensors) else tensors[name])
        raise KeyError(name)

    def group_of(self, name: str) -> StepGroup | None:
        """The group of a tensor, without its link."""
        return next((part.groups[name] for part in self._parts if name in part.groups), None)


def same_group(one: Held, other: Held, group: StepGroup) -> bool:
    """Whether an encoding is known to have the group of another one: the same tensors, dtypes and shapes, in one order.

    Args:
        other: has `group`.
    """
    if not isinstance(one, EncodingTensors) or not isinstance(other, EncodingTensors):
        return False
    if None in one.rows or one.rows != other.rows:  # compares identities
        return False
    found = one.group_of(group.leader)
    return found is not None and found.members is group.members


class LinkRun(Sequence[TensorLink]):
    """The links of one tensor in consecutive encodings, in their order."""

    __slots__ = ("_first", "_held", "_last", "_name", "_top")

    def __init__(self, held: Sequence[Held], first: int, last: int, name: str) -> None:
        """Of the encodings `first` to `last` of `held`, each of which has the tensor `name`."""
        self._held, self._first, self._last, self._name = held, first, last, name
        self._top = held[last][name]

    @overload
    def __getitem__(self, place: int) -> TensorLink: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[TensorLink, ...]: ...

    def __getitem__(self, place: int | slice) -> TensorLink | tuple[TensorLink, ...]:
        if place == -1:  # by far the most frequent
            return self._top
        numbers = range(self._first, self._last + 1)[place]
        if isinstance(numbers, int):
            return self._held[numbers][self._name]
        return tuple([self._held[number][self._name] for number in numbers])

    def __len__(self) -> int:
        return self._last + 1 - self._first
