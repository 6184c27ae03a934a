"""Merge the trees of many ranks into one, which stores once whatever all ranks have in common (SPEC.md 3.3).

::

    {"$ranks": [[0, 1, 0, null], [node, node]]}     rank 0 and 2 have the first node, rank 1 the second, rank 3 has none

This object replaces a node that differs, as deep in the tree as possible. ``null`` means that a rank does not have this
member of a dict; nothing else may be missing. The nodes contain no ``$ranks``. `merge` makes such a tree of the ranks'
own trees. `of_rank` returns one rank's tree, or the union of all (`tree_union`). Everywhere else it is an ordinary
typed tree (`state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import jsontext
from ckptstore.formats.states.tree import MAX_DEPTH, OBJECT, paths, tensor_names
from ckptstore.formats.states.tree_union import union_of

__all__ = ["TAG", "left_out", "merge", "of_rank", "rank_count"]

TAG: Final = "$ranks"
_NODE_DEPTH: Final = 3  # an object and two arrays are around a node that differs
_GONE: Final = object()
_MAPPINGS: Final = ("$odict", "$counter")


def merge(trees: Sequence[Any]) -> Any:
    """Merge the trees of ranks 0, 1, ... into one. If all are equal, the result is that tree.

    Args:
        trees: typed JSON, as `state.flatten` writes it; at least one.

    Raises:
        UnsupportedStateError: values differ so deep in the state that ``$ranks`` would exceed `MAX_DEPTH`; or something
            that all ranks have in common is too deep for a reader that takes a rank's part.
    """
    distinct: dict[bytes, int] = {}
    columns = [distinct.setdefault(jsontext.dumps(tree), len(distinct)) for tree in trees]
    if len(distinct) == 1:
        return trees[0]
    first = [trees[columns.index(column)] for column in range(len(distinct))]
    merged = _Merger(columns).node(first, 0)
    # Prevents: a stored state that nobody can load. Taking a rank's part or the union also counts nesting in bodies.
    if _deepest(merged) > MAX_DEPTH:
        raise UnsupportedStateError(
            f"something is nested {MAX_DEPTH} deep or deeper in a state that differs over the ranks: no process could "
            "load it; reduce the nesting"
        )
    return merged


class _Merger:
    """Merges distinct trees. `columns` has, for each rank, the index of its tree."""

    def __init__(self, columns: Sequence[int]) -> None:
        self.columns = columns

    def node(self, nodes: Sequence[Any], depth: int) -> Any:
        """Merge one node from each tree; `_GONE` means that a tree does not have it."""
        texts = [None if node is _GONE else jsontext.dumps(node) for node in nodes]
        if len(set(texts)) == 1:
            return nodes[0]
        merged = _GONE if None in texts else self.container(nodes, depth)
        return self.per_rank(nodes, texts, depth) if merged is _GONE else merged

    def container(self, nodes: Sequence[Any], depth: int) -> Any:
        """Merge containers of the same shape member by member; `_GONE` if their shapes differ."""
        if all(isinstance(node, list) for node in nodes):
            return self.elements(nodes, depth)
        if not all(isinstance(node, dict) for node in nodes):
            return _GONE
        tags = {_tag(node) for node in nodes}
        if len(tags) > 1:
            return _GONE
        (tag,) = tags
        if tag is None:
            return self.members(nodes, depth)
        bodies = [node[tag] for node in nodes]
        if tag == "$tuple":
            found = self.elements(bodies, depth + 1)
        elif tag in _MAPPINGS and all(isinstance(body, dict) for body in bodies):
            found = self.members(bodies, depth + 1)
        elif tag in ("$dict", *_MAPPINGS) and all(isinstance(body, list) for body in bodies):
            found = self.pairs(bodies, depth + 1)
        elif tag == OBJECT and len({jsontext.dumps([body[0], *body[2:]]) for body in bodies}) == 1:
            kind, _, *name = bodies[0]
            found = [kind, self.node([body[1] for body in bodies], depth + 2), *name]
        else:
            return _GONE
        return _GONE if found is _GONE else {tag: found}

    def elements(self, bodies: Sequence[list[Any]], depth: int) -> Any:
        if len({len(body) for body in bodies}) > 1:
            return _GONE
        return [self.node(list(column), depth + 1) for column in zip(*bodies, strict=True)]

    def members(self, bodies: Sequence[Mapping[str, Any]], depth: int) -> Any:
        """Merge members in an order that preserves each rank's own order; `_GONE` if there is none."""
        keys = list(dict.fromkeys(key for body in bodies for key in body))
        if any([key for key in keys if key in body] != list(body) for body in bodies):
            return _GONE
        return {key: self.node([body.get(key, _GONE) for body in bodies], depth + 1) for key in keys}

    def pairs(self, bodies: Sequence[list[Any]], depth: int) -> Any:
        """Merge pairs if all have the same keys in the same order, else return `_GONE`."""
        if len({jsontext.dumps([key for key, _ in body]) for body in bodies}) > 1:
            return _GONE
        columns = zip(*bodies, strict=True)
        return [[column[0][0], self.node([value for _, value in column], depth + 2)] for column in columns]

    def per_rank(self, nodes: Sequence[Any], texts: Sequence[bytes | None], depth: int) -> dict[str, Any]:
        """Return a ``$ranks`` object. Equal nodes are stored once, in the order of the first rank that has them."""
        rows: dict[bytes, int] = {}
        kept: list[Any] = []
        places: list[int | None] = []
        for column in self.columns:
            text = texts[column]
            if text is None:
                places.append(None)
                continue
            place = rows.setdefault(text, len(kept))
            if place == len(kept):
                kept.append(nodes[column])
            places.append(place)
        if depth + _NODE_DEPTH + max(map(_depth, kept)) > MAX_DEPTH:
            raise UnsupportedStateError("values that differ over the ranks are nested too deep")
        return {TAG: [places, kept]}


