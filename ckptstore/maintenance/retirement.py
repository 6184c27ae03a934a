"""Retirement: checkpoints that are promised no longer, of any term, beside a live writer or without one.

What others build on stays stored, unpromised; the rest is dropped in the same record, and gc deletes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.errors import CheckpointNotFoundError, UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.commit_checks import droppable
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.records import Node, ref_of
from ckptstore.log import refs
from ckptstore.log.change import Change
from ckptstore.log.journal import Journal
from ckptstore.maintenance.catalog_changes import change, look

__all__ = ["Retired", "retire"]


@dataclass(frozen=True, slots=True)
class Retired(HtmlTable):
    """What `retire` did, or with ``dry_run`` would do.

    Attributes:
        retired: REFs of the checkpoints that are gone.
        kept: REFs of those of them whose stored form stays, because others build on it or lie in the same segment.
        dropped: keys of segments that nothing needs any more, for gc; `dropped_nbytes`: their bytes.
    """

    retired: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    dropped_nbytes: int


def retire(
    journal: Journal,
    wanted: Sequence[str | int],
    *,
    dry_run: bool = False,
    take_over: bool = False,
    timeout: float | None = 60.0,
) -> Retired:
    """Promise checkpoints no longer.

    Raises:
        UsageError: none is named; one is the latest, or a tag names it.
        CheckpointNotFoundError: nothing answers to a REF.
        as `changing.change`.
    """
    if not wanted:
        raise UsageError("nothing to retire: name the checkpoints")
    view = look(journal, take_over=take_over and not dry_run)
    nodes = list(dict.fromkeys(refs.resolve(view.catalog, ref).node for ref in wanted))
    found = _plan(view.catalog, nodes)
    if not dry_run:
        done: list[_Plan] = []

        def plan(catalog: Catalog) -> Change:
            done.append(_plan(catalog, nodes))
            return Change(retires=done[-1].retires, drops=done[-1].drops)

        what = f"retire {ref_of(nodes[0])}" + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")
        change(journal, view, what, plan, take_over=take_over, timeout=timeout)
        found = done[-1]
    return Retired(tuple(map(ref_of, found.retires)), found.kept, found.keys, found.nbytes)


@dataclass(frozen=True, slots=True)
class _Plan:
    retires: tuple[Node, ...]
    kept: tuple[str, ...]
    drops: tuple[str, ...]
    keys: tuple[str, ...]
    nbytes: int


def _plan(catalog: Catalog, nodes: Sequence[Node]) -> _Plan:
    latest = catalog.latest()
    for node in nodes:
        if node not in catalog.checkpoints:
            raise CheckpointNotFoundError(f"{ref_of(node)} was retired meanwhile")
        if latest is not None and node == latest.node:
            raise UsageError(f"{ref_of(node)} is the latest checkpoint, which a run would resume from: it stays")
        for name, tagged in catalog.tags.items():
            if tagged == node:
                raise UsageError(f"{ref_of(node)} cannot be retired: tag {name!r} names it; remove the tag first")
    drops = tuple(segment for segment in droppable(catalog, nodes) if segment in catalog.segments)
    gone = frozenset(drops)
    kept = tuple(
        ref_of(node)
        for node in nodes
        if any(gone.isdisjoint(edge.segments) for edge in catalog.encodings.get(node, ()))
    )
    segments = [catalog.segments[segment] for segment in drops]
    return _Plan(tuple(nodes), kept, drops, tuple(one.key for one in segments), sum(one.size for one in segments))
