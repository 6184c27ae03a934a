"""Section 3.3: what a reader that is no rank has of a state of many ranks."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

MAPPINGS = ("$dict", "$odict", "$counter")
GONE = object()


def unranked(tree: Any) -> Any:
    """A tree in which the union of its nodes is in place of each `$ranks`."""
    if isinstance(tree, list):
        return [unranked(element) for element in tree]
    if not isinstance(tree, dict):
        return tree
    if list(tree) == ["$ranks"]:
        places, nodes = tree["$ranks"]
        named = dict.fromkeys(place for place in places if place is not None)
        return union([nodes[place] for place in named]) if named else GONE
    members = {key: unranked(value) for key, value in tree.items()}
    return {key: value for key, value in members.items() if value is not GONE}


def union(nodes: list[Any]) -> Any:
    if len(nodes) == 1:
        return nodes[0]
    kinds = [kind_of(node) for node in nodes]
    kind = kinds[0]
    if set(kinds) != {kind}:
        holding = [kind for kind, node in zip(kinds, nodes, strict=True) if holds_tensor(node)]
        kind = (holding or kinds)[0]
        nodes = [node for node, own in zip(nodes, kinds, strict=True) if own == kind]
    if kind in MAPPINGS:
        return of_mappings(kind, nodes)
    if kind in ("list", "$tuple"):
        return of_sequences(kind, nodes)
    return nodes[0]


def tag_of(node: Any) -> str | None:
    if isinstance(node, dict) and len(node) == 1 and next(iter(node)).startswith("$"):
        return str(next(iter(node)))
    return None


def kind_of(node: Any) -> str:
    tag = tag_of(node)
    if isinstance(node, list):
        return "list"
    if isinstance(node, dict) and tag is None:
        return "$dict"
    if tag in ("$t", "$a"):
        return "tensor"
    return tag if tag in MAPPINGS or tag == "$tuple" else "value"  # type: ignore[return-value]


def holds_tensor(node: Any) -> bool:
    if tag_of(node) in ("$t", "$a"):
        return True
    members = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return any(holds_tensor(member) for member in members)


def of_mappings(kind: str, nodes: list[Any]) -> Any:
    bodies = [node if tag_of(node) is None else node[kind] for node in nodes]
    objects = all(isinstance(body, dict) for body in bodies)
    keys: list[Any] = []
    values: list[list[Any]] = []
    for body in bodies:
        for key, value in body.items() if isinstance(body, dict) else body:
            at = next((at for at, known in enumerate(keys) if same_key(known, key)), None)
            if at is None:
                keys.append(key)
                values.append([value])
            else:
                values[at].append(value)
    pairs = [[key, union(own)] for key, own in zip(keys, values, strict=True)]
    if not objects:
        return {kind: pairs}
    members = dict(pairs)
    return members if kind == "$dict" else {kind: members}


def of_sequences(kind: str, nodes: list[Any]) -> Any:
    bodies = nodes if kind == "list" else [node["$tuple"] for node in nodes]
    if all(kind_of(element) == "value" for body in bodies for element in body):
        return nodes[0]
    length = max(len(body) for body in bodies)
    elements = [union([body[at] for body in bodies if at < len(body)]) for at in range(length)]
    return elements if kind == "list" else {"$tuple": elements}


def same_key(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other) or bool(as_python(one) == as_python(other))


def as_python(key: Any) -> Any:
    """Equal for two keys if Python takes them for the same: numbers by value, all else with its tag."""
    tag = tag_of(key)
    if tag is None:
        return key
    body = key[tag]
    if tag == "$tuple":
        return ("tuple", *[as_python(part) for part in body])
    if tag == "$int":
        return int(body)
    if tag == "$complex":
        return complex(*[as_python(part) for part in body])
    if tag == "$float":
        return float(body) if body in ("inf", "-inf") else float("nan")
    if tag == "$np":
        return number(*body)
    return (tag, base64.b64decode(body))


def number(dtype: str, image: str) -> Any:
    kinds = {"BOOL": "?", "U": "u", "I": "i", "F": "f", "C": "c"}
    letters, size = ("BOOL", 1) if dtype == "BOOL" else (dtype[0], len(image) // 2)
    if dtype == "BF16":
        return float(np.frombuffer(bytes.fromhex("0000" + image), "<f4")[0])
    if dtype.startswith("F8"):
        return (dtype, image)  # two such keys of one value and another text: none of the stores has them
    code = kinds[letters] if letters == "BOOL" else f"<{kinds[letters]}{size}"
    return np.frombuffer(bytes.fromhex(image), code)[0].item()
