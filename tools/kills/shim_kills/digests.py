"""The digest of everything that a training script has."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["digest"]


def digest(value: Any) -> str:
    """The digest of every bit of a nested value."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key, member in one.items():
                add(key)
                add(member)
        elif isinstance(one, list | tuple):
            for member in one:
                add(member)
        elif hasattr(one, "detach"):
            part = one.to_local() if hasattr(one, "to_local") else one
            found.update(repr((part.dtype, tuple(part.shape))).encode() + part.detach().cpu().numpy().tobytes())
        else:
            found.update(f"{type(one).__name__} {one!r};".encode())

    add(value)
    return found.hexdigest()
