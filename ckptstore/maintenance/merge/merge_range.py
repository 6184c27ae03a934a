"""Selects what a merge of ``A..B`` does: which diffs are merged, which checkpoints are retired, what stays and why.

The range is the promised checkpoints of one term with A <= step <= B. Fulls in it are neither merged nor retired,
unless that is requested. This module reads no segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CorruptionError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.checkpoint_ref import parse_range
from ckptstore.formats.history.commit_checks import needed, users
from ckptstore.formats.history.records import CheckpointEntry, Encoding, Node, ref_of
from ckptstore.formats.history.retention_rules import known, reasons_of
from ckptstore.log import refs
from ckptstore.restore.restore_plan import Plan, plan, plan_all

__all__ = ["MergeSelection", "Range", "outside", "select_range", "unneeded"]

_OF_FULLS: Final = (
    ". Fulls are merged only on request (fulls=True, --fulls): then only B stays. To keep every one, in fewer "
    "bytes: ckpt compact --only A..B"
)
_NAMED: Final = 4
_NOT_BOTH: Final = (
    "fulls cannot be combined with keep_steps, which keeps every one of them; ckpt compact --only A..B stores the "
    "fulls of a range as deltas, and keeps them all"
)


@dataclass(frozen=True, slots=True)
class MergeSelection:
    """What a merge does with a range.

    Attributes:
        first: A.
        last: B.
        target: the checkpoint that is decoded to verify the result: B, or with ``keep_steps`` the last diff.
        chain: the plan of `target`.
        merged: encodings to put into one segment, ascending by step. The last ones of `chain`, or with ``keep_steps``
            one for each diff.
        copyable: whether all checkpoints of `merged` may get new encodings.
        retired: (term, step) of the checkpoints to retire.
        held: REF of a checkpoint that would be retired, too -> what holds it.
        fulls: REFs of the fulls of the range, which stay.
    """

    first: CheckpointEntry
    last: CheckpointEntry
    target: CheckpointEntry
    chain: Plan
    merged: tuple[Encoding, ...]
    copyable: bool
    retired: tuple[Node, ...]
    held: Mapping[str, str]
    fulls: tuple[str, ...]

    @property
    def rewrites(self) -> bool:
        """Whether anything is written: more than one encoding is merged."""
        return len(self.merged) > 1

    @property
    def prefix(self) -> tuple[Encoding, ...]:
        """The encodings of `chain` below the merged ones."""
        merged = {edge.checkpoint for edge in self.merged}
        return tuple(edge for edge in self.chain.encodings if edge.checkpoint not in merged)

    @property
    def segments(self) -> tuple[str, ...]:
        """Ids of the segments that the merge reads."""
        read = (*self.chain.encodings, *self.merged)
        return tuple(dict.fromkeys(segment for edge in read for segment in edge.segments))


@dataclass(frozen=True, slots=True)
class Range:
    """A range to merge.

    Attributes:
        text: ``A..B``.
        keep_steps: keep every checkpoint of the range; otherwise only B of its diffs.
        fulls: retire the fulls of the range, too, so that only B stays; cannot be combined with `keep_steps`.
    """

    text: str
    keep_steps: bool = False
    fulls: bool = False

    def __post_init__(self) -> None:
        if self.fulls and self.keep_steps:
            raise UsageError(_NOT_BOTH)


def select_range(catalog: Catalog, wanted: Range) -> MergeSelection:
    """Choose what a merge does.

    Raises:
        UsageError: not a range; A and B are of different terms, or in the wrong order; or there is nothing to merge.
        CheckpointNotFoundError: A or B does not exist.
        CorruptionError: a checkpoint of the range cannot be restored.
        CorruptLogError: ``latest`` is hidden by a damaged slot.
    """
    first, last, members = _members(catalog, wanted.text)
    whole = {node for node in members if any(edge.base is None for edge in catalog.encodings.get(node, ()))}
    diffs = [node for node in members if node not in whole]
    if len(members if wanted.fulls else diffs) < 2:
        hint = "" if diffs or len(members) < 2 else _OF_FULLS
        count = f"{len(members)} checkpoint{'s' if len(members) != 1 else ''}"
        raise UsageError(f"nothing to merge: {first.ref}..{last.ref} holds {count}, {_diffs(diffs)}{hint}")
    if wanted.keep_steps:
        return _all_kept(catalog, first, last, diffs, tuple(ref_of(node) for node in members if node in whole))
    return _last_kept(catalog, first, last, members, whole, fulls=wanted.fulls)


def outside(catalog: Catalog, text: str) -> frozenset[Node]:
    """Return the promised checkpoints that are not in ``A..B``.

    Raises:
        UsageError, CheckpointNotFoundError, CorruptLogError: as `select_range`.
    """
    return frozenset(catalog.checkpoints).difference(_members(catalog, text)[2])


def _members(catalog: Catalog, text: str) -> tuple[CheckpointEntry, CheckpointEntry, list[Node]]:
    """Return A, B, and the nodes in the range, ascending."""
    first, last = (refs.resolve(catalog, ref) for ref in parse_range(text, catalog.tags))
    if first.term != last.term:
        raise UsageError(
            f"{first.ref} and {last.ref} are of different terms; write a range of one term "
            "(STEP@TERM names a step of a term)"
        )
    if first.step > last.step:
        raise UsageError(f"{first.ref} comes after {last.ref}: write {last.step}..{first.step}")
    nodes = (node for node in catalog.checkpoints if node[0] == first.term)
    return first, last, sorted(node for node in nodes if first.step <= node[1] <= last.step)


def _all_kept(
    catalog: Catalog, first: CheckpointEntry, last: CheckpointEntry, diffs: Sequence[Node], fulls: tuple[str, ...]
) -> MergeSelection:
    plans = plan_all(catalog)  # in one pass: separate plans would take quadratic time in a long chain
    edges: dict[Node, Encoding] = {}
    for node in diffs:
        found = plans[node]
        if isinstance(found, CorruptionError):
            raise found
        edges[node] = found.encodings[-1]
    # A segment that another checkpoint also reads could not be dropped: copying it would store the same bytes twice.
    while shared := [node for node, edge in edges.items() if not _users(catalog, edge) <= edges.keys()]:
        for node in shared:
            del edges[node]
    # Steps that were written together are in one segment, or in one of each rank that wrote them.
    segments = {edge.segments for edge in edges.values()}
    if len(edges) < 2 or len(segments) < 2:
        why = "are in one segment" if len(edges) > 1 else "share their segments with checkpoints outside of it"
        raise UsageError(f"nothing to merge: the diffs of {first.ref}..{last.ref} {why}")
    target = catalog.checkpoints[max(edges)]
    merged = tuple(edges[node] for node in sorted(edges))
    return MergeSelection(first, last, target, plan(catalog, target.id), merged, True, (), {}, fulls)


def _last_kept(
    catalog: Catalog,
    first: CheckpointEntry,
    last: CheckpointEntry,
    members: Sequence[Node],
    whole: Collection[Node],
    *,
    fulls: bool,
) -> MergeSelection:
    going = [node for node in members if fulls or node not in whole]
    if last.node != going[-1]:
        raise UsageError(
            f"{last.ref} is a full: a merge puts diffs into the one that ends the range. "
            f"End the range at {ref_of(going[-1])}, or keep the steps, or merge its fulls, too (--fulls)"
        )
    held = _held(catalog, going[:-1])
    retired = tuple(node for node in going[:-1] if node not in held)
    staying = catalog.checkpoints.keys() - set(retired)
    kept = staying | needed(catalog, staying - {last.node}, {last.node})
    chain = plan(catalog, last.id)
    merged = [chain.encodings[-1]]
    for edge in reversed(chain.encodings[:-1]):
        node = edge.checkpoint
        if node in kept or (edge.base is None and not fulls) or node[0] != first.term or node[1] < first.step:
            break  # it has to stay as it is, because a checkpoint above builds on it
        merged.insert(0, edge)
    holders = {ref_of(node): why for node, why in held.items()}
    if not retired and len(merged) < 2:
        what = "checkpoint" if fulls else "diff"
        raise UsageError(
            f"nothing to merge: every {what} of {first.ref}..{last.ref} has to stay ({_why(holders)}); "
            "keep_steps=True (--keep-steps) merges them and keeps every one"
        )
    # A full is a file that other tools read, so its chunks are not copied into a segment of diffs.
    copyable = all(edge.checkpoint in catalog.checkpoints and edge.base is not None for edge in merged)
    there = tuple(ref_of(node) for node in members if node in whole and node not in retired)
    return MergeSelection(first, last, last, chain, tuple(merged), copyable, retired, holders, there)


def _why(holders: Mapping[str, str]) -> str:
    """Format what holds the checkpoints: each reason once, with the first checkpoints."""
    grouped: dict[str, list[str]] = {}
    for ref, by in holders.items():
        grouped.setdefault(by, []).append(ref)
    return "; ".join(
        f"{', '.join(mine[:_NAMED])}{f' and {len(mine) - _NAMED} more' if len(mine) > _NAMED else ''}: {by}"
        for by, mine in grouped.items()
    )


def _held(catalog: Catalog, nodes: Iterable[Node]) -> dict[Node, str]:
    """Return those of `nodes` that must not be retired, and why."""
    held: dict[Node, str] = {}
    latest = catalog.latest()
    if latest is not None:
        held[latest.node] = "it is the latest checkpoint"
    for number, opened in sorted(catalog.terms.items()):
        if opened.parent is not None:
            held[opened.parent.node] = f"term {number} continues from it"
    for name, node in sorted(catalog.tags.items()):
        held[node] = f"tag {name!r} names it"
    going = list(nodes)
    ruled = _kept_by_rules(catalog, going)
    return {node: why for node in going if (why := held.get(node) or ruled.get(node))}


def _kept_by_rules(catalog: Catalog, nodes: Sequence[Node]) -> dict[Node, str]:
    """Return those of `nodes` that the store's retention rules keep, and by which rule.

    Prevents: a merge that gives up what the user's rules keep, without a word.
    """
    if not catalog.keep:
        return {}
    if not known(catalog.keep):
        return dict.fromkeys(nodes, "the store has a rule of retention that this version does not know")
    reasons, _ = reasons_of(catalog, catalog.keep)
    return {node: f"rule {rule} keeps it" for rule in catalog.keep for node in reasons[rule]}


def unneeded(
    catalog: Catalog, retired: Collection[Node], renewed: Collection[Node], added: Iterable[Encoding]
) -> tuple[str, ...]:
    """Return the ids of the segments that nothing needs after a commit.

    Args:
        retired: checkpoints that it retires.
        renewed: checkpoints whose present encodings are given up: `added` has another for each.
        added: encodings that it adds.
    """
    bases: dict[Node, list[Node]] = {}
    for edge in added:
        if edge.base is not None:
            bases.setdefault(edge.checkpoint, []).append(edge.base.node)
    roots = [node for node in catalog.checkpoints if node not in retired]
    roots += [base for node in renewed for base in bases.get(node, ())]
    still = needed(catalog, roots, renewed)
    touched = needed(catalog, [*retired, *renewed])
    segments = dict.fromkeys(
        segment for node in sorted(touched) for edge in catalog.encodings.get(node, ()) for segment in edge.segments
    )
    return tuple(
        segment
        for segment in segments
        if segment in catalog.segments  # a damaged log may not name it
        and all(node in renewed or node not in still for node in users(catalog, segment))
    )


def _users(catalog: Catalog, edge: Encoding) -> set[Node]:
    """Return the checkpoints with a live encoding that reads a segment of `edge`."""
    return {node for segment in edge.segments for node in users(catalog, segment)}


def _diffs(diffs: Sequence[Node]) -> str:
    return "one of them a diff" if diffs else "none of them a diff"
