"""Lists the checkpoints of a store as a forest, each with its parent, for ``ckpt log``. Reads the log once.

Only the requested checkpoints are described: the cost of the newest twenty does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from ckptstore.errors import CorruptLogError, NotFoundError
from ckptstore.formats.history.records import Node, ref_of
from ckptstore.formats.history.rule_rankings import metric, names
from ckptstore.formats.html_tables import HtmlTable, counted
from ckptstore.log.change_committer import LastWriter, last_writer
from ckptstore.log.checkpoint_info import CheckpointInfo, TermInfo, damage_of, describe, describe_terms
from ckptstore.log.log_reader import read

if TYPE_CHECKING:
    from ckptstore.formats.history.catalog import Catalog
    from ckptstore.log.journal import Journal

__all__ = ["Lineage", "lineage"]


@dataclass(frozen=True, slots=True)
class Lineage(HtmlTable):
    """The checkpoints and terms of a store at one moment.

    Attributes:
        checkpoints: the requested ones, newest first: all of a term are newer than those of earlier terms. With a
            metric, the best first; those without the metric last, newest first.
        parents: REF -> REF of the checkpoint it continues from; None for the first of a run. A retired parent is
            replaced by its nearest ancestor that still exists. Newest first, down to the last of `checkpoints`,
            including those between them that were not requested.
        total: number of checkpoints in the store.
        nbytes: bytes of all segments that its log names.
        steps: lowest and highest step; None: there is no checkpoint.
        terms: newest first.
        latest: REF of the checkpoint that ``latest`` names; None if the store is empty, or damage hides it.
        damage: what is wrong with the log, one sentence each. The listed checkpoints do not need the damaged slots.
        writer: the last writer, and whether its process is alive.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    parents: Mapping[str, str | None]
    total: int
    nbytes: int
    steps: tuple[int, int] | None
    terms: tuple[TermInfo, ...]
    latest: str | None
    damage: tuple[str, ...]
    writer: LastWriter = field(default_factory=LastWriter)

    def __repr__(self) -> str:
        shown = len(self.checkpoints)
        part = "" if shown == self.total else f"{shown:,} of "
        total, terms = counted(self.total, "checkpoint"), counted(len(self.terms), "term")
        return f"<Lineage: {part}{total}, {terms}, latest {self.latest}>"


def lineage(journal: Journal, limit: int | None = None, term: int | None = None, by: str | None = None) -> Lineage:
    """Read the log of a store.

    Args:
        limit: at most this many checkpoints, the newest; None: all.
        term: only the checkpoints of this term.
        by: order by the number of this name in the metadata, lowest first; ``NAME:max``: highest first. `limit` then
            takes the first of this order. ``metrics.NAME`` is NAME of the metrics.

    Raises:
        NotFoundError: no checkpoint has a number of that name.
        CorruptLogError: no part of the log can be read.
        StorageError: the medium failed.
    """
    catalog = read(journal).catalog
    terms = describe_terms(catalog)[::-1]
    latest = None
    with contextlib.suppress(CorruptLogError):
        newest = catalog.latest()
        latest = None if newest is None else newest.ref
    nodes, parents = _newest(catalog, limit if by is None else None, term)
    if by is not None:
        nodes = _ranked(catalog, nodes, by)[:limit]
    infos = describe(catalog, [catalog.checkpoints[node] for node in nodes])
    steps = [step for _, step in catalog.checkpoints]
    return Lineage(
        tuple(infos),
        parents,
        len(steps),
        catalog.stored_bytes(),
        (min(steps), max(steps)) if steps else None,
        tuple(terms),
        latest,
        damage_of(catalog),
        last_writer(catalog),
    )


def _newest(catalog: Catalog, limit: int | None, term: int | None) -> tuple[list[Node], dict[str, str | None]]:
    """Return the newest requested nodes, and the parents of these and of those between, newest first."""
    found: list[Node] = []
    parents: dict[str, str | None] = {}
    between: dict[str, str | None] = {}
    nodes: Iterator[tuple[Node, Node]] = pairwise(chain(reversed(catalog.checkpoints), [(0, 0)]))
    for node, before in nodes:
        if len(found) == limit or (term is not None and node[0] < term):
            break
        parent = before if before[0] == node[0] else _line(catalog, node[0])
        between[ref_of(node)] = None if parent is None else ref_of(parent)
        if term in (None, node[0]):
            found.append(node)
            parents |= between
            between = {}
    return found, parents


def _ranked(catalog: Catalog, nodes: list[Node], by: str) -> list[Node]:
    name, _, direction = by.rpartition(":")
    if direction not in ("min", "max"):
        name, direction = by, "min"
    if len(catalog.checkpoints) and name not in (there := names(catalog)):
        name = name.removeprefix("metrics.")
        if name not in there:
            raise NotFoundError(f"no checkpoint has the number {name!r}; there are: {', '.join(there) or 'none'}")
    sign = -1.0 if direction == "max" else 1.0
    found = {node: metric(catalog.checkpoints[node], name) for node in nodes}
    rated = [(sign * value, place, node) for place, (node, value) in enumerate(found.items()) if value is not None]
    return [node for _, _, node in sorted(rated)] + [node for node, value in found.items() if value is None]


def _line(catalog: Catalog, term: int) -> Node | None:
    """Return the nearest existing checkpoint among the ancestors of `term`'s first checkpoint."""
    while (opened := catalog.terms.get(term)) is not None and opened.parent is not None:
        term = opened.parent.term
        if (found := catalog.checkpoints.highest(term, opened.parent.step)) is not None:
            return found
    return None
