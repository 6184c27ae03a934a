"""Walks the typed JSON tree of a state for display: children by name, leaves as Python would print them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ckptstore.formats import jsontext
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.registered_types import Foreign
from ckptstore.formats.states.state import tensor_names, unflatten
from ckptstore.formats.states.state_objects import WHOLE, check
from ckptstore.formats.states.tree import OBJECT, object_parts

__all__ = ["children", "is_tensor", "leaves", "text"]

_SEQUENCES: Final = ("$tuple",)
_MAPPINGS: Final = ("$dict", "$odict", "$counter")


def is_tensor(node: Any) -> bool:
    """Tell whether a node of the tree stands for a tensor."""
    return isinstance(node, dict) and len(node) == 1 and ("$t" in node or "$a" in node)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return (key or index, child) of a container, in order, or (rank, child) if ranks differ; None for a leaf."""
    if isinstance(node, list):
        return [(str(index), child) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return None
    tag = next(iter(node)) if len(node) == 1 else ""
    if tag == rank_trees.TAG:
        places, nodes = node[tag]
        return [(f"rank {rank}", nodes[place]) for rank, place in enumerate(places) if place is not None]
    if tag in _SEQUENCES:
        return children(node[tag])
    if tag == OBJECT:
        kind, parts, _name = object_parts(node[tag])
        return None if kind in WHOLE and not tensor_names(parts) else children(parts)
    if tag in _MAPPINGS:
        body = node[tag]
        if isinstance(body, dict):
            return list(body.items())
        return [(key if isinstance(key, str) else text(key), child) for key, child in body]
    return None if tag.startswith("$") else list(node.items())


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, node) of every leaf except tensors, in order; keys are joined by dots. Includes empty containers.

    A leaf that differs between ranks is yielded once for each rank that has it, with a path that ends with ``rank R``.
    This holds at whatever level of the tree the ranks differ (the level depends on the order of their keys).

    Raises:
        FormatError: the tree is malformed.
    """
    rank_trees.rank_count(tree)  # raises if a ``$ranks`` node is malformed
    return _leaves(tree, "")


def _leaves(tree: Any, start: str) -> Iterator[tuple[str, Any]]:
    stack: list[tuple[str, Any]] = [(start, tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict) and list(node) == [rank_trees.TAG]:
            yield from _rank_leaves(node, path)
            continue
        members = children(node)
        if not members:
            if not is_tensor(node):
                yield path, node
            continue
        stack.extend((f"{path}.{key}" if path else key, child) for key, child in reversed(members))


def _rank_leaves(node: Any, start: str) -> Iterator[tuple[str, Any]]:
    """Yield the `leaves` of a node that differs between ranks."""
    places, nodes = node[rank_trees.TAG]
    own = [dict(_leaves(one, start)) for one in nodes]
    for path in dict.fromkeys(path for place in places if place is not None for path in own[place]):
        having = [
            (rank, own[place][path]) for rank, place in enumerate(places) if place is not None and path in own[place]
        ]
        if len(having) == len(places) and len({jsontext.dumps(leaf) for _, leaf in having}) == 1:
            yield path, having[0][1]
        else:
            yield from ((f"{path}.rank {rank}" if path else f"rank {rank}", leaf) for rank, leaf in having)


class _Name(str):
    """A string that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shown(kind: str, value: Any, name: str) -> Any:
    """An object for people: of a type that is not made here, its name and its parts."""
    made = check(kind, value, name)
    return _Name(f"{name or kind}({value!r})") if isinstance(made, Foreign) else made


def text(node: Any, width: int = 72) -> str:
    """Format a leaf as Python prints the value, shortened to `width` characters."""
    value = unflatten(
        node,
        lambda name, _origin: _Name(f"<tensor {name}>"),
        {
            "$size": lambda sizes: _Name(f"torch.Size({sizes})"),
            "$dtype": lambda name: _Name(f"torch.{name}"),
            "$device": lambda name: _Name(f"device({name!r})"),
        },
        _shown,
    )
    shown = repr(value)
    if len(shown) <= width:
        return shown
    many = f" ({len(value)} in all)" if isinstance(value, list | tuple | bytes | bytearray | set | frozenset) else ""
    return f"{shown[: width - 1 - len(many)]}…{many}"
