"""Read the typed tree of a state: rebuild the objects, list its tensors, and select parts of it.

The forms are described in `state`. Input is not trusted: a tree comes from a segment that anyone may have written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats.sources import Origin
from ckptstore.formats.states import values
from ckptstore.formats.states.names import place_names
from ckptstore.formats.states.object_parts import KIND, Make
from ckptstore.formats.states.state_objects import check

__all__ = [
    "MAX_DEPTH",
    "OBJECT",
    "Resolve",
    "TensorPlace",
    "decode_key",
    "member",
    "object_parts",
    "only_tensors",
    "paths",
    "places",
    "select",
    "select_places",
    "tag_of",
    "tensor_count",
    "tensor_names",
    "unflatten",
]

MAX_DEPTH: Final = 200
"""Nesting limit of the tree's JSON. It is below `jsontext.MAX_DEPTH`, so a tree can be read inside a document."""

_ORIGINS: Final[dict[str, Origin]] = {"$t": "torch", "$a": "numpy"}
_REVIVED: Final = ("$size", "$dtype", "$device")
OBJECT: Final = "$object"
"""Tag of an object that was taken apart: its body is ``[kind, node]`` or ``[kind, node, name]`` (`state_objects`)."""
_WITH_MEMBERS: Final = ("deque", "defaultdict", "namedtuple", "namespace", "simple_namespace")
"""Kinds of objects that can lose members in a selection, as a dict or list does."""
_GONE: Final = object()
_RESERVED: Final = "ckptstore/"

Resolve = Callable[[str, Origin], Any]


