"""Unite nodes that differ over the ranks, for a reader that is not one of the ranks (SPEC.md 3.3).

Containers of one kind are united member by member, at any depth. Where nodes cannot be united, the result is the first
node that contains a tensor, or if none does, the first node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats import jsontext
from ckptstore.formats.states.keys import identity
from ckptstore.formats.states.tree import MAX_DEPTH, tag_of, tensor_names

__all__ = ["union_of"]

_TENSOR: Final = "tensor"
_VALUE: Final = "value"
_MAPPINGS: Final = ("$dict", "$odict", "$counter")
_SEQUENCES: Final = ("$list", "$tuple")


def union_of(nodes: Sequence[Any], depth: int = 0) -> Any:
    """Return the union of nodes.

    Args:
        nodes: typed JSON of the ranks that have this node, in rank order; at least one. They contain no ``$ranks``.
        depth: number of arrays and objects around them.

    Raises:
        FormatError: a node is not what `state.flatten` writes.
    """
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    if len(nodes) == 1:
        return nodes[0]
    kinds = [_kind(node) for node in nodes]
    # Prevents: a tensor of one rank hidden by another rank's None at the same place.
    leads = 0 if len(set(kinds)) == 1 else next((at for at, node in enumerate(nodes) if tensor_names(node)), 0)
    kind, nodes = kinds[leads], [node for node, kind in zip(nodes, kinds, strict=True) if kind == kinds[leads]]
    if len(nodes) == 1:
        return nodes[0]
    if kind in _MAPPINGS:
        return _mapping(kind, nodes, depth)
    if kind in _SEQUENCES:
        return _sequence(kind, nodes, depth)
    return nodes[0]


def _kind(node: Any) -> str:
    """Return the kind of a node. Only nodes of one kind are united. Untagged ones count as ``$dict`` and ``$list``."""
    if isinstance(node, list):
        return "$list"
    if not isinstance(node, dict):
        return _VALUE
    tag = tag_of(node)
    if tag is None:
        return "$dict"
    if tag in ("$t", "$a"):
        return _TENSOR
    return tag if tag in (*_MAPPINGS, "$tuple") else _VALUE


def _mapping(kind: str, nodes: Sequence[Any], depth: int) -> Any:
    """Unite mappings: every key of any node, in order of appearance, with the union of its values."""
    bodies = [_body(kind, node) for node in nodes]
    if all(isinstance(body, dict) for body in bodies):
        rows: dict[str, list[Any]] = {}
        for body in bodies:
            for key, value in body.items():
                rows.setdefault(key, []).append(value)
        inner = depth + (1 if kind == "$dict" else 2)
        members = {key: union_of(values, inner) for key, values in rows.items()}
        return members if kind == "$dict" else {kind: members}
    pairs = _Pairs()
    for body in bodies:
        pairs.add(kind, body)
    return {kind: [[key, union_of(values, depth + 3)] for key, values in pairs.rows]}


def _body(kind: str, node: Any) -> Any:
    """Return the members of a mapping: an object, or a list that should contain pairs."""
    if tag_of(node) is None:
        return node
    return _list(kind, node[kind]) if kind == "$dict" else node[kind]


class _Pairs:
    """Keys that are not plain strings, with the values that the nodes have for each.

    Attributes:
        rows: (key, its values), in the order in which the keys were added.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Any, list[Any]]] = []
        self._by_text: dict[bytes, list[Any]] = {}
        self._by_key: dict[Any, list[Any]] = {}

    def add(self, kind: str, body: Any) -> None:
        """Add the members of one node."""
        seen: set[int] = set()
        for pair in body.items() if isinstance(body, dict) else _list(kind, body):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise FormatError(f"{kind} contains an entry that is not a [key, value] pair")
            values = self._values(pair[0])
            if id(values) in seen:
                raise FormatError(f"{kind} holds a key twice")
            seen.add(id(values))
            values.append(pair[1])

    def _values(self, key: Any) -> list[Any]:
        """Return the values of a key. The same key may be written in another form, such as 1 and true."""
        text = jsontext.dumps(key)
        found = self._by_text.get(text)
        if found is None:
            fresh: list[Any] = []
            found = self._by_text[text] = self._by_key.setdefault(identity(key), fresh)
            if found is fresh:
                self.rows.append((key, found))
        return found


def _sequence(kind: str, nodes: Sequence[Any], depth: int) -> Any:
    """Unite lists element by element, up to the longest. If all elements are values, return the first node."""
    bodies = [_list(kind, node if kind == "$list" else node["$tuple"]) for node in nodes]
    if all(_kind(element) == _VALUE for body in bodies for element in body):
        return nodes[0]
    columns = [[body[at] for body in bodies if at < len(body)] for at in range(max(map(len, bodies)))]
    elements = [union_of(column, depth + (1 if kind == "$list" else 2)) for column in columns]
    return elements if kind == "$list" else {kind: elements}


def _list(tag: str, body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise FormatError(f"the body of {tag} is not a list")
    return body
