"""Convert nested training state to a typed JSON tree and named tensors.

The tree is normative: it defines the values, containers and tensors of the state, their places and their order. Values
have the forms of `values`; containers and tensors have these:

=============================  ============================================================================
``[...]``                      list
``{"key": ...}``               dict whose keys are all strings, none beginning with ``$``; order kept
``{"$dict": [[k, v], ...]}``   any other dict; keys are values (except bytearray) or tuples of them
``{"$odict": ...}``            `OrderedDict`; its members in one of the two forms above
``{"$counter": ...}``          `Counter`, likewise
``{"$tuple": [...]}``          tuple
``{"$set": [...]}``            set of values, tuples and frozensets, sorted by their JSON text; ``$frozenset`` likewise
``{"$t": name}``               torch tensor; ``{"$a": name}``: numpy array
``{"$size": [...]}``           `torch.Size`; ``{"$dtype": "float32"}``; ``{"$device": "cuda:0"}``
``{"$object": [kind, node]}``  an object of another type, taken apart (`state_objects`); a name may follow the node
=============================  ============================================================================

Types are exact: a subclass of a stored type would be restored as another type. It is refused, unless `state_objects` or
a registration knows it.
Tied tensors (equal `TensorSource.identity`) have one name. A container at two places becomes two containers.

The text of a tree has at most `TREE_LIMIT` bytes, because it is stored in a segment's header, beside the tensor names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats import jsontext
from ckptstore.formats.segment_files.layout import HEADER_LIMIT
from ckptstore.formats.sources import NumpySource, Origin, TensorSource
from ckptstore.formats.states import values
from ckptstore.formats.states.keys import holds_nan
from ckptstore.formats.states.names import flat_names
from ckptstore.formats.states.object_parts import Parts
from ckptstore.formats.states.registered_types import by_type
from ckptstore.formats.states.state_objects import take_apart
from ckptstore.formats.states.tree import (
    MAX_DEPTH,
    Resolve,
    TensorPlace,
    paths,
    places,
    select,
    select_places,
    tensor_count,
    tensor_names,
    unflatten,
)
from ckptstore.formats.states.unsupported_objects import advice

__all__ = [
    "MAX_DEPTH",
    "TREE_LIMIT",
    "FlatState",
    "NumpySource",
    "Origin",
    "Parts",
    "Recognise",
    "Resolve",
    "Tagged",
    "TensorPlace",
    "TensorSource",
    "check_size",
    "flatten",
    "paths",
    "places",
    "select",
    "select_places",
    "tensor_count",
    "tensor_names",
    "unflatten",
]

TREE_LIMIT: Final = HEADER_LIMIT // 4 - (64 << 10)
"""Largest JSON text of a tree in bytes. Escaped inside a header it may double; half a header is for tensor names."""
_LETTER_BYTES: Final = 12
"""Maximum bytes of JSON text for one letter."""
_VALUE_LETTERS: Final = 8
"""Letters counted for any short value, including its tag and punctuation."""
_MANY: Final = 100_000
_DEEPEST: Final = MAX_DEPTH - 3  # the members of a container are at most three levels below it
_MAPPINGS: Final[dict[type, str]] = {OrderedDict: "$odict", Counter: "$counter"}
_SETS: Final[dict[type, str]] = {set: "$set", frozenset: "$frozenset"}


@dataclass(frozen=True, slots=True)
class Tagged:
    """A value with its own tag, as returned by `recognise`: ``$size``, ``$dtype`` or ``$device``."""

    tag: str
    value: list[int] | str


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as a tree and its tensors.

    Attributes:
        tree: typed JSON.
        tensors: name -> source, in the order of the tree (access order); each tied tensor once.
    """

    tree: Any
    tensors: dict[str, TensorSource]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(source.nbytes for source in self.tensors.values())


Recognise = Callable[[object], "TensorSource | Tagged | Parts | None"]


