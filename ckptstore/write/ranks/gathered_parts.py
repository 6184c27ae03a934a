"""Combine the ranks' parts of a step on rank 0: check for missing and differing tensors, and build the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptstore.errors import (
    DivergedReplicasError,
    FormatError,
    RankMismatchError,
    StorageError,
    UnsupportedStateError,
)
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.shards import state_parts
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.state import check_size, tensor_names, unflatten
from ckptstore.log.journal import Journal
from ckptstore.write.ranks.division import Division
from ckptstore.write.ranks.messages.rank_messages import RankPart

__all__ = ["GatheredState", "check_replicas", "check_seen", "check_united", "gather_parts"]


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The parts of all ranks as one state.

    Attributes:
        tree: the merged tree of all ranks (`formats.states.rank_trees`).
        segments: in the order of the ranks.
        counts: number of segments of each rank.
        state: the hash of the state.
        names: the names of its tensors, in the order of the tree.
        nbytes: logical bytes of its tensors.
        abandoned: segments that have to be dropped.
    """

    tree: Any
    segments: tuple[SegmentEntry, ...]
    counts: tuple[int, ...]
    state: str
    names: tuple[str, ...]
    nbytes: int
    abandoned: tuple[str, ...]


def gather_parts(parts: Sequence[RankPart], division: Division, agreement: str) -> GatheredState:
    """Combine the parts of ranks 0, 1, ... into one state.

    Raises:
        RankMismatchError: a part follows another division, or does not hold what it should; the message names the rank
            and the tensor.
        UnsupportedStateError: the merged tree is too large, or values differ too deep in it.
    """
    for part in parts:
        if part.agreement != agreement:
            raise RankMismatchError(
                f"rank {part.rank} has other tensors than when the ranks agreed who writes what; they will agree again"
            )
    entries: list[TensorEntry] = []
    for part, specs in zip(parts, division.specs, strict=True):
        entries += _checked(part, specs)
    tree = rank_trees.merge([part.tree for part in parts])
    check_size(tree)
    stored = {entry.name for entry in entries}
    names = tensor_names(tree)
    if lost := [name for name in names if name not in stored]:
        raise RankMismatchError(f"tensor {lost[0]!r} was written by no rank")
    return GatheredState(
        tree,
        tuple(segment for part in parts for segment in part.segments),
        tuple(len(part.segments) for part in parts),
        checksums.state_hash(jsontext.dumps(tree), state_parts(entries)),
        tuple(names),
        sum(entry.nbytes for entry in entries),
        tuple(segment for part in parts for segment in part.abandoned),
    )


def check_united(tree: Any, parts: Sequence[RankPart]) -> None:
    """Check that a process that is not a rank can load every tensor.

    Prevents: a tensor that is stored, and that `load` without a rank leaves out.

    Args:
        tree: the merged tree of all ranks.

    Raises:
        UnsupportedStateError: it cannot; the message names a tensor and its rank.
    """
    if rank_trees.rank_count(tree) is None:
        return
    if hidden := rank_trees.left_out(tree):
        rank = next(part.rank for part in parts if hidden[0] in tensor_names(part.tree))
        raise UnsupportedStateError(
            f"tensor {hidden[0]!r} of rank {rank} is where another rank has something of another kind, so a process "
            "that is not a rank could not load both: put it under a key of its own"
        )
    try:
        unflatten(rank_trees.of_rank(tree, None), lambda name, _origin: name)
    except FormatError as error:
        raise UnsupportedStateError(f"the states of the ranks cannot be one state: {error}") from error


def _checked(part: RankPart, specs: dict[str, Any]) -> list[TensorEntry]:
    """Check that a part has the agreed entries, and besides these only the rank's own -> its entries."""
    found = {entry.name: entry for entry in part.entries}
    for name, spec in specs.items():
        entry = found.get(name)
        told = None if entry is None else (entry.dtype, entry.shape, entry.global_shape, entry.offset)
        if told != (spec.dtype, spec.shape, spec.global_shape, spec.offset):
            raise RankMismatchError(f"rank {part.rank} did not write its share of tensor {name!r}")
    for name, entry in found.items():
        if name not in specs and not (name.endswith(f"@{part.rank}") and entry.offset is None):
            raise RankMismatchError(f"rank {part.rank} wrote tensor {name!r}, which is not its to write")
    return list(found.values())


def check_replicas(parts: Sequence[RankPart], division: Division, step: int) -> None:
    """Compare the digests of the tensors that several ranks hold.

    Raises:
        DivergedReplicasError: they differ; the message names the first tensor and the ranks.
    """
    found: list[tuple[str, list[int], list[int]]] = []
    for name, groups in division.replicas.items():
        for ranks in groups:
            digests = [parts[rank].digests.get(name) for rank in ranks]
            if len(set(digests)) > 1:
                # If two ranks differ, no one knows which is right. A tie counts the lowest rank's digest as the usual.
                usual = Counter(digests).most_common(1)[0][0]
                odd = [rank for rank, number in zip(ranks, digests, strict=True) if number != usual]
                found.append((name, odd, [rank for rank in ranks if rank not in odd]))
    if not found:
        return
    name, odd, rest = found[0]
    others = f"; so do {len(found) - 1} more tensors" if len(found) > 1 else ""
    raise DivergedReplicasError(
        f"step {step}: tensor {name!r} differs on ranks that should have it alike: {_ranks(odd)} against {_ranks(rest)}"
        f"{others}. If each rank has its own, name it in RankOptions(per_rank=[...]); if not, hardware or software "
        "failed on one of them",
        name,
        odd[0],
        step,
    )


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


_FEW: Final = 8
"""So many segments are looked up one by one. More are listed together: a listing shows 1,000 in one request."""


def check_seen(journal: Journal, segments: Mapping[int, Sequence[SegmentEntry]]) -> None:
    """Check that rank 0 sees what the others have written: each rank may have a separate disk.

    Args:
        segments: the segments of each rank.

    Raises:
        StorageError: it does not see a segment, or sees another size.
    """
    written = [(rank, segment) for rank, own in segments.items() for segment in own]
    listed = _listed(journal, [segment for _, segment in written]) if len(written) > _FEW else {}
    for rank, segment in written:
        size = listed.get(segment.key)
        if size is None:  # a listing may be late
            try:
                size = journal.backend.size(segment.key)
            except (KeyError, OSError, LookupError) as error:
                raise StorageError(
                    f"{journal.url}: rank {rank} wrote {segment.key}, which rank 0 does not see: all ranks need "
                    "one store (a shared file system, or an object store)"
                ) from error
        if size != segment.size:
            raise StorageError(f"{journal.url}: {segment.key} has {size} bytes; rank {rank} wrote {segment.size}")


def _listed(journal: Journal, segments: Sequence[SegmentEntry]) -> dict[str, int]:
    """The lengths of the objects beside these segments. Empty if they cannot be listed: each is then looked up."""
    found: dict[str, int] = {}
    try:
        for folder in dict.fromkeys(f"{segment.key.rpartition('/')[0]}/" for segment in segments):
            found |= journal.backend.sizes(folder)
    except StorageError:
        return {}
    return found
