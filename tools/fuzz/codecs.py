"""The codec target: ``codec, base, length`` in eight bytes, then a payload; or JSON, as the parameters of a codec.

If kernels are compiled, both their forms read every payload and must agree.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np

from ckptstore.errors import CkptError, CorruptionError
from ckptstore.formats import codecs
from ckptstore.formats.codecs.kernels import Bytes
from tools.fuzz.guard import Target, Violation
from tools.fuzz.kernels import both_forms, poison

__all__ = ["CODECS", "KINDS"]

_HEAD: Final = struct.Struct("<BBxxI")
_LONGEST: Final = 3 << 19  # one block and a half
_GUARD: Final = 64
_SCRATCH: Final = 60
"""Limit of memory for decoding, as a multiple of the logical length, this thread's scratch memory included."""

KINDS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("raw", {}),
    *(("planes", {"word": word, "map": name}) for word in (1, 2, 4, 8) for name in ("none", "rotate", "fold")),
    *(("xor", {"word": word}) for word in (1, 2, 4, 8)),
    *(("sub", {"word": word}) for word in (1, 2, 4, 8)),
    ("sub", {"word": 4, "context": [23, 110, 125]}),
    ("sub", {"word": 2, "context": [7, 110, 125]}),
    ("sub", {"word": 1, "context": [3, 0, 15]}),
    ("sub", {"word": 8, "context": [52, 1000, 1003]}),
    ("prefix", {"word": 4, "bits": 9}),
    ("prefix", {"word": 2, "bits": 12, "group": 256}),
    ("prefix", {"word": 1, "bits": 1, "group": 16384}),
    ("prefix", {"word": 8, "bits": 12}),
    ("derive", {"to": "BF16"}),
    ("derive", {"to": "F16"}),
)


def _run(data: bytes) -> bool:
    if data[:1] == b"{":
        return _params(data)
    if len(data) < _HEAD.size:
        return False
    kind, seed, length = _HEAD.unpack_from(data)
    length %= _LONGEST
    name, params = KINDS[kind % len(KINDS)]
    codec, payload = codecs.codec(name, params), data[_HEAD.size :]
    base = _base(length * codec.base_ratio, seed)
    first = both_forms(lambda: _decoded(codec, payload, length, base), (CorruptionError,))
    poison()
    if _decoded(codec, payload, length, base) != first:
        raise Violation(f"{codec}: one payload decodes to two things")
    if codec.base_ratio < 2:
        state = np.array(base) if codec.base_ratio else np.full(length, 0x5A, np.uint8)
        codecs.apply([(codec, payload)], state)
        if state.tobytes() != first:
            raise Violation(f"{codec}: decodes to something else when applied")
    image = np.frombuffer(first, np.uint8)
    again = codecs.encode(codec, image, base if codec.base_ratio else None)
    if len(again) > codecs.bound(length) or _decoded(codec, again.tobytes(), length, base) != first:
        raise Violation(f"{codec}: what was decoded is encoded as something else")
    return True


