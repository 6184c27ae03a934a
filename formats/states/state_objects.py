"""Take objects apart for the tree, and make them again (SPEC.md 3.4).

``{"$object": [kind, node]}`` or ``{"$object": [kind, node, name]}``: the node is the tree of the object's parts. This
module has the kinds of the standard library; `numpy_objects` and `frameworks.torch_objects` have the others. The parts
come from an untrusted source, so every maker checks them. None imports, calls or allocates anything by a name or number
that it has not checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import keyword
import pathlib
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ckptstore.errors import CkptError, FormatError, UnsupportedStateError
from ckptstore.formats.states.numpy_objects import TAKERS, make_dtype, take_dtype, take_generator, take_random_state
from ckptstore.formats.states.object_parts import KIND, Make, Parts, need, text_of
from ckptstore.formats.states.registered_types import REGISTERED, Foreign, by_name, by_type, fields_of

if TYPE_CHECKING:
    import decimal
    import fractions
    import zoneinfo

__all__ = ["WHOLE", "Record", "check", "loader", "take_apart"]

_KEY: Final = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+){0,3}")
_LENGTH: Final = re.compile("0|[1-9][0-9]{0,18}")
_DAY: Final = datetime.timedelta(days=1)


# namedtuples


class Record(tuple[Any, ...]):
    """A namedtuple that was loaded: its class has the name and the fields of the saved one, and is equal as a tuple.

    Classes are made here and not by `collections.namedtuple`, which runs the field names as code.
    """

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"expected {len(cls._fields)} values, got {len(made)}")
        return made

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Self:
        if unknown := changes.keys() - set(self._fields):
            raise ValueError(f"no field {min(unknown)!r}")
        return self._make({**self._asdict(), **changes}.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _record, (type(self).__name__, self._asdict())

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({parts})"


@functools.lru_cache(maxsize=256)
def _record_class(name: str, fields: tuple[str, ...]) -> type[Record]:
    members: dict[str, Any] = {field: property(itemgetter(at)) for at, field in enumerate(fields)}
    return type(name, (Record,), {**members, "__slots__": (), "_fields": fields, "__module__": __name__})


def _record(name: str, parts: Any) -> Record:
    if not isinstance(parts, dict) or not all(map(_is_field, parts)) or not name.isidentifier():
        raise FormatError("a namedtuple with invalid names")
    made: Record = _record_class(name, tuple(parts))._make(parts.values())
    return made


def _is_field(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name[0] != "_" and not keyword.iskeyword(name)


def _is_namedtuple(value: object) -> bool:
    names = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and isinstance(names, tuple)
        and len(names) == len(value) == len(set(names))
        and all(map(_is_field, names))
        and type(value).__name__.isidentifier()
    )


# Taking apart

_FACTORIES: Final[dict[str, Any]] = {
    one.__name__: one
    for one in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, OrderedDict, Counter, deque)
}
_PATHS: Final = {one.__name__: one for one in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def take_apart(value: object) -> Parts | None:
    """Return the parts of an object; None: it is of no kind that this module or a registration knows.

    Raises:
        UnsupportedStateError: it is of a known kind, but has something that cannot be stored.
    """
    kind = type(value)
    if (known := by_type(kind)) is not None:
        return Parts(known.kind, known.to(value), known.name)
    if kind is Foreign:
        return _foreign(value)  # type: ignore[arg-type]  # mypy does not narrow by `type(...) is`
    if (taker := _TAKERS.get(kind) or _imported_taker(kind)) is not None:
        return taker(value)
    if isinstance(value, np.dtype):
        return take_dtype(value)
    if isinstance(value, Enum):
        return Parts("enum", value.value, f"{kind.__module__}.{kind.__qualname__}")
    if _is_namedtuple(value):
        return Parts("namedtuple", dict(zip(kind._fields, value, strict=True)), kind.__name__)  # type: ignore[attr-defined, call-overload]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Parts("dataclass", fields_of(value), f"{kind.__module__}.{kind.__qualname__}")
    return None


def _foreign(value: Foreign) -> Parts:
    texts = isinstance(value.kind, str) and isinstance(value.name, str)
    if not texts or not KIND.fullmatch(value.kind) or (value.kind == REGISTERED and not value.name):
        raise UnsupportedStateError(f"{value!r:.80} is not what a load returned")
    return Parts(value.kind, value.value, value.name)


def _take_defaultdict(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    if factory is None:
        return Parts("defaultdict", dict(value))
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise UnsupportedStateError(
            f"a defaultdict whose factory is {factory!r:.80}, which is code: store dict() of it, or use one of "
            f"{', '.join(sorted(_FACTORIES))} as factory"
        )
    return Parts("defaultdict", dict(value), name)


def _take_zone(value: zoneinfo.ZoneInfo) -> Parts:
    if not value.key or not _KEY.fullmatch(value.key):
        raise UnsupportedStateError("a ZoneInfo without a key of the time zone database: store its offset as timezone")
    return Parts("zoneinfo", value.key)


def _take_timezone(value: datetime.timezone) -> Parts:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    named = name != datetime.timezone(offset).tzname(None)
    return Parts("timezone", [*_take_delta(offset).value, *([name] if named else [])])


def _take_delta(value: datetime.timedelta) -> Parts:
    return Parts("timedelta", [value.days, value.seconds, value.microseconds])


def _take_moment(value: Any) -> Parts:
    text = value.replace(tzinfo=None).isoformat()
    plain = value.tzinfo is None and not value.fold
    return Parts(type(value).__name__, text if plain else [text, value.tzinfo, value.fold])


def _vars(value: Any) -> dict[str, Any]:
    if not all(type(name) is str for name in vars(value)):
        raise UnsupportedStateError(f"a {type(value).__name__} with a name that is not a str: store vars() of it")
    found: dict[str, Any] = vars(value)
    return found


_TAKERS: Final[dict[type, Callable[[Any], Parts | None]]] = {
    defaultdict: _take_defaultdict,
    deque: lambda value: Parts("deque", list(value), "" if value.maxlen is None else str(value.maxlen)),
    datetime.datetime: _take_moment,
    datetime.time: _take_moment,
    datetime.date: lambda value: Parts("date", value.isoformat()),
    datetime.timedelta: _take_delta,
    datetime.timezone: _take_timezone,
    argparse.Namespace: lambda value: Parts("namespace", _vars(value)),
    types.SimpleNamespace: lambda value: Parts("simple_namespace", _vars(value)),
    range: lambda value: Parts("range", [value.start, value.stop, value.step]),
    slice: lambda value: Parts("slice", [value.start, value.stop, value.step]),
    uuid.UUID: lambda value: Parts("uuid", str(value)),
    **{one: lambda value: Parts("path", str(value), type(value).__name__) for one in _PATHS.values()},
    **TAKERS,
}
_IMPORTED_TAKERS: Final[Mapping[tuple[str, str], Callable[[Any], Parts | None]]] = types.MappingProxyType(
    {
        ("decimal", "Decimal"): lambda value: Parts("decimal", str(value)),
        ("fractions", "Fraction"): lambda value: Parts("fraction", [value.numerator, value.denominator]),
        ("zoneinfo", "ZoneInfo"): _take_zone,
        ("numpy.random", "Generator"): take_generator,
        ("numpy.random", "RandomState"): take_random_state,
    }
)
"""By module and class. A state has such an object only if its module is imported: the first save need not do that."""


def _imported_taker(kind: type) -> Callable[[Any], Parts | None] | None:
    for (module, name), taker in _IMPORTED_TAKERS.items():
        if getattr(sys.modules.get(module), name, None) is kind:
            return taker
    return None


# Making


def _numbers(value: Any, count: int) -> list[int]:
    need(type(value) is list and len(value) == count and all(type(one) is int for one in value))
    return list(value)


def _same(made: Any, value: Any, text: str) -> Any:
    """Return what was made if it has this text: nothing has two texts."""
    need(value == text)
    return made


def _make_deque(value: Any, name: str) -> deque[Any]:
    need(type(value) is list and (not name or bool(_LENGTH.fullmatch(name))))
    longest = int(name) if name else None
    need(longest is None or len(value) <= longest <= sys.maxsize)
    return deque(value, longest)


def _make_defaultdict(value: Any, name: str) -> defaultdict[Any, Any]:
    need(type(value) is dict and (not name or name in _FACTORIES))
    return defaultdict(_FACTORIES[name] if name else None, value)


def _make_delta(value: Any, _name: str) -> datetime.timedelta:
    parts = _numbers(value, 3)
    need(0 <= parts[1] < 86400 and 0 <= parts[2] < 1_000_000 and abs(parts[0]) < 10**9)
    return datetime.timedelta(*parts)


def _make_timezone(value: Any, _name: str) -> datetime.timezone:
    need(type(value) is list and len(value) in (3, 4))
    offset = _make_delta(value[:3], "")
    need(-_DAY < offset < _DAY)
    if len(value) == 3:
        return datetime.timezone(offset)
    plain = datetime.timezone(offset).tzname(None)
    need(text_of(value[3]) != plain)
    return datetime.timezone(offset, value[3])


def _make_zone(value: Any, _name: str) -> Any:
    import zoneinfo

    # Prevents: a key that leaves the folder of the time zone database. Within it `ZoneInfo` reads a file of data.
    need(bool(_KEY.fullmatch(text_of(value))))
    try:
        return zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return Foreign("", value, "zoneinfo")


def _make_moment(known: Any, value: Any) -> Any:
    text, zone, fold = value if type(value) is list and len(value) == 3 else (value, None, 0)
    made = known.fromisoformat(text_of(text))
    need(made.tzinfo is None and made.isoformat() == text and type(fold) is int and fold in (0, 1))
    need(type(value) is str or zone is not None or fold == 1)
    if isinstance(zone, Foreign):  # a time zone that this machine does not have
        return Foreign("", value, known.__name__)
    need(zone is None or isinstance(zone, datetime.timezone) or _is_zone(zone))
    return made.replace(tzinfo=zone, fold=fold)


def _is_zone(value: object) -> bool:
    import zoneinfo

    return isinstance(value, zoneinfo.ZoneInfo)


def _make_date(value: Any, _name: str) -> datetime.date:
    made = datetime.date.fromisoformat(text_of(value))
    need(made.isoformat() == value)
    return made


def _make_vars(known: Any, value: Any) -> Any:
    need(type(value) is dict and all(type(one) is str for one in value))
    made = known()
    vars(made).update(value)
    return made


def _make_slice(value: Any, _name: str) -> slice:
    need(type(value) is list and len(value) == 3)
    return slice(*value)


def _make_fraction(value: Any, _name: str) -> fractions.Fraction:
    import fractions

    parts = _numbers(value, 2)
    need(parts[1] > 0)
    made = fractions.Fraction(*parts)
    need([made.numerator, made.denominator] == parts)
    return made


def _make_decimal(value: Any, _name: str) -> decimal.Decimal:
    import decimal

    made = decimal.Decimal(text_of(value))
    return decimal.Decimal(_same(made, value, str(made)))


def _make_uuid(value: Any, _name: str) -> uuid.UUID:
    made = uuid.UUID(text_of(value))
    need(str(made) == value)
    return made


def _make_path(value: Any, name: str) -> pathlib.PurePath:
    need(name in _PATHS and "\0" not in text_of(value))
    made: pathlib.PurePath = _PATHS[name](value)
    need(str(made) == value)
    return made


_PLAIN: Final[Mapping[str, Callable[[Any, str], Any]]] = types.MappingProxyType(
    {
        "deque": _make_deque,
        "defaultdict": _make_defaultdict,
        "namedtuple": lambda value, name: _record(name, value),
        "datetime": lambda value, _: _make_moment(datetime.datetime, value),
        "time": lambda value, _: _make_moment(datetime.time, value),
        "date": _make_date,
        "timedelta": _make_delta,
        "timezone": _make_timezone,
        "zoneinfo": _make_zone,
        "namespace": lambda value, _: _make_vars(argparse.Namespace, value),
        "simple_namespace": lambda value, _: _make_vars(types.SimpleNamespace, value),
        "range": lambda value, _: range(*_numbers(value, 3)),
        "slice": _make_slice,
        "decimal": _make_decimal,
        "fraction": _make_fraction,
        "uuid": _make_uuid,
        "path": _make_path,
        "np.dtype": make_dtype,
    }
)
"""Kinds that are made without looking at tensors. Those of torch are in `frameworks.torch_objects`."""
_NAMED: Final = ("deque", "defaultdict", "namedtuple", "path")
_FOREIGN: Final = (REGISTERED, "dataclass", "enum")
WHOLE: Final = frozenset(_PLAIN) - {"defaultdict", "namedtuple", "namespace", "simple_namespace"}
"""Kinds that people read as one value, not member by member."""


def check(kind: str, value: Any, name: str) -> Any:
    """Make an object where tensors are not at hand: a `Foreign` of all kinds that need them, and of unknown kinds.

    Raises:
        FormatError: its parts are of another form.
    """
    if kind in _PLAIN:
        return _made(_PLAIN[kind], kind, value, name)
    if kind == REGISTERED and not name:
        raise FormatError(f"state tree: {REGISTERED} without a name")
    return Foreign(name, value, kind)


def loader(more: Mapping[str, Callable[[Any, str], Any]], known: Iterable[str], *, keep_foreign: bool) -> Make:
    """Return the function that makes the objects of a loaded state.

    Args:
        more: makers of kinds that need arrays or tensors.
        known: further kinds that the format knows but that are not made here: they become a `Foreign`.
        keep_foreign: return a `Foreign` for a type that is not registered and for an unknown kind.
    """
    parts = frozenset(known)

    def make(kind: str, value: Any, name: str) -> Any:
        if kind in more:
            return _made(more[kind], kind, value, name)
        if kind in _PLAIN or (kind == REGISTERED and not name):
            return check(kind, value, name)
        if kind in _FOREIGN and (found := by_name(kind, name)) is not None:
            return found.make(value)
        if kind in ("dataclass", "enum") or kind in parts or keep_foreign:
            return Foreign(name, value, kind)
        if kind == REGISTERED:
            raise UnsupportedStateError(
                f"the state has an object of the type {name!r:.200}, which is not registered: call "
                "ckptstore.register(TYPE, to, from_, name) first, or load with keep_foreign=True to get its parts"
            )
        raise UnsupportedStateError(
            f"the state has an object of the kind {kind!r:.80}, which this version of ckptstore does not know: update "
            "it, or load with keep_foreign=True to get its parts"
        )

    return make


def _made(maker: Callable[[Any, str], Any], kind: str, value: Any, name: str) -> Any:
    try:
        if kind in _PLAIN and name and kind not in _NAMED:
            raise FormatError("it has a name")
        return maker(value, name)
    except (MemoryError, UnsupportedStateError):
        raise
    except FormatError as error:
        raise FormatError(f"state tree: {kind} of {value!r:.80}: {error}") from error
    except (CkptError, RecursionError):
        raise
    except Exception as error:  # constructors refuse wrong parts with many kinds of errors
        raise FormatError(f"state tree: {kind} of {value!r:.80}: {error!r:.200}") from error
