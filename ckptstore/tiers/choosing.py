"""What of a store is to be brought to its remote, and what never will be: pure functions of two catalogs."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import Encoding, Node, ref_of
from ckptstore.maintenance.copies.choosing import part_of, with_paths
from ckptstore.write.second_tier import Lag

__all__ = ["drainable", "foreign_terms", "lag_between"]


def foreign_terms(here: Catalog, there: Catalog) -> list[int]:
    """Terms of the store that the remote does not have, or has as another's, although it has later ones."""
    return [
        number
        for number, opened in here.terms.items()
        if number <= there.term and (number not in there.terms or there.terms[number].nonce != opened.nonce)
    ]


def drainable(here: Catalog, there: Catalog, damaged: Set[str] = frozenset()) -> tuple[Catalog, tuple[Node, ...]]:
    """What the remote is to have in the end -> a catalog, and the checkpoints that it never gets, ascending.

    Of segments that are `damaged` nothing is wanted, nor of what cannot be restored without them. A term is still
    written to if it is the remote's newest, or newer. What the remote does not have of earlier ones is a branch:
    somebody continued the run without it.
    """
    whole = part_of(here, None)
    foreign = foreign_terms(here, there)
    live = set() if foreign else {number for number in here.terms if number >= there.term}

    def is_there(node: Node) -> bool:
        mine, theirs = here.find(node), there.find(node)
        return mine is not None and theirs is not None and mine.state == theirs.state

    def wanted(node: Node) -> bool:
        return node[0] in live or is_there(node)

    part = Catalog(term=whole.term, keep=whole.keep, keep_seq=whole.keep_seq)
    nodes = [node for node in whole.checkpoints if wanted(node)]
    edges = [edge for edge in _edges(whole) if wanted(edge.checkpoint) and _leads_there(edge, here, there, live)]
    with_paths(part, here, nodes, edges)
    if not damaged.isdisjoint(part.segments):
        part = _without(part, here, damaged)
    part.terms.update((number, opened) for number, opened in whole.terms.items() if number not in foreign)
    branch = sorted(node for node in whole.checkpoints if not wanted(node))
    return part, tuple(branch)


def _without(part: Catalog, here: Catalog, damaged: Set[str]) -> Catalog:
    """`part` without segments that are damaged, and without what then has no chain."""
    fewer = Catalog(term=part.term, keep=part.keep, keep_seq=part.keep_seq)
    sound = [edge for edge in _edges(part) if damaged.isdisjoint(edge.segments)]
    with_paths(fewer, here, part.checkpoints, sound)
    entries = {**fewer.checkpoints, **fewer.held}
    whole = {node for node, entry in entries.items() if fewer.restorable(entry.id)}
    left = Catalog(term=part.term, keep=part.keep, keep_seq=part.keep_seq)
    edges = [edge for edge in sound if edge.checkpoint in whole and (edge.base is None or edge.base.node in whole)]
    with_paths(left, here, [node for node in part.checkpoints if node in whole], edges)
    return left


def _edges(catalog: Catalog) -> Iterable[Encoding]:
    return (edge for node in sorted(catalog.encodings) for edge in catalog.encodings[node])


def _leads_there(edge: Encoding, here: Catalog, there: Catalog, live: set[int]) -> bool:
    """Whether an encoding is in the remote, or may be added to it still: by a term that is written to."""
    if any((one.segments, one.base) == (edge.segments, edge.base) for one in there.encodings.get(edge.checkpoint, ())):
        return True
    return max(here.segments[segment].term for segment in edge.segments) in live


def lag_between(here: Catalog, there: Catalog, error: str | None = None, damaged: Set[str] = frozenset()) -> Lag:
    """How far the remote is behind the store, whose segments that are `damaged` it never gets."""
    part, branch = drainable(here, there, damaged)
    left = [node for node in part.checkpoints if there.find(node) is None]
    newest = max(left, default=None)
    have = max((node[1] for node in there.checkpoints if newest and node[0] == newest[0]), default=None)
    if newest is not None and have is None:
        opened = here.terms[newest[0]]
        have = opened.parent.step if opened.parent is not None else 0
    return Lag(
        len(left),
        0 if newest is None else max(0, newest[1] - (have or 0)),
        sum(entry.size for name, entry in part.segments.items() if name not in there.segments),
        tuple(ref_of(node) for node in branch),
        error,
    )