def unflatten(
    tree: Any, resolve: Resolve, revive: Mapping[str, Callable[[Any], Any]] | None = None, make: Make = check
) -> Any:
    """Rebuild a state from its tree.

    Args:
        tree: typed JSON from an untrusted source.
        resolve: returns the tensor of a name. It is called once per name, in tree order; all places of a tied tensor
            get the same object.
        revive: tag -> function of its checked body, for ``$size`` (list of ints), ``$dtype`` and ``$device`` (str).
            A tag without a function becomes a tuple or a str.
        make: makes the objects, of kind, parts and name. `state_objects.check` takes any value for a tensor.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    try:
        return _Unflattener(resolve, revive or {}, make).node(tree, 0)
    except RecursionError as error:  # within MAX_DEPTH, but the calling stack was deep already
        raise FormatError("state tree nested too deep for the calling stack") from error


def member(tree: Any, name: str) -> Any:
    """Return the part of a tree at a dotted name; None if there is none.

    Keys may contain dots. The keys of a list are its positions. A mapping with keys other than strings is not searched.
    """
    node = tree
    while name:
        items = _named_members(node)
        fitting = [key for key in items if name == key or name.startswith(f"{key}.")]
        if not fitting:
            return None
        key = max(fitting, key=len)
        node, name = items[key], name[len(key) + 1 :]
    return node


def _named_members(node: Any) -> dict[str, Any]:
    while isinstance(node, dict) and tag_of(node) == OBJECT:
        node = object_parts(node[OBJECT])[1]
    if isinstance(node, dict) and (tag := tag_of(node)) is not None:
        node = node[tag] if tag in ("$odict", "$tuple") else None
    if isinstance(node, list):
        return {str(number): one for number, one in enumerate(node)}
    return node if isinstance(node, dict) and tag_of(node) is None else {}


def only_tensors(tree: Any) -> bool:
    """Whether a tree consists only of tensors in nested dicts with string keys."""
    if not isinstance(tree, dict):
        return False
    tag = tag_of(tree)
    if tag in _ORIGINS:
        return True
    body = tree[tag] if tag == "$odict" else None if tag is not None else tree
    return isinstance(body, dict) and all(map(only_tensors, body.values()))


class _Unflattener:
    def __init__(self, resolve: Resolve, revive: Mapping[str, Callable[[Any], Any]], make: Make) -> None:
        self.resolve = resolve
        self.revive = revive
        self.make = make
        self.found: dict[str, tuple[Origin, Any]] = {}

    def node(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
        if isinstance(node, list):
            return [self.node(element, depth + 1) for element in node]
        if not isinstance(node, dict):
            return _plain(node)
        tag = tag_of(node)
        if tag is None:
            return {key: self.node(member, depth + 1) for key, member in node.items()}
        body = node[tag]
        if tag in _ORIGINS:
            return self.tensor(_ORIGINS[tag], body)
        if tag in _REVIVED:
            return self.revived(tag, body)
        if tag == "$tuple":
            return tuple([self.node(element, depth + 2) for element in _list(tag, body)])
        if tag in ("$dict", "$odict", "$counter"):
            return self.mapping(tag, body, depth)
        if tag in ("$set", "$frozenset"):
            return _decode_element(node, depth)
        if tag == OBJECT:
            kind, parts, name = object_parts(body)
            return self.make(kind, self.node(parts, depth + 2), name)
        return _value(tag, body)

    def tensor(self, origin: Origin, name: Any) -> Any:
        if _name(name) not in self.found:
            self.found[name] = (origin, self.resolve(name, origin))
        known, tensor = self.found[name]
        if known != origin:
            raise FormatError(f"tensor {name!r:.80} is both a torch and a numpy tensor")
        return tensor

    def revived(self, tag: str, body: Any) -> Any:
        if tag == "$size":
            sizes = _list(tag, body)
            if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
                raise FormatError(f"$size is {body!r:.80}")
            return self.revive.get(tag, tuple)(sizes)
        if not isinstance(body, str):
            raise FormatError(f"{tag} is {body!r:.80}")
        return self.revive.get(tag, str)(body)

    def mapping(self, tag: str, body: Any, depth: int) -> Any:
        if isinstance(body, dict) and tag != "$dict" and tag_of(body) is None:
            found = {key: self.node(member, depth + 2) for key, member in body.items()}
        else:
            pairs = _list(tag, body)
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                raise FormatError(f"{tag} contains an entry that is not a [key, value] pair")
            found = {decode_key(key, depth): self.node(member, depth + 3) for key, member in pairs}
            if len(found) != len(pairs):
                raise FormatError(f"{tag} holds a key twice")
        if tag == "$odict":
            return OrderedDict(found)
        if tag == "$counter":
            counter: Counter[Any] = Counter()
            dict.update(counter, found)  # Counter.update would add, and fail on counts that are not numbers
            return counter
        return found


def tag_of(node: dict[str, Any]) -> str | None:
    """Return the tag of a tagged node, None for a plain dict. Raises `FormatError` if a tag is not alone."""
    if len(node) == 1:
        (key,) = node
        return key if key[:1] == "$" else None
    if any(key[:1] == "$" for key in node):
        raise FormatError(f"state tree: {next(key for key in node if key[:1] == '$')!r:.80} is not the only member")
    return None


def object_parts(body: Any) -> tuple[str, Any, str]:
    """Return kind, node and name of the body of an ``$object``. Raises `FormatError`."""
    named = isinstance(body, list) and len(body) == 3
    if not isinstance(body, list) or len(body) not in (2, 3) or not isinstance(body[0], str):
        raise FormatError(f"state tree: {OBJECT} is not [kind, parts] or [kind, parts, name]")
    name = body[2] if named else ""
    if (
        not KIND.fullmatch(body[0])
        or not isinstance(name, str)
        or bool(name) != named
        or not values.is_plain_text(name)
    ):
        raise FormatError(f"state tree: {OBJECT} has an invalid kind or name: {body[0]!r:.80}, {name!r:.80}")
    return body[0], body[1], name


def _name(name: Any) -> str:
    """Check and return the name of a tensor of a state. Raises `FormatError`."""
    # Prevents: reading an auxiliary entry, or a single shard, as a tensor. No tensor of a state has such a name.
    named = isinstance(name, str) and name != "__metadata__" and not name.startswith(_RESERVED)
    if not named or not values.is_plain_text(name):
        raise FormatError(f"state tree: {name!r:.80} is not a valid tensor name")
    return str(name)


def _plain(node: Any) -> Any:
    if type(node) is int and not -values.MAX_PLAIN_INT <= node <= values.MAX_PLAIN_INT:
        raise FormatError("state tree: an integer beyond 2^53 without a tag")
    if type(node) is float and node - node != 0.0:  # JSON text such as 1e999 reads as infinity
        raise FormatError("state tree: a number beyond the range of floats")
    return node


def _value(tag: str, body: Any) -> Any:
    try:
        return values.decode(tag, body)
    except KeyError:
        raise FormatError(f"state tree: unknown tag {tag!r:.80}") from None


def _list(tag: str, body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise FormatError(f"state tree: the body of {tag} is not a list")
    return body


def decode_key(node: Any, depth: int = 0) -> Any:
    """Return a dict key of a tree as a Python object: a hashable value or a tuple of them. Raises `FormatError`."""
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        raise FormatError(f"state tree: {node!r:.80} cannot be a key")
    if not isinstance(node, dict):
        return _plain(node)
    tag = tag_of(node)
    if tag is None or tag in ("$bytearray", "$ints"):
        raise FormatError(f"state tree: {node!r:.80} cannot be a key")
    if tag == "$tuple":
        return tuple([decode_key(part, depth + 2) for part in _list(tag, node[tag])])
    return _value(tag, node[tag])


def _decode_element(node: Any, depth: int) -> Any:
    """Decode an element of a set: anything a key may be, or a frozenset. The outermost node may be a set."""
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    tag = tag_of(node) if isinstance(node, dict) else None
    if tag not in ("$set", "$frozenset", "$tuple"):
        return decode_key(node, depth)
    parts = [_decode_element(part, depth + 2) for part in _list(tag, node[tag])]
    if tag == "$tuple":
        return tuple(parts)
    try:
        found = set(parts)
    except TypeError as error:
        raise FormatError(f"state tree: {tag}: {error}") from error
    if len(found) != len(parts):
        raise FormatError(f"state tree: {tag} holds an element twice")
    return found if tag == "$set" else frozenset(found)


def tensor_names(tree: Any) -> list[str]:
    """Return the names of the tensors in a tree, in tree order, each once.

    Raises:
        FormatError: a name is not a valid tensor name.
    """
    found: dict[str, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            tag = next(iter(node)) if len(node) == 1 else None
            if tag in _ORIGINS:
                found[_name(node[tag])] = None
            else:
                waiting.extend(reversed(node.values()))
    return list(found)


def tensor_count(tree: Any) -> int:
    """Return at how many places a tree has a tensor. Tied tensors are counted at each of their places."""
    found, waiting = 0, [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if len(node) == 1 and next(iter(node)) in _ORIGINS:
                found += 1
            else:
                waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return found


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place of a tensor in the tree.

    Attributes:
        name: the name of the place in a selection (`names.place_names`).
        tensor: the name of the tensor, which is that of its first place.
    """

    name: str
    tensor: str


