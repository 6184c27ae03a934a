"""Decide which keys of a dict are the same key, whatever their forms (SPEC.md 3.1).

The rule does not depend on Python, whose own equality rounds in some cases (`numpy.float32` against a large int). The
format compares numbers exactly, and compares a NaN by its text.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptstore.formats import jsontext
from ckptstore.formats.states.tree import decode_key, tag_of

__all__ = ["holds_nan", "identity"]

_NESTED: Final = (tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class _Nan:
    """A number that equals nothing, identified by its canonical text."""

    text: bytes


def identity(node: Any, depth: int = 0) -> Hashable:
    """Return a value that is equal for two keys of a tree exactly if they are the same key.

    Args:
        node: a key in its tree form, from an untrusted source.
        depth: number of arrays and objects around it.

    Raises:
        FormatError: `node` cannot be a key.
    """
    value = decode_key(node, depth)
    if isinstance(node, dict) and tag_of(node) == "$tuple":
        return tuple([identity(part, depth + 2) for part in node["$tuple"]])
    # Prevents: a float32 compared equal to a different integer, because numpy rounds the integer first.
    exact: Hashable = value.item() if isinstance(value, np.generic) else value
    return _Nan(jsontext.dumps(node)) if exact != exact else exact


def holds_nan(value: Any) -> bool:
    """Whether a key or set element is a NaN, or a tuple or set that contains one. Such a value equals only itself."""
    return any(map(holds_nan, value)) if type(value) in _NESTED else bool(value != value)
