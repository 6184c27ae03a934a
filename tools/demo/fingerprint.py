"""Comparing states by their bits, independently of the store and without torch.

A state is taken apart into **leaves**: every number, string and array with its key path, its exact type and its bytes
(NaN payloads and the sign of zero included, without Python's ``==``), and every container with its type and length.
Arrays count by logical dtype and shape, whether torch or numpy holds them, so that a state loaded for numpy compares
with one recorded by torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

PARTS: Final = (
    ("weights", ("model",)),
    ("moments", ("optimizer", "state")),
    ("hyperparameters", ("optimizer", "param_groups")),
    ("schedule", ("schedule",)),
    ("python RNG", ("rng", "python")),
    ("numpy RNG", ("rng", "numpy")),
    ("torch RNG", ("rng", "torch")),
    ("data position", ("loader",)),
    ("loss history", ("losses",)),
    ("everything else", ()),
)
"""Names of the parts of a demo state, each with the beginning of the key paths in it; the first match counts."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a state: key path, exact type (with shape), how many values, and their bytes."""

    path: tuple[str, ...]
    kind: str
    values: int
    data: bytes

    @property
    def part(self) -> str:
        """The part it belongs to."""
        return next(name for name, start in PARTS if self.path[: len(start)] == start)


@dataclass(frozen=True, slots=True)
class PartDifference:
    """The comparison of one part of two states.

    `differing_bits` counts bits of leaves that both have with the same type; a leaf that is missing on one side or has
    another type counts all its bits.
    """

    part: str
    leaves: int
    values: int
    bits: int
    differing_leaves: int
    differing_bits: int
    first: str
    """Key path of the first differing leaf; empty if none differs."""

    @property
    def same(self) -> bool:
        """Whether every bit is equal."""
        return self.differing_leaves == 0


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All leaves in traversal order. Raises `TypeError` for a value that is not part of a demo state."""
    if isinstance(state, dict):
        yield _text_leaf(path, type(state).__name__, json.dumps([[type(key).__name__, str(key)] for key in state]))
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, list | tuple):
        yield _text_leaf(path, type(state).__name__, str(len(state)))
        if len(state) > 32 and all(type(item) is int for item in state):
            # report the 625 words of python's RNG as one leaf
            yield Leaf(path, f"int x {len(state)}", len(state), json.dumps(state).encode())
            return
        for index, value in enumerate(state):
            yield from leaves(value, (*path, str(index)))
    elif isinstance(state, float):
        yield Leaf(path, "float", 1, struct.pack("<d", state))
    elif state is None or isinstance(state, bool | int | str):
        yield _text_leaf(path, type(state).__name__, str(state))
    else:
        array = _as_array(state, path)
        yield Leaf(path, f"{array.dtype.str} {array.shape}", array.size, array.tobytes())


def _text_leaf(path: tuple[str, ...], kind: str, text: str) -> Leaf:
    return Leaf(path, kind, 1, text.encode())


def _as_array(value: Any, path: tuple[str, ...]) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):  # a torch tensor; this module must not import torch
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{'.'.join(path)}: {type(value).__name__} is neither an array nor a plain value")
    return np.asarray(value)


def part_hashes(state: Any) -> dict[str, str]:
    """SHA-256 of every part, in the order of `PARTS`. Equal hashes mean equal bits, types, shapes and key paths."""
    hashes = {name: hashlib.sha256() for name, _ in PARTS}
    for leaf in leaves(state):
        heading = json.dumps([leaf.path, leaf.kind, len(leaf.data)]).encode()
        hashes[leaf.part].update(heading)
        hashes[leaf.part].update(leaf.data)
    return {name: found.hexdigest() for name, found in hashes.items()}


def compare(expected: list[Leaf], actual: list[Leaf]) -> list[PartDifference]:
    """The comparison of two states' leaves, part by part, in the order of `PARTS`."""
    left = {(leaf.path, leaf.kind): leaf for leaf in expected}
    right = {(leaf.path, leaf.kind): leaf for leaf in actual}
    keys = list(dict.fromkeys([*left, *right]))
    return [_compare_part(name, keys, left, right) for name, _ in PARTS]


_Leaves = Mapping[tuple[tuple[str, ...], str], Leaf]


def _compare_part(part: str, keys: list[tuple[tuple[str, ...], str]], left: _Leaves, right: _Leaves) -> PartDifference:
    count = values = bits = differing_leaves = differing_bits = 0
    first = ""
    for key in keys:
        either = left.get(key) or right[key]
        if either.part != part:
            continue
        count += 1
        values += either.values
        bits += 8 * len(either.data)
        differing = _differing_bits(left.get(key), right.get(key))
        if differing:
            differing_leaves += 1
            differing_bits += differing
            first = first or ".".join(key[0])
    return PartDifference(part, count, values, bits, differing_leaves, differing_bits, first)


def _differing_bits(left: Leaf | None, right: Leaf | None) -> int:
    if left is None or right is None:
        present = left or right
        assert present is not None
        return max(1, 8 * len(present.data))
    if left.data == right.data:
        return 0
    size = max(len(left.data), len(right.data))
    one = np.frombuffer(left.data.ljust(size, b"\0"), np.uint8)
    other = np.frombuffer(right.data.ljust(size, b"\0"), np.uint8)
    return max(1, int(np.bitwise_count(one ^ other).sum()))


def write_leaves(path: Path, found: list[Leaf]) -> None:
    """Store leaves: one line of JSON with their paths, types and lengths, then all their bytes."""
    index = [[leaf.path, leaf.kind, leaf.values, len(leaf.data)] for leaf in found]
    with path.open("wb") as file:
        file.write(json.dumps(index).encode() + b"\n")
        for leaf in found:
            file.write(leaf.data)


def read_leaves(path: Path) -> list[Leaf]:
    """What `write_leaves` stored."""
    with path.open("rb") as file:
        index = json.loads(file.readline())
        return [Leaf(tuple(keys), kind, values, file.read(length)) for keys, kind, values, length in index]