def places(tree: Any) -> list[TensorPlace]:
    """Return every place of every tensor, in tree order.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    found = paths(tree)
    return [TensorPlace(name, tensor) for name, (_, tensor) in zip(place_names(found), found, strict=True)]


def paths(tree: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Return (path, tensor name) for every place of every tensor, in tree order; a path has keys and list positions.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    found: list[tuple[tuple[Any, ...], str]] = []
    try:
        _find_places(tree, (), 0, found)
    except RecursionError as error:
        raise FormatError("state tree nested too deep for the calling stack") from error
    return found


def _find_places(node: Any, path: tuple[Any, ...], depth: int, found: list[tuple[tuple[Any, ...], str]]) -> None:
    """Walk the tree in the same order as `_select`."""
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        for index, element in enumerate(node):
            _find_places(element, (*path, index), depth + 1, found)
        return
    if not isinstance(node, dict):
        return
    tag = tag_of(node)
    if tag in _ORIGINS:
        found.append((path, _name(node[tag])))
    elif tag in ("$dict", "$odict", "$counter") and isinstance(node[tag], list):
        for pair in node[tag]:
            if not isinstance(pair, list) or len(pair) != 2:
                raise FormatError(f"{tag} contains an entry that is not a [key, value] pair")
            _find_places(pair[1], (*path, decode_key(pair[0], depth)), depth + 3, found)
    elif tag in ("$tuple", "$odict", "$counter"):
        _find_places(node[tag], path, depth + 1, found)
    elif tag == OBJECT:
        _find_places(object_parts(node[tag])[1], path, depth + 2, found)
    elif tag is None:
        for key, member in node.items():
            _find_places(member, (*path, key), depth + 1, found)


def select(tree: Any, names: set[str]) -> Any:
    """Return the tree without the tensors that are not in `names`.

    Their keys and list positions are removed. Containers, even empty ones, and values stay. An object that is made of
    tensors is removed with the last of them; if only some are left, its parts take its place. A tree that is a
    single unselected tensor becomes null.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    return _selected(tree, lambda name: name if name in names else None)


def select_places(tree: Any, kept: Mapping[int, str]) -> Any:
    """Return the tree with tensors only at selected places; everything else is as in `select`.

    Args:
        tree: typed JSON.
        kept: position in `places` -> the name of the tensor at that place in the result.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    positions = count()
    return _selected(tree, lambda _: kept.get(next(positions)))


def _selected(tree: Any, keep: Callable[[str], str | None]) -> Any:
    try:
        kept = _select(tree, keep, 0)
    except RecursionError as error:
        raise FormatError("state tree nested too deep for the calling stack") from error
    return None if kept is _GONE else kept


def _select(node: Any, keep: Callable[[str], str | None], depth: int) -> Any:
    """Select recursively. `keep` is called once per place, in tree order, and returns the new name or None."""
    if depth > MAX_DEPTH:
        raise FormatError(f"state tree nested deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        return [kept for element in node if (kept := _select(element, keep, depth + 1)) is not _GONE]
    if not isinstance(node, dict):
        return node
    tag = tag_of(node)
    if tag in _ORIGINS:
        name = keep(_name(node[tag]))
        return _GONE if name is None else {tag: name}
    if tag in ("$dict", "$odict", "$counter") and isinstance(node[tag], list):
        pairs = []
        for pair in node[tag]:
            if not isinstance(pair, list) or len(pair) != 2:
                raise FormatError(f"{tag} contains an entry that is not a [key, value] pair")
            if (kept := _select(pair[1], keep, depth + 3)) is not _GONE:
                pairs.append([pair[0], kept])
        return {tag: pairs}
    if tag == OBJECT:
        return _select_object(node[tag], keep, depth)
    if tag not in (None, "$tuple", "$odict", "$counter"):
        return node
    return {key: kept for key, member in node.items() if (kept := _select(member, keep, depth + 1)) is not _GONE}


def _select_object(body: Any, keep: Callable[[str], str | None], depth: int) -> Any:
    """Select in an object. One that lost a part that it cannot be made without becomes its remaining parts."""
    kind, node, name = object_parts(body)
    kept = _select(node, keep, depth + 2)
    before, after = tensor_count(node), 0 if kept is _GONE else tensor_count(kept)
    if kept is not _GONE and (before == after or kind in _WITH_MEMBERS):
        return {OBJECT: [kind, kept, *([name] if name else [])]}
    return kept if after else _GONE
