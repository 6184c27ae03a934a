"""SPEC.md 3.3: the state of many ranks as a reader that is not a rank restores it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from tools.conformance.page.codecs import RefusedError

MAPPINGS = ("$dict", "$odict", "$counter")
GONE = object()
LEVELS = 200
NAN = "NaN"
SCALARS: dict[str, Any] = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2"}
SCALARS |= {"U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8"}
SCALARS |= {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
SCALARS |= {"F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz}
SCALARS |= {"F8_E8M0": ml_dtypes.float8_e8m0fnu, "C64": "<c8", "C128": "<c16"}


def unranked(tree: Any) -> Any:
    """A tree in which each `$ranks` is replaced by the union of its nodes."""
    found = list(bodies_of(tree))
    require(len({len(places) for places, _ in found}) < 2)
    require(not any(list(bodies_of(nodes)) for _, nodes in found))
    return present(replaced(tree, 0)) if found else tree


def require(holds: bool) -> None:
    if not holds:
        raise RefusedError("a tree of ranks")


def present(node: Any) -> Any:
    require(node is not GONE)
    return node


def bodies_of(node: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """The bodies of all `$ranks`, except nested ones."""
    if isinstance(node, dict) and list(node) == ["$ranks"]:
        body = node["$ranks"]
        require(isinstance(body, list) and len(body) == 2 and all(isinstance(part, list) and part for part in body))
        places, nodes = body
        require(all(one is None or (type(one) is int and 0 <= one < len(nodes)) for one in places))
        yield places, nodes
    elif isinstance(node, dict | list):
        for one in node.values() if isinstance(node, dict) else node:
            yield from bodies_of(one)


def replaced(tree: Any, around: int) -> Any:
    require(around <= LEVELS)
    if isinstance(tree, list):
        return [present(replaced(element, around + 1)) for element in tree]
    if not isinstance(tree, dict):
        return tree
    if list(tree) == ["$ranks"]:
        places, nodes = tree["$ranks"]
        named = [nodes[place] for place in dict.fromkeys(places) if place is not None]
        for node in named:
            replaced(node, around + 3)
        return union(named) if named else GONE
    members = {key: replaced(value, around + 1) for key, value in tree.items()}
    if tag_of(tree) is not None:
        members = {key: present(value) for key, value in members.items()}
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
        if len(nodes) == 1:
            return nodes[0]
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
        own: set[int] = set()
        for key, value in body.items() if isinstance(body, dict) else body:
            at = next((at for at, known in enumerate(keys) if same_key(known, key)), len(keys))
            require(at not in own)
            own.add(at)
            if at == len(keys):
                keys.append(key)
                values.append([])
            values[at].append(value)
    pairs = [[key, union(found)] for key, found in zip(keys, values, strict=True)]
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
    """3.1, keys."""
    if tag_of(one) == "$tuple" == tag_of(other):
        parts, others = one["$tuple"], other["$tuple"]
        return len(parts) == len(others) and all(map(same_key, parts, others))
    if (number := number_of(one)) is not None and (beside := number_of(other)) is not None:
        return json.dumps(one) == json.dumps(other) if NAN in (*number, *beside) else number == beside
    if tag_of(one) == "$bytes" == tag_of(other):
        return base64.b64decode(one["$bytes"]) == base64.b64decode(other["$bytes"])
    return json.dumps(one) == json.dumps(other)


def number_of(key: Any) -> tuple[Any, Any] | None:
    """(real, imaginary), each exact; None: it is not a number."""
    tag = tag_of(key)
    if isinstance(key, bool | int | float):
        return exact(key), Fraction(0)
    body = None if tag is None else key[tag]
    if tag == "$int":
        return Fraction(int(body)), Fraction(0)
    if tag == "$float":
        return exact(float(body) if body in ("inf", "-inf") else float("nan")), Fraction(0)
    if tag == "$complex":
        real, imaginary = (number_of(part) for part in body)
        assert real is not None
        assert imaginary is not None
        return real[0], imaginary[0]
    return of_numpy(*body) if tag == "$np" else None


def exact(value: float) -> Any:
    return NAN if math.isnan(value) else str(value) if math.isinf(value) else Fraction(value)


def of_numpy(dtype: str, image: str) -> tuple[Any, Any]:
    value = np.frombuffer(bytes.fromhex(image), SCALARS[dtype])[0]
    if dtype in ("C64", "C128"):
        return exact(float(value.real)), exact(float(value.imag))
    return exact(int(value) if dtype[0] in "BUI" and dtype != "BF16" else float(value)), Fraction(0)
