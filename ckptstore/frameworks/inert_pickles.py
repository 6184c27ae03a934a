"""Read a pickle without making any object of it: each call and each object stays a description with the global's name.

torch's own restricted unpickler refuses a file as soon as one part of it names an unknown class. A description tells
where that part is, so that it can be left out, or taken as plain values. No name is looked up, imported or called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import IO, Any, Final

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats.states.registered_types import Foreign

__all__ = ["InertObject", "KeyChoice", "Maker", "Part", "Values", "name_of", "read_inert"]


_RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Modules with other names in pickles of protocol 2, which torch.save writes."""


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """What a caller says of the parts of a file.

    Attributes:
        leave_out: globs of keys, joined by dots (``hyper_parameters``), that are left out.
        objects: globs of names of classes (``train.Config``) whose objects are taken as `Foreign` values.
        above: the key of the whole file in the state, with its dot; empty: the file is the state.
        left_out: the keys that were left out so far.
    """

    leave_out: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    above: str = ""
    left_out: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return bool(self.leave_out or self.objects)

    def below(self, key: str) -> KeyChoice:
        """For the file at `key` of the state."""
        return KeyChoice(self.leave_out, self.objects, f"{self.above}{key}.", self.left_out)

    def drops(self, path: str) -> bool:
        """Whether the part at `path` is left out."""
        return any(fnmatchcase(f"{self.above}{path}", glob) for glob in self.leave_out)

    def takes(self, name: str) -> bool:
        """Whether objects of a class are taken as values."""
        return any(fnmatchcase(name, glob) for glob in self.objects)


class _Described(type):
    """The class of the classes that stand for a pickle's globals."""

    known: str

    def __setattr__(cls, name: str, value: Any) -> None:
        raise FormatError(f"a pickle sets {name!r:.80} of a class")


class InertObject(metaclass=_Described):
    """What a pickle makes by a call of a global, or an object of a class, with what the pickle puts into it."""

    known = ""

    arguments: tuple[Any, ...]
    state: Any
    elements: list[Any]
    pairs: list[tuple[Any, Any]]

    def __new__(cls, *arguments: Any, **_more: Any) -> InertObject:
        """Note the arguments."""
        made = super().__new__(cls)
        made.arguments, made.state, made.elements, made.pairs = arguments, None, [], []
        return made

    def __setstate__(self, state: Any) -> None:
        """Note the state."""
        self.state = state

    def append(self, element: Any) -> None:
        """Note an element of a list."""
        self.elements.append(element)

    def extend(self, elements: list[Any]) -> None:
        """Note elements of a list."""
        self.elements.extend(elements)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        """Note a member of a mapping."""
        self.pairs.append((key, value))


