"""What of a store is to be brought to its remote, and what never will be: pure functions of two catalogs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import pairwise

from ckptstore.formats.catalog import LACKS, REACHED, Catalog
from ckptstore.formats.records import Encoding, Node, ref_of
from ckptstore.maintenance.copies.copy_selection import part_of, with_paths
from ckptstore.write.second_tier import Lag

__all__ = ["drainable", "foreign_terms", "holding", "lag_between", "pruned"]


def foreign_terms(here: Catalog, there: Catalog) -> list[int]:
    """Terms of the store that the remote does not have, or has as another's, although it has later ones."""
    return [
        number
        for number, opened in here.terms.items()
        if number <= there.term and (number not in there.terms or there.terms[number].nonce != opened.nonce)
    ]


def holding(here: Catalog, there: Catalog) -> Callable[[Node], bool]:
    """Says of a checkpoint of the store whether the remote holds it, and not another one of that name.

    A term of the store's own may have the number of one that another machine opened in the remote, and a copy may have
    been made of a store that was changed by hand.
    """

    def holds(node: Node) -> bool:
        theirs, mine, opened = there.find(node), here.find(node), there.terms.get(node[0])
        if theirs is None or opened is None or not _same(here, node[0], opened.nonce):
            return False
        return mine is None or mine.state == theirs.state  # which is retired here: a term has each step once

    return holds


def pruned(here: Catalog, there: Catalog) -> Callable[[Node], bool]:
    """Says of a checkpoint of the store whether the remote had it, and has retired it since: it never gets it again.

    Of the remote's newest term each step is known; of an earlier one, how far it had come when the next term began,
    short of what a drain had left out. A drain goes by steps, so what is not above that was there. Where nothing says
    so it was not: then it stays here, and is named. (But for a save that was overtaken by later ones, on a machine that
    then lost the run to another before the next pass: it is older than what that continued from, and is taken for one
    that was there. The store keeps it as long as its own rules do.)

    Of a term that lacks something nothing is taken for gone from there on: a copy of a part promises what that builds
    on, and retires it, though nobody ever had it there.
    """
    shared = {number for number, opened in there.terms.items() if _same(here, number, opened.nonce)}
    reached = _reached(there)

    def gone(node: Node) -> bool:
        term, step = node
        if term not in shared or node in there.checkpoints:
            return False
        lacks = there.terms[term].extra.get(LACKS)
        if type(lacks) is int and step >= lacks:
            return False
        if node in there.held:
            return True
        return step in there.spent if term == there.term else step <= reached.get(term, -1)

    return gone


def _same(here: Catalog, number: int, nonce: str) -> bool:
    return number in here.terms and here.terms[number].nonce == nonce


def _reached(there: Catalog) -> dict[int, int]:
    """Earlier term -> up to which step it was there, as far as the OPENs behind say.

    That a later term continued from a checkpoint proves nothing of those below it, nor of itself: of what a copied term
    continued from there may be no more than the name.
    """
    steps = {before: there.terms[number].extra.get(REACHED) for before, number in pairwise(sorted(there.terms))}
    return {term: step for term, step in steps.items() if type(step) is int}


def drainable(here: Catalog, there: Catalog, damaged: Set[str] = frozenset()) -> tuple[Catalog, tuple[Node, ...]]:
    """What the remote is to have in the end -> a catalog, and the checkpoints that it never gets, ascending.

    Of segments that are `damaged` nothing is wanted, nor of what cannot be restored without them. A term is still
    written to if it is the remote's newest, or newer. What the remote does not have of earlier ones is a branch:
    somebody continued the run without it. What the remote had and has retired (`pruned`) is neither.
    """
    whole = part_of(here, None)
    foreign = foreign_terms(here, there)
    live = set() if foreign else {number for number in here.terms if number >= there.term}
    gone, is_there = pruned(here, there), holding(here, there)

    def given_up(node: Node) -> bool:
        """Whether it was promised there and is not any more: a term has each step once."""
        return node not in there.checkpoints and (
            node in there.held or (node[0] == there.term and node[1] in there.spent)
        )

    def wanted(node: Node) -> bool:
        return (node[0] in live or is_there(node)) and not gone(node) and not given_up(node)

    def leads(edge: Encoding) -> bool:
        """Whether an encoding is in the remote, or may be added to it still: by a term that is written to."""
        if _is_there(edge, there):
            return is_there(edge.checkpoint)
        newest = max(here.segments[segment].term for segment in edge.segments)
        return newest in live and wanted(edge.checkpoint) and there.dropped.isdisjoint(edge.segments)

    absent = {
        node
        for node in (*whole.checkpoints, *whole.held)
        if there.find(node) is None and (gone(node) or (node[0] in live and given_up(node)))
    }

    def sound(edge: Encoding) -> bool:
        """Whether nothing of it is damaged, and what it builds on is not gone."""
        return damaged.isdisjoint(edge.segments) and (edge.base is None or edge.base.node not in absent)

    part = Catalog(term=whole.term, keep=whole.keep, keep_seq=whole.keep_seq)
    nodes = [node for node in whole.checkpoints if wanted(node)]
    with_paths(part, here, nodes, [edge for edge in _edges(whole) if leads(edge)])
    if absent or not damaged.isdisjoint(part.segments):
        part = _with_only(part, here, [edge for edge in _edges(part) if sound(edge)])
    part.terms.update((number, opened) for number, opened in whole.terms.items() if number not in foreign)
    branch = sorted(node for node in whole.checkpoints if not wanted(node) and not gone(node))
    return part, tuple(branch)


def _with_only(part: Catalog, here: Catalog, sound: list[Encoding]) -> Catalog:
    """`part` with no other encodings than these, and without what then has no chain."""
    fewer = Catalog(term=part.term, keep=part.keep, keep_seq=part.keep_seq)
    with_paths(fewer, here, part.checkpoints, sound)
    entries = {**fewer.checkpoints, **fewer.held}
    whole = {node for node, entry in entries.items() if fewer.restorable(entry.id)}
    left = Catalog(term=part.term, keep=part.keep, keep_seq=part.keep_seq)
    edges = [edge for edge in sound if edge.checkpoint in whole and (edge.base is None or edge.base.node in whole)]
    with_paths(left, here, [node for node in part.checkpoints if node in whole], edges)
    return left


def _edges(catalog: Catalog) -> Iterable[Encoding]:
    return (edge for node in sorted(catalog.encodings) for edge in catalog.encodings[node])


def _is_there(edge: Encoding, there: Catalog) -> bool:
    known = there.encodings.get(edge.checkpoint, ())
    return any((one.segments, one.base) == (edge.segments, edge.base) for one in known)


def lag_between(here: Catalog, there: Catalog, error: str | None = None, damaged: Set[str] = frozenset()) -> Lag:
    """How far the remote is behind the store, whose segments that are `damaged` it never gets."""
    part, branch = drainable(here, there, damaged)
    holds = holding(here, there)
    left = [node for node in part.checkpoints if not holds(node)]
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
