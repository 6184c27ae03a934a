"""Inert objects of the standard library in pickles that torch loads with ``weights_only``: Namespace, paths, dates.

Training scripts store them with the weights. A pickle makes an object by a call of a global. The functions here have
the names of those globals, check their arguments, and make values only: they import, open and allocate nothing that the
pickle names. Classes of anything else (an enum, a dataclass, a namedtuple of a script) are never called. Neither is
`collections.deque`, which torch's unpickler cannot fill: `inert_pickles` reads a file with one.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import pathlib
import re
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ckptstore.errors import FormatError

__all__ = ["ALLOWED_OBJECTS", "DefaultDicts"]

_LONGEST: Final = 4300  # digits: see `formats.states.values`
_FRACTION: Final = re.compile(f"-?[0-9]{{1,{_LONGEST}}}(/[0-9]{{1,{_LONGEST}}})?", re.ASCII)


class _Factory:
    """Represents a builtin type as the factory of a defaultdict. It cannot be called."""

    def __init__(self, known: type) -> None:
        self.known = known


_FACTORIES: Final = {one.__name__: _Factory(one) for one in (bool, dict, float, int, list, str, tuple)}


class DefaultDicts:
    """The defaultdicts of one file.

    torch's unpickler fills plain dicts only. So each one is a plain dict until `restored`, after the load.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[dict[Any, Any], Any]] = {}

    def make(self, *factory: Any) -> dict[Any, Any]:
        """For ``collections.defaultdict`` in a pickle. Raises `FormatError` if the factory is not a known builtin."""
        (known,) = factory or (None,)
        # These stand for themselves in a pickle that torch reads, and `_frozenset` for its type.
        found = known.known if isinstance(known, _Factory) else frozenset if known is _frozenset else known
        if not isinstance(known, _Factory) and found not in (None, set, frozenset, complex, OrderedDict, Counter):
            raise FormatError(f"a pickled defaultdict whose factory is {known!r:.80}")
        made: dict[Any, Any] = {}
        self._made[id(made)] = (made, found)
        return made

    def restored(self, state: Any) -> Any:
        """Return the state with the defaultdicts in the places of their dicts."""
        return self._restored(state, {}) if self._made else state

    def _restored(self, value: Any, seen: dict[int, Any]) -> Any:
        kind = type(value)
        if id(value) in seen:
            return seen[id(value)]
        if kind in (argparse.Namespace, types.SimpleNamespace):
            seen[id(value)] = value
            for name, one in list(vars(value).items()):
                vars(value)[name] = self._restored(one, seen)
        elif kind in (dict, OrderedDict, Counter):
            made = defaultdict(self._made[id(value)][1]) if id(value) in self._made else value
            seen[id(value)] = made
            for key, one in list(value.items()):
                made[key] = self._restored(one, seen)
            return made
        elif kind is list:
            seen[id(value)] = value
            value[:] = [self._restored(one, seen) for one in value]
        elif kind is tuple:
            seen[id(value)] = made_tuple = tuple([self._restored(one, seen) for one in value])
            return made_tuple
        return value


def _path(*parts: Any) -> pathlib.PurePath:
    return pathlib.PosixPath(*map(_text, parts))


def _pure_path(*parts: Any) -> pathlib.PurePath:
    return pathlib.PurePosixPath(*map(_text, parts))


def _windows_path(*parts: Any) -> pathlib.PurePath:
    """A path of another machine: a `WindowsPath` exists only there."""
    return pathlib.PureWindowsPath(*map(_text, parts))


def _text(part: Any) -> str:
    if not isinstance(part, str) or "\0" in part:
        raise FormatError(f"a pickled path has the part {part!r:.80}")
    return part


def _decimal(text: Any) -> decimal.Decimal:
    if not isinstance(text, str):
        raise FormatError(f"a pickled Decimal of {text!r:.80}")
    return decimal.Decimal(text)


def _fraction(*parts: Any) -> fractions.Fraction:
    # Prevents: "1e999999999", of which Fraction makes an integer with as many digits.
    if len(parts) == 1 and isinstance(parts[0], str) and _FRACTION.fullmatch(parts[0]):
        return fractions.Fraction(parts[0])
    return fractions.Fraction(*_integers(parts, 2))


def _range(*parts: Any) -> range:
    return range(*_integers(parts, 3))


def _slice(*parts: Any) -> slice:
    return slice(*parts)


def _frozenset(*parts: Any) -> frozenset[Any]:
    if len(parts) != 1 or not isinstance(parts[0], list | tuple | set):
        raise FormatError("a pickled frozenset of unknown form")
    return frozenset(parts[0])


def _integers(parts: tuple[Any, ...], most: int) -> tuple[int, ...]:
    if not 1 <= len(parts) <= most or not all(type(one) is int for one in parts):
        raise FormatError(f"pickled integers expected, not {parts!r:.80}")
    return parts


_Allowed: TypeAlias = tuple[Callable[..., Any] | _Factory, str]

ALLOWED_OBJECTS: Final[list[_Allowed]] = [
    (argparse.Namespace, "argparse.Namespace"),  # its constructor and its state set attributes, and run nothing
    (types.SimpleNamespace, "types.SimpleNamespace"),
    (datetime.datetime, "datetime.datetime"),  # these are written in C, check their bytes and run nothing
    (datetime.date, "datetime.date"),
    (datetime.time, "datetime.time"),
    (datetime.timedelta, "datetime.timedelta"),
    (datetime.timezone, "datetime.timezone"),
    *((_path, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((_pure_path, f"{module}.PurePosixPath") for module in ("pathlib", "pathlib._local")),
    *(
        (_windows_path, f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")
        for name in ("WindowsPath", "PureWindowsPath")
    ),
    (_decimal, "decimal.Decimal"),
    (_fraction, "fractions.Fraction"),
    (_range, "builtins.range"),
    (_slice, "builtins.slice"),
    (_frozenset, "builtins.frozenset"),
    *((factory, f"builtins.{name}") for name, factory in _FACTORIES.items()),
]
"""For ``torch.serialization.safe_globals``, in addition to `pickled_arrays.ALLOWED`."""
