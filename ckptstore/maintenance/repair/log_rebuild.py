"""Rebuilds the log from segments: which encodings they form, and of which states (SPEC 5.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, StorageError
from ckptstore.formats.history.records import CheckpointEntry, Encoding, Node, ref_of
from ckptstore.formats.segment_files.shards import name_of
from ckptstore.maintenance.repair.segment_descriptions import SegmentDescription
from ckptstore.maintenance.verify.verify_findings import is_bad_medium
from ckptstore.restore.chains.assembly import held_by, tree_of
from ckptstore.restore.stored_parts import described_state
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["CompleteEncoding", "RebuiltEncodings", "groups_of", "rebuild"]


@dataclass(frozen=True, slots=True)
class CompleteEncoding:
    """An encoding whose segments all exist, and the checkpoint that it restores."""

    encoding: Encoding
    entry: CheckpointEntry


@dataclass
class RebuiltEncodings:
    """What segments yield.

    Attributes:
        whole: complete encodings.
        broken: node -> why an encoding of it is incomplete.
    """

    whole: list[CompleteEncoding] = field(default_factory=list)
    broken: dict[Node, str] = field(default_factory=dict)


def groups_of(told: Iterable[SegmentDescription]) -> dict[tuple[Node, str], list[SegmentDescription]]:
    """Group segments by (checkpoint, id of the encoding's first segment), those that exist, in reading order."""
    groups: dict[tuple[Node, str], list[SegmentDescription]] = {}
    for one in told:
        for step, encoding in one.steps.items():
            first = one.entry.id if encoding.part is None else encoding.part.first
            groups.setdefault(((encoding.term, step), first), []).append(one)
    for (node, _), members in groups.items():
        members.sort(key=lambda one: _place(one, node[1]))
    return groups


def _place(one: SegmentDescription, step: int) -> tuple[int, int]:
    """Sort key: the tree's segment first, then by rank and number."""
    part = one.steps[step].part
    number = 0 if part is None else part.number
    return (one.rank.get(step, -1), number) if number else (-1, 0)


def _missing(members: Sequence[SegmentDescription], node: Node) -> str:
    """Return why these are not all segments of an encoding; empty: they are."""
    step = node[1]
    first = members[0].steps[step].part
    if first is None:
        return "" if len(members) == 1 else f"{len(members)} segments each claim to be the whole encoding"
    have = [(one.rank.get(step), one.steps[step].part) for one in members]
    counts = members[0].ranks.get(step)
    numbers = {(rank, part.number) for rank, part in have if part is not None}
    if counts is not None:
        wanted = {(None, 0), *((rank, k) for rank, count in enumerate(counts) for k in range(1, count + 1))}
    elif any(rank is not None for rank, _ in have):
        return "the segment with its tree is missing"
    else:
        wanted = {(None, number) for number in range(first.count)}
    gone = len(wanted - numbers)
    return f"{gone} of its {len(wanted)} segments are missing" if gone else ""


def rebuild(backend: Backend, groups: Mapping[tuple[Node, str], Sequence[SegmentDescription]]) -> RebuiltEncodings:
    """Build the encodings that groups of segments form. Reads their descriptions again, one group at a time.

    Raises:
        StorageError: the medium failed, and not because of one object.
    """
    made = RebuiltEncodings()
    for (node, _), members in sorted(groups.items(), key=lambda item: item[0]):
        if why := _missing(members, node):
            made.broken.setdefault(node, why)
            continue
        told = members[0].steps[node[1]]
        ids = tuple(one.entry.id for one in members)
        stored = sum(one.stored[node[1]] for one in members)
        edge = Encoding(node, told.kind, told.base, ids, told.lossy, stored)
        try:
            made.whole.append(CompleteEncoding(edge, _entry(backend, members, edge, told.time)))
        except StorageError as error:
            if not is_bad_medium(error):
                raise
            made.broken.setdefault(node, str(error))
        except CkptError as error:
            made.broken.setdefault(node, str(error))
    return made


def _entry(backend: Backend, members: Sequence[SegmentDescription], edge: Encoding, time: float) -> CheckpointEntry:
    with ExitStack() as stack:
        readers = []
        for one in members:
            readers.append(SegmentReader(backend, one.entry))
            stack.callback(readers[-1].close)
        held = held_by(readers, edge)
        state = described_state(held, tree_of(readers, edge), f"checkpoint {ref_of(edge.checkpoint)}")
    own = {key: link.tensor for key, link in held.items() if not name_of(key).startswith("ckptstore/")}
    names = {name_of(key) for key in own}
    return CheckpointEntry(*edge.checkpoint, state, time, len(names), sum(one.nbytes for one in own.values()))
