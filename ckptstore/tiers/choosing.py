"""What of a store is to be brought to its remote, and what never will be: pure functions of two catalogs."""

from __future__ import annotations

from collections.abc import Iterable

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


def drainable(here: Catalog, there: Catalog) -> tuple[Catalog, tuple[Node, ...]]:
    """What the remote is to have in the end -> a catalog, and the checkpoints that it never gets, ascending.

    A term is still written to if it is the remote's newest, or newer. What the remote does not have of earlier ones is
    a branch: somebody continued the run without it.
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
    part.terms.update((number, opened) for number, opened in whole.terms.items() if number not in foreign)
    branch = sorted(node for node in whole.checkpoints if not wanted(node))
    return part, tuple(branch)


def _edges(catalog: Catalog) -> Iterable[Encoding]:
    return (edge for node in sorted(catalog.encodings) for edge in catalog.encodings[node])


def _leads_there(edge: Encoding, here: Catalog, there: Catalog, live: set[int]) -> bool:
    """Whether an encoding is in the remote, or may be added to it still: by a term that is written to."""
    if any((one.segments, one.base) == (edge.segments, edge.base) for one in there.encodings.get(edge.checkpoint, ())):
        return True
    return max(here.segments[segment].term for segment in edge.segments) in live


def lag_between(here: Catalog, there: Catalog, error: str | None = None) -> Lag:
    """How far the remote is behind the store."""
    part, branch = drainable(here, there)
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
