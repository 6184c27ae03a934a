"""Selects the part of a catalog to copy: the requested checkpoints, what they build on, their terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckptstore.formats.history.catalog import LACKS, Catalog
from ckptstore.formats.history.commit_checks import needed
from ckptstore.formats.history.records import Encoding, Node
from ckptstore.log import refs
from ckptstore.restore.restore_plan import plan

__all__ = ["chosen_nodes", "known_to", "left_out", "lines_of", "part_of", "with_paths"]


def chosen_nodes(catalog: Catalog, names: Sequence[str | int]) -> list[Node]:
    """Return the checkpoints that REFs name, ascending; without REFs all of them. Raises as `refs.resolve`."""
    found = (refs.resolve(catalog, name).node for name in names) if names else iter(catalog.checkpoints)
    return sorted(set(found))


def part_of(catalog: Catalog, nodes: Sequence[Node] | None) -> Catalog:
    """Return the part of the catalog that a copy gets.

    Args:
        nodes: the requested checkpoints, each with its cheapest chain; None: every promised checkpoint, with every
            encoding, every term, and the retention rules (rules in a partial copy would retire requested checkpoints).

    Raises:
        CorruptionError: one of them has no chain.
    """
    part = Catalog(term=catalog.term)
    if nodes is None:
        wanted = needed(catalog)
        edges = [edge for node in sorted(wanted) for edge in catalog.encodings.get(node, ()) if _leads(catalog, edge)]
        nodes = list(catalog.checkpoints)
        terms: Iterable[int] = catalog.terms
        part.keep, part.keep_seq = catalog.keep, catalog.keep_seq
    else:
        plans = [plan(catalog, catalog.checkpoints[node].id) for node in nodes]
        paths = {edge.checkpoint: edge for one in plans for edge in one.encodings}
        edges = [paths[node] for node in sorted(paths)]
        terms = lines_of(catalog, {node[0] for node in (*nodes, *paths)})
    with_paths(part, catalog, nodes, edges)
    part.terms.update((number, catalog.terms[number]) for number in sorted(terms))
    return part


def with_paths(part: Catalog, catalog: Catalog, nodes: Iterable[Node], edges: Iterable[Encoding]) -> None:
    """Add checkpoints and the encodings that restore them to `part`, with segments, tags and held bases."""
    promised = set(nodes)
    for node in promised:
        part.checkpoints[node] = catalog.checkpoints[node]
    for edge in edges:
        part.encodings[edge.checkpoint] = (*part.encodings.get(edge.checkpoint, ()), edge)
        for segment in edge.segments:
            part.segments[segment] = catalog.segments[segment]
        entry = catalog.find(edge.checkpoint)
        if edge.checkpoint not in promised and entry is not None:
            part.held[edge.checkpoint] = entry
    part.tags.update((name, node) for name, node in catalog.tags.items() if node in promised)


def lines_of(catalog: Catalog, terms: Iterable[int]) -> set[int]:
    """Return the terms, those that they continue from, and so on."""
    found: set[int] = set()
    waiting = list(terms)
    while waiting:
        number = waiting.pop()
        opened = catalog.terms.get(number)
        if opened is not None and number not in found:
            found.add(number)
            if opened.parent is not None:
                waiting.append(opened.parent.term)
    return found


def known_to(catalog: Catalog) -> Callable[[Node], bool]:
    """Return a function that tells whether a store has, or had, a checkpoint. A checkpoint it never had is newer."""

    def known(node: Node) -> bool:
        term, step = node
        if term != catalog.term:
            return term in catalog.terms  # an earlier term gets no more checkpoints
        return catalog.find(node) is not None or step in catalog.spent

    return known


def left_out(catalog: Catalog, part: Catalog, there: Catalog) -> dict[int, int]:
    """Return what a partial copy omits of the promised checkpoints, as term -> lowest omitted step.

    A term that already lacks steps in its source (a second tier, another such copy) lacks them in the copy as well.
    """
    nodes = [node for node in catalog.checkpoints if node not in part.checkpoints and there.find(node) is None]
    lacks = {term: step for term, opened in catalog.terms.items() if type(step := opened.extra.get(LACKS)) is int}
    for term, step in nodes:
        lacks[term] = min(step, lacks.get(term, step))
    return lacks


def _leads(catalog: Catalog, edge: Encoding) -> bool:
    """Tell whether an encoding is usable: its segments and its base exist."""
    if any(segment not in catalog.segments for segment in edge.segments):
        return False
    below = None if edge.base is None else catalog.find(edge.base.node)
    return edge.base is None or (below is not None and below.state == edge.base.state)
