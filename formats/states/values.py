"""Encode single values of the typed tree: Python and numpy scalars, strings, bytes, long lists of integers.

JSON represents ``null``, booleans, strings, integers within ±2^53 and finite floats directly. Every other value is an
object with one member, whose key is a tag:

========================  ==================================================================================
``{"$int": "..."}``       integer beyond ±2^53, decimal, at most 4300 digits
``{"$float": "..."}``     ``nan`` (bits 7ff8000000000000), ``inf``, ``-inf``; other NaNs: 16 hex digits, big-endian
``{"$complex": [r, i]}``  two floats, each in its own form
``{"$str": "..."}``       text with lone surrogates: base64 of UTF-8 with surrogates
``{"$bytes": "..."}``     base64; ``$bytearray`` likewise
``{"$np": [d, "..."]}``   numpy scalar: logical dtype, little-endian bytes in hex
``{"$ints": [c, t, b]}``  at least 32 integers: ``list`` or ``tuple``; the narrowest of ``u1 u2 u4 u8 i1 i2 i4 i8`` that
                          holds all (unsigned first); base64 of their little-endian bytes
========================  ==================================================================================

Each value has exactly one form: equal states have equal text, and therefore one hash.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import dtypes

__all__ = ["MAX_PLAIN_INT", "decode", "encode", "is_literal", "is_plain_text", "pack_integers"]

MAX_PLAIN_INT: Final = 2**53
_DIGITS: Final = 4300  # CPython's limit for reading an integer; stated here because other readers must know it
_HUGE: Final = 10**_DIGITS
_INTEGER: Final = re.compile(f"-?[1-9][0-9]{{0,{_DIGITS - 1}}}")
_PACK_FROM: Final = 32
_CODES: Final = {"u1": 2**8, "u2": 2**16, "u4": 2**32, "u8": 2**64, "i1": 2**7, "i2": 2**15, "i4": 2**31, "i8": 2**63}
_NO_SCALAR: Final = ("C32", "F4_E2M1_X2")
_NAN: Final = "7ff8000000000000"
_FLOATS: Final = {_NAN: "nan", "7ff0000000000000": "inf", "fff0000000000000": "-inf"}
_FLOAT_BITS: Final = {text: bits for bits, text in _FLOATS.items()}


def is_plain_text(text: str) -> bool:
    """Whether `text` is valid Unicode, so that JSON preserves it (it would join two lone surrogates)."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_literal(value: object) -> bool:
    """Whether `encode` returns `value` itself, found without a call: most values of a state. False says nothing."""
    kind = type(value)
    return (
        kind is bool
        or value is None
        or (kind is float and math.isfinite(value))  # type: ignore[arg-type]  # mypy does not narrow by `kind is`
        or (kind is int and -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT)  # type: ignore[operator]  # as above
        or (kind is str and value.isascii())  # type: ignore[attr-defined]  # as above
    )


def encode(value: object) -> Any:
    """Return the JSON form of a scalar, or `NotImplemented` if `value` is not exactly of a known scalar type.

    Raises:
        UnsupportedStateError: a numpy scalar or an integer for which the format has no form.
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic):
        if isinstance(value, np.str_ | np.bytes_ | np.datetime64 | np.timedelta64):
            return NotImplemented  # `state_objects` takes them apart
        dtype = None if isinstance(value, np.void) else dtypes.from_numpy(value.dtype)
        if dtype is None:
            raise UnsupportedStateError(f"numpy.{type(value).__name__} cannot be stored: store its item()")
        return {"$np": [dtype.name, np.asarray(value).astype(dtype.numpy, copy=False).tobytes().hex()]}
    return NotImplemented


def pack_integers(values: list[Any] | tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the ``$ints`` form of a list or tuple; None if it is short, or not all are integers of up to 64 bits."""
    if len(values) < _PACK_FROM or set(map(type, values)) != {int}:
        return None
    code = _narrowest(min(values), max(values))
    if code is None:
        return None
    packed = np.array(values, f"<{code}").tobytes()
    return {"$ints": ["list" if isinstance(values, list) else "tuple", code, base64.b64encode(packed).decode()]}


