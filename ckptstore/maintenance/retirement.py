"""Retires checkpoints of any term, with or without a live writer.

What others build on stays stored, but is no longer promised. The rest is dropped in the same record, for gc to delete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.errors import CheckpointNotFoundError, UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import droppable
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.log import refs
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.maintenance.catalog_changes import change, look

__all__ = ["Retired", "retire"]


@dataclass(frozen=True, slots=True)
class Retired(HtmlTable):
    """The result of `retire`, or with ``dry_run`` its plan.

    Attributes:
        retired: REFs of the retired checkpoints.
        kept: REFs of those that stay stored, because others build on them or are in the same segment.
        dropped: keys of segments that nothing needs now, for gc; `dropped_nbytes`: their bytes.
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
    """Retire checkpoints.

    Raises:
        UsageError: none is named; or one is the latest, or has a tag.
        CheckpointNotFoundError: a REF names no checkpoint.
        as `catalog_changes.change`.
    """
    if not wanted:
        raise UsageError("nothing to retire: name the checkpoints")
    view = look(journal, take_over=take_over and not dry_run)
    nodes = list(dict.fromkeys(refs.resolve(view.catalog, ref).node for ref in wanted))
    found = _plan(view.catalog, nodes)
    if not dry_run:
        done: list[_RetirePlan] = []

        def plan(catalog: Catalog) -> CatalogChange:
            done.append(_plan(catalog, nodes))
            return CatalogChange(retires=done[-1].retires, drops=done[-1].drops)

        what = f"retire {ref_of(nodes[0])}" + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")
        change(journal, view, what, plan, take_over=take_over, timeout=timeout)
        found = done[-1]
    return Retired(tuple(map(ref_of, found.retires)), found.kept, found.keys, found.nbytes)


@dataclass(frozen=True, slots=True)
class _RetirePlan:
    retires: tuple[Node, ...]
    kept: tuple[str, ...]
    drops: tuple[str, ...]
    keys: tuple[str, ...]
    nbytes: int


def _plan(catalog: Catalog, nodes: Sequence[Node]) -> _RetirePlan:
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
    return _RetirePlan(tuple(nodes), kept, drops, tuple(one.key for one in segments), sum(one.size for one in segments))
