"""Measures on samples how small this store's checkpoints get as fulls, and as deltas over several steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import CorruptionError, CorruptLogError
from ckptstore.formats.codecs import SMALL_POLICY
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, Node, ref_of
from ckptstore.host.threads import default_threads, workers
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.maintenance.compact.size_estimates import Samples
from ckptstore.maintenance.merge.checkpoint_portions import portions_of
from ckptstore.maintenance.merge.merge_check import opened_plan
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.restore_plan import TYPICAL, Plan, Rates, plan
from ckptstore.restore.restore_rates import measure_rates
from ckptstore.write.delta_encoding import Choices, choose_all

__all__ = ["SampledSizes", "measure"]

_Pair = tuple[Node, Node]


@dataclass(frozen=True, slots=True)
class SampledSizes:
    """The result of measuring samples.

    Attributes:
        samples: compression ratios; None: nothing could be read.
        rates: restore rates.
    """

    samples: Samples | None = None
    rates: Rates = TYPICAL


_PAIRS: Final = 3


def measure(journal: Journal, catalog: Catalog) -> SampledSizes:
    """Encode a few samples of a few checkpoints in memory. Unreadable ones are skipped.

    Raises:
        StorageError: the medium failed.
    """
    pairs = _pairs(catalog)
    if not pairs:
        return SampledSizes()
    full: float | None = None
    rates = TYPICAL
    deltas: dict[int, float] = {}
    for base, node in pairs:
        try:
            with ExitStack() as stack:
                found, below = _opened(journal, node, base, stack)
                if full is None:
                    rates, full = measure_rates(found), _ratio(found, None)
                if node != base:
                    deltas[node[1] - base[1]] = _ratio(found, below)
        except CorruptionError:
            continue
    return SampledSizes(None if full is None else Samples(full, tuple(sorted(deltas.items()))), rates)


def _opened(journal: Journal, node: Node, base: Node, stack: ExitStack) -> tuple[OpenCheckpoint, OpenCheckpoint]:
    """Open both checkpoints, pinned."""
    pinned = claim(journal, lambda catalog: _plans(catalog, node, base), _segments)
    view, plans = stack.enter_context(pinned)
    opened = [
        stack.enter_context(opened_plan(journal.backend, view.catalog, _entry(view.catalog, one), chosen.encodings))
        for one, chosen in zip((node, base), plans, strict=True)
    ]
    return opened[0], opened[1]


def _pairs(catalog: Catalog) -> list[_Pair]:
    """Return (base, checkpoint) pairs of neighbors and distant ones; of fulls if there are two, which read fastest."""
    term = max((node[0] for node in catalog.checkpoints), default=0)
    kept = [node for node in catalog.checkpoints if node[0] == term]
    fulls = [node for node in kept if any(edge.base is None for edge in catalog.encodings.get(node, ()))]
    nodes = fulls if len(fulls) > 1 else kept
    if len(nodes) < 2:
        return [(node, node) for node in nodes]
    first = nodes[0]
    others = [nodes[1], nodes[len(nodes) // 2], nodes[-1]]
    return [(first, other) for other in dict.fromkeys(others)][:_PAIRS]


def _entry(catalog: Catalog, node: Node) -> CheckpointEntry:
    found = catalog.checkpoints.get(node)
    if found is None:
        raise CorruptLogError(f"{ref_of(node)} was retired meanwhile")
    return found


def _plans(catalog: Catalog, node: Node, base: Node) -> tuple[Plan, Plan]:
    return plan(catalog, _entry(catalog, node).id), plan(catalog, _entry(catalog, base).id)


def _segments(plans: Sequence[Plan]) -> tuple[str, ...]:
    return tuple(segment for chosen in plans for segment in chosen.segments)


def _ratio(found: OpenCheckpoint, below: OpenCheckpoint | None) -> float:
    """Return the stored bytes per logical byte, estimated from samples of every tensor."""
    gap = 1 if below is None else max(1, found.entry.step - below.entry.step)
    with workers(default_threads(), "sample") as coders:
        plans = [
            tensor
            for portion in portions_of(found)
            for tensor in choose_all(
                portion.flat, None if below is None else portion.base(below), gap, Choices(SMALL_POLICY), coders
            )
        ]
    logical = sum(one.spec.nbytes for one in plans)
    stored = sum(one.spec.nbytes / one.choice.ratio for one in plans if one.choice.ratio)
    return stored / logical if logical else 1.0