def flatten(state: Any, recognise: Recognise | None = None) -> FlatState:
    """Convert a state to a tree and named tensors. Copies no tensor.

    Args:
        state: nested dicts, lists, tuples, sets, tensors and values.
        recognise: called for every object that is not of a built-in or registered type, before numpy arrays are
            recognized. It returns the object's source, its tagged form, its parts, or None.

    Raises:
        UnsupportedStateError: an object of another type; a tensor that cannot be stored; a state that is nested too
            deep or contains itself, or whose tree exceeds `TREE_LIMIT`. Names the key path and says what to store
            instead.
    """
    walk = _Flattener(recognise)
    try:
        tree = walk.node(state, 0)
    except (UnsupportedStateError, RecursionError) as error:
        where = "state" + "".join(f"[{key!r:.80}]" for key in walk.path)
        what = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UnsupportedStateError(f"{where:.1000}: {what}") from error
    tensors: dict[str, TensorSource] = {}
    for name, source, nodes in zip(flat_names(walk.paths), walk.sources, walk.nodes, strict=True):
        tensors[name] = source
        walk.letters += len(name) * len(nodes)
        for node in nodes:
            node["$t" if source.origin == "torch" else "$a"] = name
    if _LETTER_BYTES * walk.letters > TREE_LIMIT:
        check_size(tree)
    return FlatState(tree, tensors)


def check_size(tree: Any) -> None:
    """Raise `UnsupportedStateError` if a tree exceeds `TREE_LIMIT`. The error names the largest part and its path."""
    length = len(jsontext.dumps(tree))
    if length <= TREE_LIMIT:
        return
    where, largest = "state", length
    while 0 < len(members := _members(tree)) < _MANY:
        size, key, tree = max(((len(jsontext.dumps(member)), key, member) for key, member in members), key=_first)
        if 2 * size < largest:  # many members, and none of them is the main cause
            break
        where, largest = where + key, size
    raise UnsupportedStateError(
        f"{where:.1000}: takes {largest / 1e6:.1f} MB as text; everything in a state except its tensors may take "
        f"{TREE_LIMIT / 1e6:.1f} MB: store it as a tensor (of text, its bytes in a uint8 array), or elsewhere"
    )


def _first(row: tuple[int, str, Any]) -> int:
    return row[0]


def _members(tree: Any) -> list[tuple[str, Any]]:
    """Return the members of a container as (path text, tree); none for a value."""
    if isinstance(tree, list):
        return [(f"[{index}]", member) for index, member in enumerate(tree)]
    if not isinstance(tree, dict):
        return []
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if tag[:1] != "$":
        return [(f"[{key!r:.80}]", member) for key, member in tree.items()]
    if tag == "$tuple" or isinstance(tree[tag], dict):
        return _members(tree[tag])
    if tag == "$object":
        return _members(tree[tag][1])
    if tag in ("$dict", "$odict", "$counter"):
        return [(f"[{key!r:.80}]", member) for key, member in tree[tag]]
    return []


