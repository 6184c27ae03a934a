"""Computes where a store's bytes are, by kind, term and tensor class, and how they grow. Reads the log and a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CorruptLogError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import users
from ckptstore.formats.history.records import CheckpointEntry
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.segment_files.step_codec import StepGroup
from ckptstore.formats.tensor_classes import class_by_name
from ckptstore.log.checkpoint_info import CheckpointInfo, describe_all
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.restore.chains.assembly import Held
from ckptstore.restore.chains.chain_link import TensorLink
from ckptstore.restore.open_checkpoint import opened

__all__ = ["ClassBytes", "Share", "StoreStats", "bytes_by_step", "growth", "stats"]

WINDOW: Final = 1000
"""Number of steps over which growth is computed."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the store: the number of `checkpoints` in it, and the `nbytes` of their segments."""

    checkpoints: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ClassBytes:
    """The tensors of one class in the newest checkpoint.

    Bytes that an optimizer's step stores for several tensors together are divided in proportion to their logical bytes.

    Attributes:
        tensors: number of tensors.
        nbytes: their logical bytes.
        stored: bytes that the newest checkpoint itself stores of them.
        chain: bytes that restoring them reads: `stored`, and what the checkpoints below it store of them.
    """

    tensors: int
    nbytes: int
    stored: int
    chain: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats(HtmlTable):
    """Where a store's bytes are.

    Attributes:
        checkpoints: all checkpoints, ascending by term and step.
        latest: REF of the newest; None: there is none, or damage hides it.
        nbytes: bytes of all segments that the log names.
        kinds: ``full``, ``delta`` or ``gradient`` -> its share; ``held``: retired checkpoints that are stored because
            others build on them; ``lost``: checkpoints that damage has made unrestorable. A segment that several share
            counts once, for the oldest one that is not retired.
        steps: (step, kind, bytes) of every segment, ascending: the step of the checkpoint that it counts for.
        terms: term -> its share of checkpoints, and the bytes that it wrote.
        classes: ``weight``, ``first_moment``, ``second_moment``, ``gradient``, ``other`` -> the tensors of the newest
            checkpoint, classified by name.
        growth: bytes of the segments of the last 1,000 steps up to the newest, as they are stored now, branches
            included; extrapolated for a shorter run. None: there are fewer than two steps.
        rules: the store's retention rules.
        prunable_nbytes: bytes that pruning by them would leave to gc; None: there are no rules, or damage forbids it.
        garbage_nbytes: bytes that gc would free now.
        damage: what is wrong with the log, one sentence each. The other attributes then cover only what is left of it.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    latest: str | None
    nbytes: int
    kinds: Mapping[str, Share]
    steps: tuple[tuple[int, str, int], ...]
    terms: Mapping[int, Share]
    classes: Mapping[str, ClassBytes]
    growth: float | None
    rules: tuple[str, ...]
    prunable_nbytes: int | None
    garbage_nbytes: int
    damage: tuple[str, ...] = ()


def stats(
    journal: Journal, *, prunable_nbytes: int | None, garbage_nbytes: int, damage: tuple[str, ...] = ()
) -> StoreStats:
    """Compute the statistics of a store.

    Args:
        prunable_nbytes, garbage_nbytes: bytes that prune and gc would free, as computed by maintenance.
        damage: what maintenance found wrong with the log.

    Raises:
        CorruptLogError: no part of the log can be read.
        CorruptionError: the newest checkpoint's chain is damaged.
    """
    catalog = read(journal).catalog
    try:
        newest = catalog.latest()
    except CorruptLogError:
        newest = None
    steps = bytes_by_step(catalog)
    return StoreStats(
        checkpoints=tuple(describe_all(catalog)),
        latest=None if newest is None else newest.ref,
        nbytes=sum(segment.size for segment in catalog.segments.values()),
        kinds=_kinds(catalog, steps),
        steps=steps,
        terms=_terms(catalog),
        classes={} if newest is None else _classes(journal, newest),
        growth=None if newest is None else growth(steps, newest.step),
        rules=catalog.keep,
        prunable_nbytes=prunable_nbytes,
        garbage_nbytes=garbage_nbytes,
        damage=damage,
    )


def _terms(catalog: Catalog) -> dict[int, Share]:
    nbytes = dict.fromkeys(sorted(catalog.terms), 0)
    for segment in catalog.segments.values():
        nbytes[segment.term] = nbytes.get(segment.term, 0) + segment.size
    return {term: Share(catalog.checkpoints.holds(term), size) for term, size in nbytes.items()}


def _kinds(catalog: Catalog, steps: Sequence[tuple[int, str, int]]) -> dict[str, Share]:
    counts: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for node in catalog.checkpoints:
        cheapest = min(catalog.encodings.get(node, ()), key=lambda edge: edge.bytes, default=None)
        kind = "lost" if cheapest is None else cheapest.kind
        counts[kind] = counts.get(kind, 0) + 1
    if catalog.held:
        counts["held"] = len(catalog.held)
    for _, kind, size in steps:
        nbytes[kind] = nbytes.get(kind, 0) + size
    return {kind: Share(counts.get(kind, 0), nbytes.get(kind, 0)) for kind in sorted({*counts, *nbytes})}


def _owner(catalog: Catalog, segment: str) -> tuple[int, str]:
    """Return the step of the checkpoint that a segment counts for, and the kind of its encoding in it."""
    nodes = sorted(users(catalog, segment))
    promised = [node for node in nodes if node in catalog.checkpoints]
    for node in promised[:1]:
        return node[1], next(edge.kind for edge in catalog.encodings[node] if segment in edge.segments)
    return (nodes[0][1] if nodes else 0), "held"


def _classes(journal: Journal, newest: CheckpointEntry) -> dict[str, ClassBytes]:
    found: dict[str, ClassBytes] = {}
    with opened(journal, newest.ref) as checkpoint:
        shares = _Shares(checkpoint.encodings)
        for name, tensor in checkpoint.tensors.items():
            kind = class_by_name(name, tensor.dtype, tuple(tensor.shape)) or "other"
            chains = [chain.links for chain, _ in checkpoint.stored(name)]
            own = sum(shares.of(links[-1], len(shares.held) - 1) for links in chains)
            below = sum(
                shares.of(link, number)
                for links in chains
                for number, link in enumerate(links[:-1], len(shares.held) - len(links))
            )
            so_far = found.get(kind, ClassBytes(0, 0, 0))
            found[kind] = ClassBytes(
                so_far.tensors + 1, so_far.nbytes + tensor.nbytes, so_far.stored + own, so_far.chain + own + below
            )
    return dict(sorted(found.items()))


class _Shares:
    """Bytes that encodings store of single tensors. A group's bytes, held by its leader, are divided in proportion.

    The parts of a group add up to what it stores: the leader gets the rounding remainder.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self._groups: dict[tuple[int, str], dict[str, int]] = {}  # a group may have thousands of members

    def of(self, link: TensorLink, number: int) -> int:
        """Return the bytes of a link that is in encoding `number`."""
        if link.group is None:
            return link.tensor.stored
        key = number, link.group.leader
        if key not in self._groups:
            self._groups[key] = self._parts(link.group, self.held[number])
        return self._groups[key][link.tensor.name]

    @staticmethod
    def _parts(group: StepGroup, encoding: Held) -> dict[str, int]:
        members = {name: encoding[name].tensor for name in group.names}
        stored = sum(one.stored for one in members.values())
        nbytes = sum(one.nbytes for one in members.values())
        parts = {name: stored * one.nbytes // max(1, nbytes) for name, one in members.items()}
        parts[group.leader] += stored - sum(parts.values())
        return parts


def bytes_by_step(catalog: Catalog) -> tuple[tuple[int, str, int], ...]:
    """See `StoreStats.steps`."""
    return tuple(sorted((*_owner(catalog, segment.id), segment.size) for segment in catalog.segments.values()))


def growth(steps: Sequence[tuple[int, str, int]], newest: int) -> float | None:
    """Compute `StoreStats.growth`; `steps` as `bytes_by_step` returns them."""
    if not steps:
        return None
    first = max(newest - WINDOW, steps[0][0])
    if newest <= first:
        return None
    # In a shorter run, growth starts from its first checkpoint.
    return sum(size for step, _, size in steps if first < step <= newest) * WINDOW / (newest - first)
