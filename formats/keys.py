"""Which keys of a dict are the same key, whatever their forms (SPEC.md 3.1): a rule that needs no Python.

Python takes keys for the same by its own equality, which rounds here and there (`numpy.float32` against a large int).
The format compares numbers exactly, and a NaN by its text.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptstore.formats import jsontext
from ckptstore.formats.tree import decode_key, tag_of

__all__ = ["holds_nan", "identity"]

_NESTED: Final = (tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class _Nan:
    """A number that equals nothing, by its canonical text."""

    text: bytes


def identity(node: Any, depth: int = 0) -> Hashable:
    """What is equal for two keys of a tree exactly if they are the same key.

    Args:
        node: a key, as the tree has it, from an untrusted source.
        depth: arrays and objects that stand around it.

    Raises:
        FormatError: it can be no key.
    """
    value = decode_key(node, depth)
    if isinstance(node, dict) and tag_of(node) == "$tuple":
        return tuple([identity(part, depth + 2) for part in node["$tuple"]])
    # Prevents: a float32 of another value than an integer taken for it, because numpy rounds the integer first.
    exact: Hashable = value.item() if isinstance(value, np.generic) else value
    return _Nan(jsontext.dumps(node)) if exact != exact else exact


def holds_nan(value: Any) -> bool:
    """Whether a key or an element of a set is a NaN, or a tuple or set that holds one: it equals only itself."""
    return any(map(holds_nan, value)) if type(value) in _NESTED else bool(value != value)
