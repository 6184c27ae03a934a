"""Objects of numpy that are stored as parts: dtypes, text, bytes, times and random generators (SPEC.md 3.4).

The parts come from an untrusted source, so every maker checks them.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats.states.object_parts import Parts, need, text_of

__all__ = ["NUMPY", "TAKERS", "make_dtype", "take_dtype", "take_generator", "take_random_state"]

_DTYPE: Final = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[A-Za-zμ]{1,7}\])?")
_UNIT: Final = re.compile("([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)")


def take_dtype(value: np.dtype[Any]) -> Parts:
    """Take a dtype apart. Raises `UnsupportedStateError`: it is one of records, or has metadata."""
    if not _DTYPE.fullmatch(value.str) or np.dtype(value.str) != value or value.metadata:
        raise UnsupportedStateError(f"numpy.dtype {value!s:.80} cannot be stored: store its str() or descr")
    return Parts("np.dtype", value.str)


def _take_array(value: Any) -> Parts | None:
    """Take an array or scalar apart that the format's element types do not have: text, bytes, times."""
    code = value.dtype.kind
    if code in "Mm":
        kind = "np.datetime64" if code == "M" else "np.timedelta64"
        unit, count = np.datetime_data(value.dtype)
        name = "" if unit == "generic" else unit if count == 1 else f"{count}{unit}"
        numbers = np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False).view("<i8")
        return Parts(kind, numbers if isinstance(value, np.ndarray) else int(numbers), name)
    if code not in "US":
        return None
    kind, wide = ("np.str", 4) if code == "U" else ("np.bytes", 1)
    if not isinstance(value, np.ndarray):
        return Parts(kind, value.item())
    letters = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False)).reshape(value.shape)
    length = value.dtype.itemsize // wide
    if not length:
        return Parts(kind, np.empty((*value.shape, 0), f"<u{wide}"))
    flat = letters.reshape(-1).view(f"<u{wide}")
    return Parts(kind, flat.reshape((*value.shape, length)))


def take_generator(value: np.random.Generator) -> Parts:
    """Take a generator apart. Raises `UnsupportedStateError`: its bit generator is not one of numpy's."""
    # What a SeedSequence would spawn next is not part of it.
    return Parts("np.generator", _bits(value.bit_generator.state))


def take_random_state(value: np.random.RandomState) -> Parts:
    """As `take_generator`."""
    return Parts("np.random_state", _bits(value.get_state(legacy=False)))


def _bits(state: Any) -> dict[str, Any]:
    try:
        _check_bits(state)
    except FormatError:
        what = f"a random generator with the bit generator {state.get('bit_generator')!r:.80}"
        raise UnsupportedStateError(f"{what}: store its .bit_generator.state, or get_state()") from None
    return dict(state)


TAKERS: Final[Mapping[type, Callable[[Any], Parts | None]]] = types.MappingProxyType(
    {
        np.ndarray: _take_array,
        np.str_: _take_array,
        np.bytes_: _take_array,
        np.datetime64: _take_array,
        np.timedelta64: _take_array,
    }
)
"""What takes an object of each type apart. Those of numpy.random are not imported here: see `state_objects`."""


def make_dtype(value: Any, _name: str) -> np.dtype[Any]:
    """Make a dtype. Raises `FormatError`."""
    need(bool(_DTYPE.fullmatch(text_of(value))))
    made: np.dtype[Any] = np.dtype(value)
    need(made.str == value)
    return made


def _array(value: Any, dtype: str, dimensions: int) -> Any:
    """Return a numpy array of the parts; a torch tensor is none."""
    need(isinstance(value, np.ndarray) and value.dtype == np.dtype(dtype) and value.ndim >= dimensions)
    return value


def _make_letters(value: Any, code: str) -> Any:
    if isinstance(value, str if code == "U" else bytes):
        return np.str_(value) if code == "U" else np.bytes_(value)
    wide = 4 if code == "U" else 1
    letters = np.ascontiguousarray(_array(value, f"<u{wide}", 1))
    # Prevents: a character that no text has, on which numpy fails when it is read.
    need(code == "S" or not letters.size or int(letters.max()) <= sys.maxunicode)
    length = value.shape[-1]
    need(length < 2**28)
    return np.ndarray(value.shape[:-1], np.dtype(f"<{code}{length}" if code == "U" else f"S{length}"), letters.data)


