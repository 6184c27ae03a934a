"""Suggest what to store instead of an object that cannot be stored."""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from enum import Enum
from typing import Final

import numpy as np

__all__ = ["advice"]

_BUILTINS: Final = (dict, list, tuple, str, int, float, bytes, set, frozenset)
_HANDLES: Final = ("_io", "io", "_thread", "threading", "multiprocessing.synchronize", "socket", "_socket")


def advice(value: object) -> str:
    """Return a clause for an error message that says what to do about `value`. Never runs code of `value`'s class."""
    import decimal

    kind = type(value)
    if callable(getattr(kind, "state_dict", None)):
        return "store its state_dict()"
    if isinstance(value, Enum):
        return "store its value"
    if isinstance(value, os.PathLike):
        return "store str() of it"
    if (kind.__module__, kind.__qualname__) == ("_io", "BytesIO"):  # TransformerEngine's _extra_state
        return "store its bytes, getvalue() of it, and give load_state_dict io.BytesIO(them) again (docs/faq.md)"
    if isinstance(value, np.ndarray):
        return "store a plain array, np.asarray() of it"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "store its _asdict(), or tuple() of it"
    if isinstance(value, defaultdict):
        return "store dict() of it"
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return "store vars(x) of it"
    if isinstance(value, datetime.date | datetime.time):
        return "store .isoformat() of it"
    if isinstance(value, decimal.Decimal):
        return "store str() of it"
    if isinstance(value, datetime.tzinfo):
        return "use datetime.timezone or zoneinfo.ZoneInfo, or store .isoformat() of the time"
    for builtin in _BUILTINS:
        if isinstance(value, builtin):
            return f"store {builtin.__name__}() of it"
    if isinstance(value, deque | range | memoryview):
        return "store list() or bytes() of it"
    if isinstance(value, random.Random):
        return "store its getstate()"
    if isinstance(value, np.random.BitGenerator | np.random.SeedSequence):
        return "store its .state"
    if kind.__module__.partition(".")[0] == "torch":
        return _of_torch(kind)
    if isinstance(value, re.Pattern):
        return "store its .pattern"
    if kind.__module__ == "ipaddress" or isinstance(value, BaseException):
        return "store str() of it"
    if isinstance(value, Mapping):  # UserDict, as tokenizers return, ChainMap, a read-only view
        return "store dict() of it"
    if isinstance(value, Iterator) or kind.__module__ in _HANDLES:
        return "a handle is not state; leave it out and make it again when resuming"
    if isinstance(value, Sequence | Set | ValuesView):
        return "store list() of it"
    if isinstance(value, type) or callable(value):
        return "code is not state; leave it out and build it again when resuming"
    return (
        "store the numbers, strings, lists, dicts and tensors that it is made of, or call ckptstore.register with its "
        "type before saving and loading"
    )


def _of_torch(kind: type[object]) -> str:
    """Of an object of torch that has no `state_dict`."""
    if kind.__name__ in ("layout", "memory_format", "qscheme", "finfo", "iinfo"):
        return "store str() of it"
    if kind.__name__.endswith("Storage"):
        return "store the tensor that has it"
    return "store the tensors and plain values that it is made of"
