"""Decides from terms and their parents whether one checkpoint continues another, and where two lines fork."""

from __future__ import annotations

from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Node

__all__ = ["between", "fork_point"]


def _line(catalog: Catalog, node: Node) -> dict[int, int]:
    """term -> its last step on the line to `node`."""
    line = {node[0]: node[1]}
    opened = catalog.terms.get(node[0])
    while opened is not None and opened.parent is not None and opened.parent.term not in line:
        line[opened.parent.term] = opened.parent.step
        opened = catalog.terms.get(opened.parent.term)
    return line


def fork_point(catalog: Catalog, before: Node, now: Node) -> Node | None:
    """The last place that the lines to two checkpoints have in common: `before` itself, if `now` continues from it.

    Returns:
        (term, step); None: they have nothing in common.
    """
    one, other = _line(catalog, before), _line(catalog, now)
    common = one.keys() & other.keys()
    if not common:
        return None
    term = max(common)
    return term, min(one[term], other[term])


def between(catalog: Catalog, before: Node, now: Node) -> list[Node]:
    """The checkpoints on the line to `now` after the place where it forks from the line to `before`, in order; `now`
    comes last. If the run went back to `now`, only `now`.
    """
    line, after = _line(catalog, now), fork_point(catalog, before, now)
    found = [node for node in catalog.checkpoints if node[1] <= line.get(node[0], -1) and (not after or node > after)]
    return [*sorted(node for node in found if node != now), now]
