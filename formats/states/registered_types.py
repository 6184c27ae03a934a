"""Types of the caller that a state may hold, and how they are stored.

A name in a file never imports or calls anything. Only a type that the caller has registered is made again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from ckptstore.errors import FormatError, UnsupportedStateError, UsageError

__all__ = ["REGISTERED", "Foreign", "Registration", "by_name", "by_type", "forget", "register"]

REGISTERED: Final = "registered"
"""The kind of an object whose form is `to(value)` of a registration."""
_BUILT_IN: Final = (dict, list, tuple, set, frozenset, str, int, float, bool, complex, bytes, bytearray, type(None))
_LONGEST: Final = 1000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Foreign:
    """The parts of an object that was not made again: its type is not registered, or not known here.

    It can be saved again, which stores the same object.

    Attributes:
        name: the name of the type, as registered or as the class had it. Empty if the kind has no names.
        value: the parts, as plain values, containers and tensors.
        kind: how it was stored: ``registered``, ``dataclass``, ``enum``, or a kind of SPEC.md 3.4.
    """

    name: str
    value: Any
    kind: str = REGISTERED


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered type. `kind` is ``dataclass`` or ``enum`` where the parts are those that it has anyway."""

    type: type
    name: str
    kind: str
    to: Callable[[Any], Any]
    from_: Callable[[Any], Any]

    def make(self, value: Any) -> Any:
        """Make an object of parts from an untrusted source. Raises `FormatError` if `from_` refuses them."""
        try:
            return self.from_(value)
        except (MemoryError, FormatError, UnsupportedStateError):
            raise
        except Exception as error:
            raise FormatError(f"{self.name}: its from_ refused the stored parts: {error!r:.200}") from error


_changing = threading.Lock()
_types: Mapping[type, Registration] = MappingProxyType({})
_names: Mapping[tuple[str, str], Registration] = MappingProxyType({})


def register(
    type: type[_T],
    to: Callable[[_T], Any] | None = None,
    from_: Callable[[Any], _T] | None = None,
    name: str | None = None,
) -> None:
    """Let states hold objects of a class, for this process. Call it before saving and before loading.

    Objects of exactly this class are stored as what `to` returns, with the name. Subclasses have to be registered
    themselves. May be called from any thread; a save or load that is running may not see the change.

    Registering a class again replaces it. So does a class of the same module and qualified name, because a module may
    be loaded again.

    Args:
        type: the class.
        to: returns the parts: anything that a state may hold, except an object of this class. It must not change them
            later.
        from_: makes an object of parts. The parts may come from a file of somebody else: check them. Leave out both
            for an `Enum` (its value), a dataclass (its fields) and a tensor class with ``__tensor_flatten__``.
        name: the name in the file. None: module and qualified name. Give a name if the class may move.

    Raises:
        UsageError: the class is stored without registration, the name is another class's, or `to` and `from_` are
            missing.
    """
    if not isinstance(type, _type) or type in _BUILT_IN:
        raise UsageError(f"register({type!r:.80}): pass a class that is not stored as it is")
    named = f"{type.__module__}.{type.__qualname__}" if name is None else name
    if not isinstance(named, str) or not 0 < len(named) <= _LONGEST or not named.isprintable():
        raise UsageError(f"name={named!r:.80}: pass a printable text of at most {_LONGEST} characters")
    if (to is None) != (from_ is None):
        raise UsageError(f"register({type.__qualname__}): pass both to= and from_=")
    found = _default(type, named) if to is None or from_ is None else Registration(type, named, REGISTERED, to, from_)
    global _types, _names  # replaced as a whole, so that readers need no lock
    with _changing:
        other = next((one for (_, known), one in _names.items() if known == named), None)
        if other is not None and other.type is not type and _path(other.type) != _path(type):
            raise UsageError(f"name={named!r} is that of {_path(other.type)}: pass another name=")
        kept = [one for one in _types.values() if one.type is not type and one is not other]
        _types = MappingProxyType({one.type: one for one in (*kept, found)})
        _names = MappingProxyType({(one.kind, one.name): one for one in _types.values()})


_type: Final = type  # `register` has an argument of this name


def forget(known: type) -> None:
    """Undo `register`. Does nothing for a class that is not registered."""
    global _types, _names  # see `register`
    with _changing:
        _types = MappingProxyType({one: found for one, found in _types.items() if one is not known})
        _names = MappingProxyType({(one.kind, one.name): one for one in _types.values()})


def by_type(known: type) -> Registration | None:
    """Return the registration of a class; None: it is not registered."""
    return _types.get(known)


def by_name(kind: str, name: str) -> Registration | None:
    """Return the registration for a stored kind and name; None: there is none."""
    return _names.get((kind, name))


def _path(known: type) -> str:
    return f"{known.__module__}.{known.__qualname__}"


def _default(known: type, name: str) -> Registration:
    """Return how to store a class that says itself what its parts are."""
    if issubclass(known, Enum):
        return Registration(known, name, "enum", lambda value: value.value, known)
    if dataclasses.is_dataclass(known):
        return Registration(known, name, "dataclass", fields_of, lambda parts: _dataclass(known, parts))
    if hasattr(known, "__tensor_flatten__") and hasattr(known, "__tensor_unflatten__"):
        return Registration(known, name, REGISTERED, _tensor_parts, lambda parts: _tensor_of(known, parts))
    raise UsageError(
        f"register({known.__qualname__}): pass to= and from_=; only an Enum, a dataclass and a tensor class with "
        "__tensor_flatten__ have them of their own"
    )


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object, not copied. Raises `UnsupportedStateError` if one has no value."""
    found = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            raise UnsupportedStateError(f"{_path(type(value))} has no value for its field {field.name!r:.80}")
        found[field.name] = getattr(value, field.name)
    return found


def _dataclass(known: type, parts: Any) -> Any:
    if not isinstance(parts, dict):
        raise FormatError(f"{_path(known)}: the stored fields are not a dict")
    fields = {field.name: field for field in dataclasses.fields(known)}
    # Prevents: a field of an older class that is silently lost.
    if unknown := [name for name in parts if name not in fields]:
        raise FormatError(
            f"{_path(known)} has no field {unknown[0]!r:.80}: register it with from_=, or load with keep_foreign=True"
        )
    made = known(**{name: value for name, value in parts.items() if fields[name].init})
    for name, value in parts.items():
        if not fields[name].init:
            object.__setattr__(made, name, value)
    return made


def _tensor_parts(value: Any) -> dict[str, Any]:
    names, context = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names}
    return {"tensors": tensors, "context": context, "size": list(value.size()), "stride": list(value.stride())}


def _tensor_of(known: Any, parts: Any) -> Any:
    if not isinstance(parts, dict) or list(parts) != ["tensors", "context", "size", "stride"]:
        raise FormatError(f"{_path(known)}: parts of another form")
    tensors, context, size, stride = parts.values()
    numbers = [*size, *stride] if isinstance(size, list) and isinstance(stride, list) else [None]
    if not isinstance(tensors, dict) or not all(type(one) is int for one in numbers):
        raise FormatError(f"{_path(known)}: parts of another form")
    if any(isinstance(one, np.ndarray) for one in tensors.values()):
        return Foreign(_path(known), parts)  # loaded without torch
    return known.__tensor_unflatten__(tensors, context, tuple(size), tuple(stride))