def _params(data: bytes) -> bool:
    """``{"name": ..., "params": ...}``: a codec's parameters from a segment's metadata."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return False
    params = given.get("params")
    if not isinstance(params, dict) or not isinstance(given.get("name"), str):
        return False  # the segment's reader refuses these
    codec = codecs.codec(given["name"], params)
    if codecs.codec(codec.name, codec.params) != codec:
        raise Violation(f"{codec}: its parameters make another codec")
    image = _base(5000, 1)
    base = _base(5000 * codec.base_ratio, 2)
    payload = codecs.encode(codec, image, base if codec.base_ratio else None).tobytes()
    if _decoded(codec, payload, 5000, base) != image.tobytes():
        raise Violation(f"{codec}: loses bits")
    return True


def _base(length: int, seed: int) -> Bytes:
    """Bytes of a base: small, any, weights in fp32, the same rounded to bf16, none but zeros, doubles."""
    rng = np.random.default_rng(seed)
    match seed % 6:
        case 0:
            return rng.integers(0, 3, length, dtype=np.uint8)
        case 1:
            return rng.integers(0, 256, length, dtype=np.uint8)
        case 2:
            return rng.normal(0, 0.02, length // 4 + 1).astype("<f4").view(np.uint8)[:length].copy()
        case 3:
            halves = rng.normal(0, 0.02, length // 2 + 1).astype("<f4").view("<u4") >> 16
            return halves.astype("<u2").view(np.uint8)[:length].copy()
        case 4:
            return np.zeros(length, np.uint8)
        case _:
            return rng.normal(0, 0.02, length // 8 + 1).astype("<f8").view(np.uint8)[:length].copy()


def _decoded(codec: codecs.Codec, payload: bytes, length: int, base: Any) -> bytes:
    space = np.full(length + 2 * _GUARD, 0xC3, np.uint8)
    try:
        codecs.decode(codec, payload, length, base if codec.base_ratio else None, out=space[_GUARD : _GUARD + length])
    finally:
        if not (space[:_GUARD] == 0xC3).all() or not (space[_GUARD + length :] == 0xC3).all():
            raise Violation(f"{codec}: wrote outside of its memory")
    return space[_GUARD : _GUARD + length].tobytes()


def _moves(change: int, rng: np.random.Generator, count: int, bits: int) -> Any:
    """Typical changes of words of so many bits by training; each is the reason for one form."""
    match change:
        case 0:
            return np.zeros(count)
        case 1:  # few are changed
            return np.where(rng.random(count) < 0.01, 0x11, 0)
        case 2:
            return rng.random(count) < 0.3
        case 3:
            return rng.geometric(0.6, count) - 1
        case 4:  # up and down
            return rng.integers(-2, 3, count)
        case 5:  # small, and a few that are not
            return np.where(rng.random(count) < 0.02, 5 << (bits - 4), rng.geometric(0.2, count))
        case 6:  # the low half at random under a small high one
            return rng.integers(0, 1 << bits // 2, count) + ((rng.geometric(0.97, count) - 1) << bits // 2)
        case 7:
            return rng.normal(0, 2.0 ** (bits // 2), count)
        case _:
            return rng.integers(0, 1 << bits - 1, count)


_CHANGES: Final = 9


_LENGTHS: Final = {1: (40, 6001, (1 << 20) + 5000), 6: (700, 30_003)}


def _changed(codec: codecs.Codec, length: int, base: Bytes, change: int, seed: int) -> Bytes:
    word = codec.word
    count = length // word + 1
    before = np.zeros(count * word, np.uint8)
    if codec.base_ratio == 1:
        before[:length] = base  # others may have a base of another length: it says nothing about the words
    moved = np.asarray(_moves(change, np.random.default_rng(seed), count, 8 * word)).astype(np.int64)
    image = before.view(f"<u{word}") + moved.astype(f"<u{word}")
    return np.ascontiguousarray(image).view(np.uint8)[:length].copy()


def _seeds() -> list[bytes]:
    found = [json.dumps({"name": name, "params": params}).encode() for name, params in KINDS]
    for kind, (name, params) in enumerate(KINDS):
        codec = codecs.codec(name, params)
        for change in range(_CHANGES):
            lengths = _LENGTHS.get(change, (700, 6001 + change))
            for length in lengths:
                seed = (2, 3, 1, 5, 0, 4)[(change + length + kind) % 6]
                base = _base(length * codec.base_ratio, seed)
                image = _changed(codec, length, base, change, seed)
                for level in (0, 1):
                    try:
                        payload = codecs.encode(codec, image, base if codec.base_ratio else None, level=level).tobytes()
                    except CkptError as error:
                        raise Violation(f"{codec} does not encode: {error}") from error
                    if len(payload) < 1 << 15:
                        found.append(_HEAD.pack(kind, seed, length) + payload)
    return list(dict.fromkeys(found))


def _declared(data: bytes) -> int:
    if data[:1] == b"{" or len(data) < _HEAD.size:
        return 0
    return _SCRATCH * (int(_HEAD.unpack_from(data)[2]) % _LONGEST)


CODECS: Final = Target("codec", _run, _seeds, declared=_declared)