def _deepest(tree: Any) -> int:
    """Return the largest number of arrays and objects around anything in a merged tree, as `_of_rank` counts.

    Nodes that differ over the ranks are not visited: `_Merger.per_rank` bounds them.
    """
    deepest, waiting = 0, [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(node, list):
            waiting.extend((element, depth + 1) for element in node)
        elif isinstance(node, dict) and _tag(node) != TAG:
            waiting.extend((member, depth + 1) for member in node.values())
    return deepest


def _depth(node: Any) -> int:
    """Return how deep arrays and objects are nested, including the node itself."""
    deepest, waiting = 0, [(node, 1)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, dict | list):
            deepest = max(deepest, depth)
            members = found.values() if isinstance(found, dict) else found
            waiting.extend((member, depth + 1) for member in members)
    return deepest


def rank_count(tree: Any) -> int | None:
    """Return the number of ranks of a tree; None if nothing in it differs over ranks.

    Raises:
        FormatError: an invalid ``$ranks``, or several with different numbers of ranks.
    """
    counts: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            if _tag(node) == TAG:
                places, nodes = _checked(node[TAG])
                counts.add(len(places))
                waiting.extend(nodes)
            else:
                waiting.extend(node.values())
    if len(counts) > 1:
        raise FormatError(f"state tree: {TAG} of {min(counts)} and of {max(counts)} ranks")
    return counts.pop() if counts else None


def of_rank(tree: Any, rank: int | None) -> Any:
    """Return the tree of one rank, or the union of all.

    Args:
        tree: the result of `merge`, from an untrusted source. A tree without ``$ranks`` is the tree of every rank.
        rank: the rank; if the tree has fewer ranks, `rank` modulo their number. None: the union of all ranks
            (`tree_union.union_of`), whatever the order of their keys. Where values differ, it has the first rank's.

    Raises:
        FormatError: an invalid ``$ranks``; one inside another; or a rank lacks something other than a member of a dict.
        ValueError: `rank` is negative.
    """
    if rank is not None and rank < 0:
        raise ValueError(f"rank {rank}")
    if rank_count(tree) is None:
        return tree
    try:
        found = _of_rank(tree, rank, 0)
    except RecursionError as error:
        raise FormatError("state tree nested too deep for the calling stack") from error
    return _present(found)


def _of_rank(node: Any, rank: int | None, depth: int, *, inside: bool = False) -> Any:
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        return [_present(_of_rank(element, rank, depth + 1, inside=inside)) for element in node]
    if not isinstance(node, dict):
        return node
    if _tag(node) != TAG:
        members = ((key, _of_rank(member, rank, depth + 1, inside=inside)) for key, member in node.items())
        if _tag(node) is not None:
            return {key: _present(member) for key, member in members}
        return {key: member for key, member in members if member is not _GONE}
    if inside:
        raise FormatError(f"state tree: {TAG} within {TAG}")
    places, nodes = _checked(node[TAG])
    wanted = dict.fromkeys(places if rank is None else [places[rank % len(places)]])
    found = [_of_rank(nodes[one], rank, depth + _NODE_DEPTH, inside=True) for one in wanted if one is not None]
    return union_of(found, depth) if found else _GONE


def left_out(tree: Any, union: Any = None) -> list[str]:
    """Return the tensors that are lost when a reader takes the union of all ranks, in tree order.

    The union (`of_rank`) neither names them nor has another rank's tensor in their place.

    Args:
        tree: the tree of all ranks.
        union: the union of `tree`, if it was computed already.

    Raises:
        FormatError: see `of_rank`.
    """
    if rank_count(tree) is None:
        return []
    shown = set(tensor_names(of_rank(tree, None) if union is None else union))
    missing = [name for name in tensor_names(tree) if name not in shown]
    waiting = [tree] if missing else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict) and _tag(node) != TAG:
            waiting.extend(node.values())
        elif isinstance(node, dict):
            places, nodes = _checked(node[TAG])
            used = [nodes[one] for one in dict.fromkeys(places) if one is not None]
            there = {path for path, _ in paths(union_of(used))} if used else set()
            shown.update(name for one in used for path, name in paths(one) if path in there)
    return [name for name in missing if name not in shown]


def _present(node: Any) -> Any:
    if node is _GONE:
        raise FormatError(f"state tree: {TAG} leaves out something that is not a member of a dict")
    return node


def _checked(body: Any) -> tuple[list[int | None], list[Any]]:
    if not (isinstance(body, list) and len(body) == 2 and all(isinstance(part, list) and part for part in body)):
        raise FormatError(f"state tree: {TAG} is not [[place, ...], [node, ...]]")
    places, nodes = body
    if not all(place is None or (type(place) is int and 0 <= place < len(nodes)) for place in places):
        raise FormatError(f"state tree: {TAG} names a node that it does not have")
    return places, nodes


def _tag(node: Mapping[str, Any]) -> str | None:
    """Return the tag of a tagged node, None for a plain dict."""
    if len(node) == 1:
        (key,) = node
        return key if key[:1] == "$" else None
    return None