class _Flattener:
    """One walk over a state. `path` is the current path; after an error it is where the walk stopped."""

    def __init__(self, recognise: Recognise | None) -> None:
        self.recognise = recognise
        self.path: list[object] = []
        self.seen: dict[Any, int] = {}  # identity -> index into the three lists below
        self.sources: list[TensorSource] = []
        self.paths: list[tuple[object, ...]] = []
        self.nodes: list[list[dict[str, str]]] = []  # all nodes of each tensor; names are assigned at the end
        self.letters = 0  # the tree's text has at most `_LETTER_BYTES` bytes for each

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _CONTAINERS:
            _check_depth(depth)
            return self.container(value, kind, depth)
        encoded = values.encode(value)
        if encoded is not NotImplemented:
            return self.counted(encoded)
        found: TensorSource | Tagged | Parts | None = take_apart(value) if by_type(kind) is not None else None
        if found is None and self.recognise:
            found = self.recognise(value)
        if isinstance(found, Tagged):
            return self.counted({found.tag: found.value})
        if found is None:
            found = take_apart(value)
        if isinstance(found, Parts):
            return self.object(found, depth)
        if found is None and kind is np.ndarray:
            found = NumpySource(value)
        if found is None:
            raise UnsupportedStateError(f"{kind.__module__}.{kind.__qualname__} cannot be stored: {advice(value)}")
        return self.tensor(found)

    def counted(self, node: Any) -> Any:
        """Return the node of a value and add its letters to `letters`."""
        self.letters += _VALUE_LETTERS
        if type(node) is str:
            self.letters += len(node)
        elif type(node) is dict:  # a tag and its body
            self.letters += sum(map(len, node.values()))
        return node

    def tensor(self, source: TensorSource) -> dict[str, str]:
        node: dict[str, str] = {}
        self.letters += _VALUE_LETTERS
        index = self.seen.setdefault(source.identity, len(self.sources))
        if index == len(self.sources):
            self.sources.append(source)
            self.paths.append(tuple(self.path))
            self.nodes.append([])
        self.nodes[index].append(node)
        return node

    def object(self, parts: Parts, depth: int) -> dict[str, list[Any]]:
        """Return the node of an object that was taken apart. Its parts have the object's own path."""
        _check_depth(depth)
        self.letters += _VALUE_LETTERS + len(parts.kind) + len(parts.name)
        if not values.is_plain_text(parts.name):
            raise UnsupportedStateError(f"the name {parts.name!r:.80} of a type has a lone surrogate")
        return {"$object": [parts.kind, self.node(parts.value, depth + 2), *([parts.name] if parts.name else [])]}

    def container(self, value: Any, kind: type, depth: int) -> Any:
        self.letters += _VALUE_LETTERS
        if kind is dict:
            if _is_plain(value):
                return self.members(value, depth + 1)
            return {"$dict": self.pairs(value, depth + 3)}
        if kind in (list, tuple) and (packed := values.pack_integers(value)) is not None:
            self.letters += len(packed["$ints"][2])
            return packed
        if kind is list:
            return self.elements(value, depth + 1)
        if kind is tuple:
            return {"$tuple": self.elements(value, depth + 2)}
        if kind in _SETS:
            return self.measured(_element(value, depth))
        body = self.members(value, depth + 2) if _is_plain(value) else self.pairs(value, depth + 3)
        return {_MAPPINGS[kind]: body}

    def measured(self, node: Any) -> Any:
        """Return a node that was built elsewhere and add its letters to `letters`."""
        self.letters += len(jsontext.dumps(node))
        return node

    def elements(self, value: Iterable[Any], depth: int) -> list[Any]:
        found = []
        for index, element in enumerate(value):
            if values.is_literal(element):
                found.append(self.counted(element))
                continue
            self.path.append(index)
            found.append(self.node(element, depth))
            self.path.pop()
        return found

    def members(self, value: dict[str, Any], depth: int) -> dict[str, Any]:
        found = {}
        for key, member in value.items():
            self.letters += len(key)
            if values.is_literal(member):
                found[key] = self.counted(member)
                continue
            self.path.append(key)
            found[key] = self.node(member, depth)
            self.path.pop()
        return found

    def pairs(self, value: dict[Any, Any], depth: int) -> list[list[Any]]:
        found = []
        for key, member in value.items():
            self.path.append(key)
            count = self.measured if type(key) is tuple else self.counted
            found.append([count(_key(key, depth)), self.node(member, depth)])
            self.path.pop()
        _check_distinct([node for key, (node, _) in zip(value, found, strict=True) if holds_nan(key)], "keys")
        return found


_CONTAINERS: Final = frozenset({dict, list, tuple, *_MAPPINGS, *_SETS})


def _is_plain(mapping: dict[Any, Any]) -> bool:
    """Whether a JSON object can store it: all keys are strings, and none looks like a tag."""
    if not set(map(type, mapping)) <= {str}:
        return False
    text = "".join(mapping)
    return values.is_plain_text(text) and ("$" not in text or all(key[:1] != "$" for key in mapping))


def _check_depth(depth: int) -> None:
    if depth > _DEEPEST:
        raise UnsupportedStateError(f"nested deeper than {_DEEPEST}, or a container that contains itself")


def _key(key: Any, depth: int) -> Any:
    if type(key) is tuple:
        _check_depth(depth)
        return {"$tuple": [_key(part, depth + 2) for part in key]}
    encoded = NotImplemented if type(key) is bytearray else values.encode(key)
    if encoded is NotImplemented:
        raise UnsupportedStateError(f"a {type(key).__qualname__} as key or set element cannot be stored: {advice(key)}")
    return encoded


def _check_distinct(nodes: list[Any], what: str) -> None:
    """Raise `UnsupportedStateError` if two nodes that contain a NaN have the same text.

    Prevents: two keys that a reader takes for one. Python distinguishes them because they are two objects.
    """
    if len(nodes) > 1 and len({jsontext.dumps(node) for node in nodes}) < len(nodes):
        raise UnsupportedStateError(f"two {what} are the same NaN: nothing tells them apart; store them in a list")


def _element(value: Any, depth: int) -> Any:
    if type(value) in _SETS:
        _check_depth(depth)
        parts = [(part, _element(part, depth + 2)) for part in value]
        _check_distinct([node for part, node in parts if holds_nan(part)], "elements of a set")
        return {_SETS[type(value)]: sorted((node for _, node in parts), key=jsontext.dumps)}
    if type(value) is tuple:
        _check_depth(depth)
        return {"$tuple": [_element(part, depth + 2) for part in value]}
    return _key(value, depth)