def name_of(value: Any) -> str | None:
    """The name of a global that is a value in the pickle (a class as an argument); None: it is something else."""
    return value.known if isinstance(value, _Described) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], stored: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._stored = stored
        self._known: dict[str, type[InertObject]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """A class that stands for the global."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in self._known:
            self._known[full] = _Described(name, (InertObject,), {"known": full})  # type: ignore[assignment]
        return self._known[full]

    def persistent_load(self, pid: Any, /) -> Any:
        """A reference to something beside the pickle."""
        return self._stored(pid)


def read_inert(file: IO[bytes], stored: Callable[[Any], Any]) -> Any:
    """Read one pickle.

    Args:
        file: positioned at the pickle.
        stored: makes what stands for a reference to a storage.

    Raises:
        FormatError: it is damaged.
    """
    try:
        return _Unpickler(file, stored).load()
    except (OSError, MemoryError, FormatError):
        raise
    except Exception as error:  # a damaged pickle raises errors of many kinds
        raise FormatError(f"not a pickle, or damaged: {error!r:.200}") from error


class Part:
    """One `InertObject` at its place in a file, for the function that makes its value."""

    def __init__(self, values: Values, made: InertObject, path: str) -> None:
        self._values = values
        self._made = made
        self._path = path

    def of(self, value: Any) -> Any:
        """The value of something in it."""
        return self._values.of(value, self._path)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Values of the arguments of its call."""
        return tuple([self.of(one) for one in self._made.arguments])

    @property
    def state(self) -> Any:
        """Its state; None: it has none."""
        state = self._made.state
        return self._values.pairs(state.items(), self._path) if type(state) is dict else self.of(state)

    @property
    def pairs(self) -> dict[Any, Any]:
        """Its members, as those of a mapping."""
        return self._values.pairs(self._made.pairs, self._path)

    @property
    def elements(self) -> list[Any]:
        """Its elements, as those of a list."""
        return [self._values.of(one, _at(self._path, number)) for number, one in enumerate(self._made.elements)]


Maker = Callable[[Part], Any]
"""Makes the value of a `InertObject`. Its argument is not trusted."""


class Values:
    """Makes the values of an inert pickle, part by part, and notes which cannot be made.

    Attributes:
        refused: key of a part -> why it cannot be made.
    """

    def __init__(self, makers: Mapping[str, Maker], alone: Callable[[str], Any], choice: KeyChoice) -> None:
        """
        Args:
            makers: name of a global -> what makes the values of its calls.
            alone: the value of a global that is a value itself; raises `KeyError`.
            choice: what the caller says. It notes what is left out.
        """
        self.refused: dict[str, str] = {}
        self._makers = makers
        self._alone = alone
        self._choice = choice
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, path: str = "") -> Any:
        """The value of a part at `path`. None for one that is refused."""
        if isinstance(value, InertObject):
            if id(value) not in self._made:
                self._made[id(value)] = (value, self._object(value, path))
            return self._made[id(value)][1]
        kind = type(value)
        if kind is dict:
            return self.pairs(value.items(), path)
        if kind is list:
            return [self.of(one, _at(path, number)) for number, one in enumerate(value)]
        if kind is tuple:
            return tuple([self.of(one, _at(path, number)) for number, one in enumerate(value)])
        if kind in (set, frozenset):
            return kind([self.of(one, path) for one in value])
        if (name := name_of(value)) is None:
            return value
        try:
            return self._alone(name)
        except KeyError:
            return self._refuse(path, f"it is {name}, a class or function")

    def pairs(self, pairs: Iterable[tuple[Any, Any]], path: str) -> dict[Any, Any]:
        """The values of the members of a mapping, without those that are left out."""
        made = {}
        for key, value in pairs:
            below = _at(path, key)
            if self._choice.drops(below):
                self._choice.left_out.append(f"{self._choice.above}{below}")
            else:
                made[self.of(key, below)] = self.of(value, below)
        return made

    def _object(self, value: InertObject, path: str) -> Any:
        name = type(value).known
        maker = self._makers.get(name)
        if maker is None and not self._choice.takes(name):
            return self._refuse(path, f"it is a {name}, which only its own code can make")
        part = Part(self, value, path)
        try:
            return _foreign(name, value, part) if maker is None else maker(part)
        except (RecursionError, MemoryError):
            raise
        except (FormatError, UnsupportedStateError) as error:
            return self._refuse(path, str(error))
        except Exception as error:  # noqa: BLE001 - constructors refuse wrong arguments with many kinds of errors
            return self._refuse(path, f"a {name} of unknown form: {error!r:.120}")

    def _refuse(self, path: str, why: str) -> None:
        self.refused.setdefault(f"{self._choice.above}{path}", why)


def _foreign(name: str, value: InertObject, part: Part) -> Foreign:
    """An object as values: its fields by name, or the value of an enum."""
    if value.elements or not (value.state is None or type(value.state) is dict):
        raise UnsupportedStateError(f"a {name} has parts without names, so it cannot be taken as values")
    members, attributes = part.pairs, part.state or {}
    # Prevents: a member that is lost, because an attribute has its name.
    if both := [str(key) for key, one in members.items() if key in attributes and attributes[key] is not one]:
        raise UnsupportedStateError(f"a {name} has {both[0]!r:.80} as a member and as an attribute")
    fields = members | attributes
    if not value.arguments and all(type(key) is str for key in fields):
        return Foreign(name, fields, "dataclass")
    if len(value.arguments) == 1 and not fields:
        return Foreign(name, part.arguments[0], "enum")
    raise UnsupportedStateError(f"a {name} is made by a call with arguments, so it cannot be taken as values")


def _at(path: str, key: Any) -> str:
    word = str(key) if isinstance(key, str | int | float) else f"({type(key).__name__})"
    return f"{path}.{word}" if path else word
