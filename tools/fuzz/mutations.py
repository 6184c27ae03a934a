"""Damages inputs: as bytes, and as JSON trees, also JSON inside the strings of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["mutate", "mutate_bytes", "mutate_json"]

_LONGEST: Final = 1 << 16
_TOKENS: Final = (
    b"\0",
    b"\xff",
    b"\x80",
    b"\x7f",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\u0000",
    b"1e999",
    b"-",
)
_INTERESTING: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 32, 33, 64, 255, 256, 4095, 4096, 65535, 65536),
    *(2**31, 2**32, 2**40, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**53), -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1e300, -1e-300, "", "a", ".", "#", "~2", "%2E", "\ud800", "é", "0" * 16, "0" * 32, "f" * 32),
    *("-" * 16, "__metadata__", "ckptstore/", "ckptstore/payload", "$t", "$a", "$ints", "latest", "raw", "zstd", "F32"),
    *("C64", "BOOL", "F4_E2M1_X2", "u1", "i8", "nan", "AAAA", "9" * 40, [], {}, [[]], {"$": 1}, [0], [1, 1], ["a", 1]),
    *(
        {"$t": "a"},
        {"$tuple": []},
        {"$dict": [[1, 2]]},
        {"$set": [1]},
        {"$np": ["F32", "00000000"]},
        {"$int": "1" * 20},
    ),
)


def mutate(data: bytes, others: Sequence[bytes], source: random.Random) -> bytes:
    """`data`, or parts of it and one of `others`, damaged in one to four ways; at most 64 KiB."""
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        if source.random() < 0.7:
            changed = mutate_json(data, others, source)
            data = mutate_bytes(data, others, source) if changed is None else changed
        else:
            data = mutate_bytes(data, others, source)
    return data[:_LONGEST]


def mutate_bytes(data: bytes, others: Sequence[bytes], source: random.Random) -> bytes:
    """One change of some bytes."""
    image = bytearray(data)
    place = source.randrange(len(image) + 1)
    end = min(len(image), place + source.choice((1, 1, 2, 4, 8, 32, 200)))
    match source.randrange(8):
        case 0 if image:
            place = min(place, len(image) - 1)
            image[place] ^= 1 << source.randrange(8)
        case 1 if image:
            image[min(place, len(image) - 1)] = source.randrange(256)
        case 2:
            del image[place:end]
        case 3:
            image[place:place] = image[place:end]
        case 4:
            image[place:place] = source.choice(_TOKENS) * source.choice((1, 1, 1, 2, 50))
        case 5:
            number = source.choice((0, 1, 255, 65535, 2**31, 2**32 - 1, 2**63, source.getrandbits(16)))
            image[place : place + 8] = (number & (2**64 - 1)).to_bytes(8, source.choice(("little", "big")))
        case 6 if others:
            other = source.choice(others)
            cut = source.randrange(len(other) + 1)
            image[place:end] = other[cut : cut + 300]
        case _:
            image[place:end] = source.randbytes(end - place)
    return bytes(image)


def mutate_json(data: bytes, others: Sequence[bytes], source: random.Random) -> bytes | None:
    """One change of a JSON text's tree; None if `data` is not JSON."""
    try:
        value = json.loads(data)
        other = json.loads(source.choice(others)) if others else None
    except (ValueError, RecursionError):
        return None
    try:
        return json.dumps(_changed(value, other, source)).encode()
    except (ValueError, RecursionError):
        return None


def _changed(value: Any, other: Any, source: random.Random) -> Any:
    """A copy of `value` in which one node differs."""
    nodes = _paths(value)
    path = source.choice(nodes)
    if not path:
        return _replacement(value, other, source)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    match source.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[source.randrange(len(holder))])
        case 1 | 2 if isinstance(holder, dict):
            member = holder.pop(key)
            holder[source.choice((key + "x", key[:-1], *(item for item in _INTERESTING if type(item) is str)))] = member
        case 2:
            holder *= source.choice((2, 2, 3, 40))
        case _:
            holder[key] = _replacement(holder[key], other, source)
    return value


def _replacement(value: Any, other: Any, source: random.Random) -> Any:
    if type(value) is int and source.random() < 0.5:
        return value + source.choice((-1, 1, 1, 7, -value, 2**32, 2**53 - value))
    if type(value) is str and value and source.random() < 0.6:
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            inner = None
        if isinstance(inner, dict | list):
            return json.dumps(_changed(inner, other, source))
        place = source.randrange(len(value))
        return source.choice(
            (value[:place], value[:place] + "x" + value[place + 1 :], value + value[-1], value.upper())
        )
    match source.randrange(4):
        case 0 if other is not None:
            found = other
            for key in source.choice(_paths(other)):
                found = found[key]
            return json.loads(json.dumps(found))
        case 1:
            nested: Any = value
            for _ in range(source.choice((1, 1, 3, 70, 210, 300))):
                nested = source.choice(([nested], {"k": nested}, {"$tuple": [nested]}))
            return nested
        case _:
            return json.loads(json.dumps(source.choice(_INTERESTING)))


def _paths(value: Any) -> list[tuple[Any, ...]]:
    """The path of every node, up to a bound."""
    found: list[tuple[Any, ...]] = [()]
    for path in found:
        if len(found) > 3000:
            break
        node = value
        for key in path:
            node = node[key]
        if isinstance(node, dict):
            found += [(*path, key) for key in node]
        elif isinstance(node, list):
            found += [(*path, place) for place in range(len(node))]
    return found