def _narrowest(low: int, high: int) -> str | None:
    for code, limit in _CODES.items():
        if high < limit and low >= (0 if code[0] == "u" else -limit):
            return code
    return None


def decode(tag: str, body: Any) -> Any:
    """Return the value of ``{tag: body}``.

    Raises:
        FormatError: `encode` writes `body` for no value. No memory larger than `body` is allocated.
        KeyError: no value has this tag.
    """
    return _DECODERS[tag](body)


def _int(value: int) -> Any:
    if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
        return value
    if abs(value) >= _HUGE:
        raise UnsupportedStateError(f"an integer of more than {_DIGITS} digits cannot be stored")
    return {"$int": str(value)}


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value).hex()
    return {"$float": _FLOATS.get(bits, bits)}


def _text(value: str) -> Any:
    if is_plain_text(value):
        return value
    return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


_ENCODERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int,
    float: _float,
    str: _text,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode()},
}


def _decode_int(body: Any) -> int:
    if not isinstance(body, str) or not _INTEGER.fullmatch(body):
        raise FormatError(f"$int is {body!r:.80}")
    value = int(body)
    if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
        raise FormatError(f"$int holds the small number {value}")
    return value


def _decode_float(body: Any) -> float:
    bits = _FLOAT_BITS.get(body, body) if isinstance(body, str) else ""
    if not re.fullmatch("[0-9a-f]{16}", bits) or (bits == body and bits in _FLOATS):
        raise FormatError(f"$float is {body!r:.80}")
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    if math.isfinite(value):
        raise FormatError(f"$float holds the finite number {value!r}")
    return value


def _decode_complex(body: Any) -> complex:
    if not isinstance(body, list) or len(body) != 2:
        raise FormatError(f"$complex is {body!r:.80}")
    return complex(*(_real(part) for part in body))


def _real(part: Any) -> float:
    if isinstance(part, float) and math.isfinite(part):
        return part
    if isinstance(part, dict) and list(part) == ["$float"]:
        return _decode_float(part["$float"])
    raise FormatError(f"$complex has a part {part!r:.80}")


def _decode_bytes(body: Any) -> bytes:
    if not isinstance(body, str):
        raise FormatError(f"base64 text expected, not {body!r:.80}")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise FormatError(f"bad base64 text: {error}") from error


def _decode_text(body: Any) -> str:
    try:
        text = _decode_bytes(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(f"$str: {error}") from error
    if is_plain_text(text):
        raise FormatError("$str holds plain text")
    return text


def _decode_numpy(body: Any) -> np.generic:
    if not isinstance(body, list) or len(body) != 2 or not isinstance(body[1], str):
        raise FormatError(f"$np is {body!r:.80}")
    dtype = dtypes.get(body[0])
    if dtype.name in _NO_SCALAR:
        raise FormatError(f"$np: {dtype.name} has no scalars in numpy")
    if not re.fullmatch(f"[0-9a-f]{{{2 * dtype.itemsize}}}", body[1]):
        raise FormatError(f"$np: {body[1]!r:.80} is not a {dtype.name} in hex")
    value: np.generic = np.frombuffer(bytes.fromhex(body[1]), dtype.numpy)[0]
    return value


def _decode_integers(body: Any) -> list[int] | tuple[int, ...]:
    if not isinstance(body, list) or len(body) != 3 or body[0] not in ("list", "tuple"):
        raise FormatError(f"$ints is {body!r:.80}")
    kind, code, text = body
    if not isinstance(code, str) or code not in _CODES:
        raise FormatError(f"$ints: unknown width {code!r:.80}")
    packed = _decode_bytes(text)
    if len(packed) % int(code[1]):
        raise FormatError(f"$ints: {len(packed)} bytes are not a whole number of {code} integers")
    values: list[int] = np.frombuffer(packed, f"<{code}").tolist()
    if len(values) < _PACK_FROM or _narrowest(min(values), max(values)) != code:
        raise FormatError(f"$ints: {len(values)} numbers do not need {code}")
    return values if kind == "list" else tuple(values)


_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$str": _decode_text,
    "$bytes": _decode_bytes,
    "$bytearray": lambda body: bytearray(_decode_bytes(body)),
    "$np": _decode_numpy,
    "$ints": _decode_integers,
}
