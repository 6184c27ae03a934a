"""A checkpoint's metadata: a JSON object that the user stores beside its entry in the log.

It is read whenever a store is listed, so it is small (`LIMIT`) and needs only JSON to be read. Numbers that JSON lacks
are written as ``{"$float": "nan"}`` (``inf``, ``-inf``), as in a state's tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats import jsontext

__all__ = ["LIMIT", "MAX_DEPTH", "MEMBER", "checked", "form", "read"]

MEMBER: Final = "metadata"
"""Name of the metadata among the members of a checkpoint's entry."""
LIMIT: Final = 16 * 1024
"""Largest metadata in bytes of canonical JSON."""
MAX_DEPTH: Final = 32
"""Nesting limit."""
_WIDEST: Final = 4096
"""Maximum bits of an integer: Python does not convert integers of many thousand digits to and from text."""
_FLOAT: Final = "$float"
_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Check `metadata` and return its written form: a new object that contains only JSON values.

    Numbers of numpy and torch become Python numbers; tuples become lists.

    Raises:
        UsageError: not a mapping; a key that is not a string or begins with ``$``; a value that JSON cannot represent
            (the message names its place); or more than `LIMIT` bytes.
    """
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata: {type(metadata).__name__}; pass a mapping of names to JSON values")
    written: dict[str, Any] = _written(metadata, "metadata", 0)
    text = jsontext.dumps(written)
    if len(text) > LIMIT:
        raise UsageError(
            f"metadata: {len(text):,} bytes of JSON, at most {LIMIT:,} are allowed; put larger data into the state"
        )
    if jsontext.loads(text, what="metadata", max_bytes=LIMIT) != written:
        raise UsageError("metadata: a string that is not valid Unicode")
    return written


def _written(value: Any, place: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UsageError(f"{place}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise UsageError(f"{place}: key {key!r:.80}; a name is a string that does not begin with $")
        return {str(key): _written(member, f"{place}[{key!r:.80}]", depth + 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_written(member, f"{place}[{index}]", depth + 1) for index, member in enumerate(value)]
    if hasattr(value, "ndim") and hasattr(value, "item") and _is_one(value):
        value = value.item()  # a loss of shape [1] is a number, as torch and numpy convert it
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        if value.bit_length() > _WIDEST:
            raise UsageError(f"{place}: {value.bit_length():,} bits, at most {_WIDEST:,} are allowed; pass a string")
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: str(number)}
    raise UsageError(
        f"{place}: {type(value).__name__} is not a JSON value; use strings, numbers, booleans, None, lists or mappings"
        + (f"; it has shape {list(value.shape)}: pass .mean().item() or .tolist()" if hasattr(value, "shape") else "")
    )


def _is_one(value: Any) -> bool:
    """Whether an array or tensor has a single element."""
    return value.ndim == 0 or math.prod(getattr(value, "shape", (0,))) == 1


def read(metadata: Any) -> dict[str, Any]:
    """Convert written metadata back to the mapping that the user passed. Unknown forms are returned unchanged."""
    return {name: _read(value) for name, value in metadata.items()} if isinstance(metadata, dict) else {}


def form(value: Any) -> Any:
    """Convert the result of `read` back to its written form; nothing is refused."""
    if isinstance(value, list):
        return [form(member) for member in value]
    if isinstance(value, Mapping):
        return {name: form(member) for name, member in value.items()}
    return {_FLOAT: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(member) for member in value]
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(word := value.get(_FLOAT), str) and word in _NOT_FINITE:
            return _NOT_FINITE[word]
        return {name: _read(member) for name, member in value.items()}
    return value
