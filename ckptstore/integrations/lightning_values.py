"""Lightning's checkpoint dict as a state of the store, and back: without pickle."""

from __future__ import annotations

import argparse
import datetime
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

__all__ = ["as_saved", "as_state"]

_MARK: Final = "ckptstore.lightning/"


def as_state(value: Any) -> Any:
    """The same value of types that a store takes; an unknown type stays, and the store refuses it by its key path.

    Namespaces, paths and durations become marked dicts. Subclasses of dict (`AttributeDict`) become plain dicts, and
    subclasses of list become lists.
    """
    if isinstance(value, argparse.Namespace):
        return {f"{_MARK}namespace": as_state(vars(value))}
    if isinstance(value, PurePath):
        return {f"{_MARK}path": str(value)}
    if isinstance(value, datetime.timedelta):
        return {f"{_MARK}timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        kind = OrderedDict if type(value) is OrderedDict else dict
        return kind((key, as_state(one)) for key, one in value.items())
    if isinstance(value, list):
        return [as_state(one) for one in value]
    if type(value) is tuple:
        return tuple(as_state(one) for one in value)
    return value


def as_saved(value: Any) -> Any:
    """What Lightning saved, from the state that `as_state` made of it."""
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(key := next(iter(value)), str) and key.startswith(_MARK):
            return _MADE[key.removeprefix(_MARK)](as_saved(value[key]))
        if isinstance(value, Counter):
            return value
        return type(value)((key, as_saved(one)) for key, one in value.items())
    if isinstance(value, list):
        return [as_saved(one) for one in value]
    if type(value) is tuple:
        return tuple(as_saved(one) for one in value)
    return value


_MADE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "namespace": lambda members: argparse.Namespace(**members),
    "path": Path,
    "timedelta": lambda parts: datetime.timedelta(*parts),
}
