"""Decides which checkpoints are drained to a remote, and which never are: pure functions of two catalogs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import pairwise

from ckptstore.formats.history.catalog import LACKS, REACHED, Catalog
from ckptstore.formats.history.records import Encoding, Node, ref_of
from ckptstore.maintenance.copies.copy_selection import part_of, with_paths
from ckptstore.write.second_tier import Lag

__all__ = ["drainable", "foreign_terms", "lag_between", "remote_holds", "remote_retired"]


def foreign_terms(here: Catalog, there: Catalog) -> list[int]:
    """Terms of the store that the remote lacks or has with another nonce, although it has later ones."""
    return [
        number
        for number, opened in here.terms.items()
        if number <= there.term and (number not in there.terms or there.terms[number].nonce != opened.nonce)
    ]


def remote_holds(here: Catalog, there: Catalog) -> Callable[[Node], bool]:
    """Make a function that says whether the remote holds a checkpoint of the store, and not another one of its name.

    A term of the store may have the same number as one that another machine opened in the remote, and a copy may be of
    a store that was edited by hand.
    """

    def holds(node: Node) -> bool:
        theirs, mine, opened = there.find(node), here.find(node), there.terms.get(node[0])
        if theirs is None or opened is None or not _same(here, node[0], opened.nonce):
            return False
        return mine is None or mine.state == theirs.state  # None: retired here; a term has each step once

    return holds


def remote_retired(here: Catalog, there: Catalog) -> Callable[[Node], bool]:
    """Make a function that says whether the remote had a checkpoint of the store and has retired it.

    Such a checkpoint is not drained again.

    In the remote's newest term every step is known. For an earlier term the remote's log says which step it had reached
    when the next term began, and which steps a drain had left out. A drain copies in the order of steps, so steps up to
    that one were there. If the log does not say, the checkpoint was not there: it stays in the store, and is reported.
    (One exception: later saves overtook a save, and then another machine continued the run before the next pass. The
    overtaken save is older than the checkpoint from which the run was continued, so it is taken for one that the remote
    had. The store keeps it as long as its own rules do.)

    If a term lacks steps, nothing from the first of them on counts as retired: a copy of a part promises the bases of
    that part, and retires them, although the remote never had them.
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
    """Earlier term -> the highest step of it that the remote had, as far as the following OPENs say.

    That a later term continued from a checkpoint proves nothing about the steps below it, nor about the checkpoint: a
    copied term may have been continued from a checkpoint of which only the name is there.
    """
    steps = {before: there.terms[number].extra.get(REACHED) for before, number in pairwise(sorted(there.terms))}
    return {term: step for term, step in steps.items() if type(step) is int}


def drainable(here: Catalog, there: Catalog, damaged: Set[str] = frozenset()) -> tuple[Catalog, tuple[Node, ...]]:
    """Choose what the remote will have -> its catalog, and the checkpoints that it never gets, ascending.

    Nothing is drained from `damaged` segments, nor checkpoints that cannot be restored without them. A term is still
    being written if it is the remote's newest, or newer. Checkpoints of earlier terms that the remote lacks are a
    branch: the run was continued without them. What the remote had and has retired (`remote_retired`) is neither.
    """
    whole = part_of(here, None)
    foreign = foreign_terms(here, there)
    live = set() if foreign else {number for number in here.terms if number >= there.term}
    gone, is_there = remote_retired(here, there), remote_holds(here, there)

    def given_up(node: Node) -> bool:
        """Whether the remote once promised this checkpoint and no longer does: a term has each step once."""
        return node not in there.checkpoints and (
            node in there.held or (node[0] == there.term and node[1] in there.spent)
        )

    def wanted(node: Node) -> bool:
        return (node[0] in live or is_there(node)) and not gone(node) and not given_up(node)

    def leads(edge: Encoding) -> bool:
        """Whether an encoding is in the remote, or may still be added to it, by a term that is being written."""
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
        """Whether no segment of it is damaged, and its base is not gone."""
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
    """`part` with these encodings only, and without the checkpoints that then have no chain."""
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
    """How far the remote is behind the store. It never gets the `damaged` segments."""
    part, branch = drainable(here, there, damaged)
    holds = remote_holds(here, there)
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
