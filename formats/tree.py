"""Reading the typed tree of a state: back to objects, its tensors' names, and parts of it.

The forms are in `state`. Nothing here trusts its input: a tree comes from a segment that anyone may have written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from ckptstore.errors import FormatError
from ckptstore.formats import values
from ckptstore.formats.names import place_names
from ckptstore.formats.sources import Origin

__all__ = [
    "MAX_DEPTH",
    "Place",
    "Resolve",
    "decode_key",
    "member",
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
"""Nesting of the tree's JSON; below `jsontext.MAX_DEPTH`, so that what was written can be read inside a document."""

_ORIGINS: Final[dict[str, Origin]] = {"$t": "torch", "$a": "numpy"}
_REVIVED: Final = ("$size", "$dtype", "$device")
_GONE: Final = object()
_RESERVED: Final = "ckptstore/"

Resolve = Callable[[str, Origin], Any]


def unflatten(tree: Any, resolve: Resolve, revive: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Put a state together again.

    Args:
        tree: typed JSON from an untrusted source.
        resolve: gives the tensor of a name; called once per name, in tree order. Every place of a tied tensor gets
            the object that it returned.
        revive: tag -> function of its checked body, for ``$size`` (list of ints), ``$dtype`` and ``$device`` (str).
            Without one they come back as tuple and str.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    try:
        return _Unflattener(resolve, revive or {}).node(tree, 0)
    except RecursionError as error:  # within MAX_DEPTH, but called from a stack that was deep already
        raise FormatError("state tree nested too deep for the calling stack") from error


def member(tree: Any, name: str) -> Any:
    """The part of a tree at the place that a dotted name leads to; None: there is none.

    Keys may hold dots. A list has positions for keys; what has other keys than texts is not looked into.
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
    if isinstance(node, dict) and (tag := tag_of(node)) is not None:
        node = node[tag] if tag in ("$odict", "$tuple") else None
    if isinstance(node, list):
        return {str(number): one for number, one in enumerate(node)}
    return node if isinstance(node, dict) and tag_of(node) is None else {}


def only_tensors(tree: Any) -> bool:
    """Whether a tree is dicts with texts for keys that hold nothing but tensors."""
    if not isinstance(tree, dict):
        return False
    tag = tag_of(tree)
    if tag in _ORIGINS:
        return True
    body = tree[tag] if tag == "$odict" else None if tag is not None else tree
    return isinstance(body, dict) and all(map(only_tensors, body.values()))


class _Unflattener:
    def __init__(self, resolve: Resolve, revive: Mapping[str, Callable[[Any], Any]]) -> None:
        self.resolve = resolve
        self.revive = revive
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
                raise FormatError(f"{tag} holds something that is no pair")
            found = {decode_key(key, depth): self.node(member, depth + 3) for key, member in pairs}
            if len(found) != len(pairs):
                raise FormatError(f"{tag} holds a key twice")
        if tag == "$odict":
            return OrderedDict(found)
        if tag == "$counter":
            counter: Counter[Any] = Counter()
            dict.update(counter, found)  # Counter's own update would add, and fail on counts that are no numbers
            return counter
        return found


def tag_of(node: dict[str, Any]) -> str | None:
    """The tag of a tagged node, None for a plain dict. Raises `FormatError`: a tag is not alone."""
    if len(node) == 1:
        (key,) = node
        return key if key[:1] == "$" else None
    if any(key[:1] == "$" for key in node):
        raise FormatError(f"state tree: {next(key for key in node if key[:1] == '$')!r:.80} is not alone")
    return None


def _name(name: Any) -> str:
    """The name of a tensor of a state. Raises `FormatError`."""
    # Prevents: an auxiliary entry, or one shard, given for a tensor. No tensor of a state has such a name.
    named = isinstance(name, str) and name != "__metadata__" and not name.startswith(_RESERVED)
    if not named or not values.is_plain_text(name):
        raise FormatError(f"state tree: a tensor's name is {name!r:.80}")
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
        raise FormatError(f"state tree: {tag} holds no list")
    return body


def decode_key(node: Any, depth: int = 0) -> Any:
    """A dict key of a tree as Python has it: a value that hashes, or a tuple of such. Raises `FormatError`."""
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
    """An element of a set: what a key may be, or a frozenset; the outermost one may be a set."""
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
    """Names of the tensors in a tree, in tree order, each once.

    Raises:
        FormatError: a name is no string.
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
    """At how many places a tree of `flatten` has a tensor: more than there are tensors if some are tied."""
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
class Place:
    """Where a tensor stands.

    Attributes:
        name: what a selection calls it (`names.place_names`).
        tensor: the name of the tensor; that of its first place, too.
    """

    name: str
    tensor: str


def places(tree: Any) -> list[Place]:
    """Every place of every tensor, in tree order.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    found = paths(tree)
    return [Place(name, tensor) for name, (_, tensor) in zip(place_names(found), found, strict=True)]


def paths(tree: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Every place of every tensor, in tree order: the keys and list positions that lead there, and the tensor's name.

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
    """Goes where `_select` goes, in its order."""
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
                raise FormatError(f"{tag} holds something that is no pair")
            _find_places(pair[1], (*path, decode_key(pair[0], depth)), depth + 3, found)
    elif tag in ("$tuple", "$odict", "$counter"):
        _find_places(node[tag], path, depth + 1, found)
    elif tag is None:
        for key, member in node.items():
            _find_places(member, (*path, key), depth + 1, found)


def select(tree: Any, names: set[str]) -> Any:
    """The tree without the tensors that are not in `names`.

    Their key or list position goes; containers, even empty ones, and values stay. A tree that is one tensor, not
    selected, becomes null.

    Raises:
        FormatError: the tree is not what `flatten` writes.
    """
    return _selected(tree, lambda name: name if name in names else None)


def select_places(tree: Any, kept: Mapping[int, str]) -> Any:
    """The tree with no tensors but those at some of its places; the rest is as in `select`.

    Args:
        tree: typed JSON.
        kept: position in `places` -> the name that the tensor has there in the result.

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
    """`keep` is asked once per place, in tree order: the name that is to stand there, or None."""
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
                raise FormatError(f"{tag} holds something that is no pair")
            if (kept := _select(pair[1], keep, depth + 3)) is not _GONE:
                pairs.append([pair[0], kept])
        return {tag: pairs}
    if tag not in (None, "$tuple", "$odict", "$counter"):
        return node
    return {key: kept for key, member in node.items() if (kept := _select(member, keep, depth + 1)) is not _GONE}