def _make_times(value: Any, name: str, code: str) -> Any:
    need(not name or bool(_UNIT.fullmatch(name)))
    dtype: np.dtype[Any] = np.dtype(f"<{code}8[{name}]" if name else f"<{code}8")
    unit, count = np.datetime_data(dtype)
    need(not name or name == (f"{count}{unit}" if count > 1 else unit))
    if type(value) is int:
        need(-(2**63) <= value < 2**63)
        made = np.array([value], "<i8").view(dtype)
    else:
        made = _array(value, "<i8", 0).view(dtype)
    # Prevents: a time without unit, which numpy has but neither prints nor compares.
    need(code == "m" or bool(name) or bool(np.isnat(made).all()))
    return made[0] if type(value) is int else made


def _check_bits(state: Any) -> None:
    """Raise `FormatError` if numpy must not see this state of a generator.

    Prevents: a position beyond the table, at which numpy reads memory that is not the generator's.
    """
    need(type(state) is dict and type(state.get("bit_generator")) is str and type(state.get("state")) is dict)
    inner, more, name = state["state"], list(state)[2:], state["bit_generator"]
    need(list(state)[:2] == ["bit_generator", "state"])
    if name == "MT19937":
        need(list(inner) == ["key", "pos"] and more in ([], ["has_gauss", "gauss"]))
        _words(inner["key"], "<u4", 624)
        _below(inner["pos"], 625)
        if more:
            _below(state["has_gauss"], 2)
            need(type(state["gauss"]) is float)
        return
    if name == "Philox":
        need(list(inner) == ["counter", "key"] and more == ["buffer", "buffer_pos", "has_uint32", "uinteger"])
        for words, count in ((inner["counter"], 4), (inner["key"], 2), (state["buffer"], 4)):
            _words(words, "<u8", count)
        _below(state["buffer_pos"], 5)
    elif name == "SFC64":
        need(list(inner) == ["state"] and more == ["has_uint32", "uinteger"])
        _words(inner["state"], "<u8", 4)
    else:
        need(name in ("PCG64", "PCG64DXSM") and list(inner) == ["state", "inc"] and more == ["has_uint32", "uinteger"])
        _below(inner["state"], 2**128)
        _below(inner["inc"], 2**128)
    _below(state["has_uint32"], 2)
    _below(state["uinteger"], 2**32)


def _below(number: Any, end: int) -> None:
    need(type(number) is int and 0 <= number < end)


def _words(words: Any, dtype: str, count: int) -> None:
    need(isinstance(words, np.ndarray) and words.dtype == np.dtype(dtype) and words.shape == (count,))


def _make_bits(value: Any) -> Any:
    _check_bits(value)
    made = getattr(np.random, value["bit_generator"])(0)  # one of the names that were checked
    made.state = value
    return made


def _make_generator(value: Any, _name: str) -> np.random.Generator:
    need(type(value) is dict and "gauss" not in value)
    return np.random.Generator(_make_bits(value))


def _make_random_state(value: Any, _name: str) -> np.random.RandomState:
    _check_bits(value)
    need("gauss" in value)
    made = np.random.RandomState(np.random.MT19937(0))
    made.set_state(value)
    return made


NUMPY: Final[Mapping[str, Callable[[Any, str], Any]]] = types.MappingProxyType(
    {
        "np.str": lambda value, _: _make_letters(value, "U"),
        "np.bytes": lambda value, _: _make_letters(value, "S"),
        "np.datetime64": lambda value, name: _make_times(value, name, "M"),
        "np.timedelta64": lambda value, name: _make_times(value, name, "m"),
        "np.generator": _make_generator,
        "np.random_state": _make_random_state,
    }
)
"""Kinds that are made of arrays, and so only where arrays are loaded."""
