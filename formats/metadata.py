"""What a user says of a checkpoint in words and numbers: a JSON object beside its entry in the log.

It is read wherever a store is listed, so it is small (`LIMIT`) and needs nothing but JSON to be read. Numbers that JSON
does not have are written ``{"$float": "nan"}`` (``inf``, ``-inf``), as in a state's tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats import jsontext

__all__ = ["LIMIT", "MAX_DEPTH", "MEMBER", "checked", "form", "read"]

MEMBER: Final = "metadata"
"""Its name among the members of a checkpoint's entry."""
LIMIT: Final = 16 * 1024
"""Bytes of canonical JSON that it may take."""
MAX_DEPTH: Final = 32
"""Nesting."""
_WIDEST: Final = 4096
"""Bits of a whole number: Python writes and reads no number of many thousand digits."""
_FLOAT: Final = "$float"
_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata` as it is written: an object of its own, of JSON values alone.

    Numpy's and torch's numbers become Python's, tuples lists.

    Raises:
        UsageError: no mapping, a key that is no text or begins with ``$``, a value that JSON has no form for (the
            message names its place), or more than `LIMIT` bytes.
    """
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata: {type(metadata).__name__}; a mapping of names to JSON values is needed")
    written: dict[str, Any] = _written(metadata, "metadata", 0)
    text = jsontext.dumps(written)
    if len(text) > LIMIT:
        raise UsageError(
            f"metadata: {len(text):,} bytes of JSON, at most {LIMIT:,} are allowed; put what is larger into the state"
        )
    if jsontext.loads(text, what="metadata", max_bytes=LIMIT) != written:
        raise UsageError("metadata: a text that is no valid Unicode")
    return written


def _written(value: Any, place: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UsageError(f"{place}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise UsageError(f"{place}: key {key!r:.80}; names are text that does not begin with $")
        return {str(key): _written(member, f"{place}[{key!r:.80}]", depth + 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_written(member, f"{place}[{index}]", depth + 1) for index, member in enumerate(value)]
    if hasattr(value, "ndim") and hasattr(value, "item") and _is_one(value):
        value = value.item()  # as torch and numpy make a number of a loss of shape [1]
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        if value.bit_length() > _WIDEST:
            raise UsageError(f"{place}: a number of {value.bit_length():,} bits, at most {_WIDEST:,}; give it as text")
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: str(number)}
    raise UsageError(
        f"{place}: {type(value).__name__} is no JSON value; texts, numbers, booleans, None, lists and mappings are"
        + (f"; it has shape {list(value.shape)}: give .mean().item(), or .tolist()" if hasattr(value, "shape") else "")
    )


def _is_one(value: Any) -> bool:
    """Whether an array or tensor has a single element."""
    return value.ndim == 0 or math.prod(getattr(value, "shape", (0,))) == 1


def read(metadata: Any) -> dict[str, Any]:
    """The mapping that was given, from what was written. What this version does not know stays as it is."""
    return {name: _read(value) for name, value in metadata.items()} if isinstance(metadata, dict) else {}


def form(value: Any) -> Any:
    """What `read` has given, as it was written; nothing is refused."""
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
