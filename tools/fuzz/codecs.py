"""The codec target: ``codec, base, length`` in eight bytes, then a payload; or JSON, as the parameters of a codec."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np

from ckptstore.formats import codecs
from ckptstore.formats.codecs import kernels
from ckptstore.formats.errors import CkptError
from tools.fuzz.guard import Target, Violation

__all__ = ["CODECS"]

_HEAD: Final = struct.Struct("<BBxxI")
_LONGEST: Final = 3 << 19  # one block and a half
_GUARD: Final = 64
_SCRATCH: Final = 60
"""Times the logical length: what decoding may use, this thread's scratch memory included."""

KINDS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("raw", {}),
    *(("planes", {"word": word, "map": name}) for word in (1, 2, 4, 8) for name in ("none", "rotate", "fold")),
    *(("xor", {"word": word}) for word in (1, 2, 4, 8)),
    *(("diff", {"word": word}) for word in (1, 2, 4, 8)),
    ("diff", {"word": 4, "context": [23, 110, 125]}),
    ("diff", {"word": 2, "context": [7, 110, 125]}),
    ("diff", {"word": 1, "context": [3, 0, 15]}),
    ("diff", {"word": 8, "context": [52, 1000, 1003]}),
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
    first = _decoded(codec, payload, length, base)
    # Nothing that was in scratch memory before may show in what is decoded.
    for buffer in vars(kernels._local).values():
        buffer.fill(0xA5)
    if _decoded(codec, payload, length, base) != first:
        raise Violation(f"{codec}: one payload decodes to two things")
    if codec.base_ratio < 2:
        state = np.array(base) if codec.base_ratio else np.full(length, 0x5A, np.uint8)
        codecs.fold([(codec, payload)], state)
        if state.tobytes() != first:
            raise Violation(f"{codec}: decodes to something else when folded")
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


def _base(length: int, seed: int) -> codecs.Buffer:
    return np.random.default_rng(seed % 4).integers(0, 256 if seed % 2 else 3, length, dtype=np.uint8)


def _decoded(codec: codecs.Codec, payload: bytes, length: int, base: Any) -> bytes:
    room = np.full(length + 2 * _GUARD, 0xC3, np.uint8)
    try:
        codecs.decode(codec, payload, length, base if codec.base_ratio else None, out=room[_GUARD : _GUARD + length])
    finally:
        if not (room[:_GUARD] == 0xC3).all() or not (room[_GUARD + length :] == 0xC3).all():
            raise Violation(f"{codec}: wrote outside of its memory")
    return room[_GUARD : _GUARD + length].tobytes()


def _seeds() -> list[bytes]:
    found = [json.dumps({"name": name, "params": params}).encode() for name, params in KINDS]
    for kind, (name, params) in enumerate(KINDS):
        codec = codecs.codec(name, params)
        for seed, length in ((1, 40), (2, 700), (3, 6001), (2, (1 << 20) + 5000)):
            if length > 1 << 20 and kind % 5:
                continue
            base = _base(length * codec.base_ratio, seed)
            image = np.array(_base(length, 0 if length % 2 else seed))
            if codec.base_ratio == 1:
                image = np.array(base)
            image[:: 50 + seed] ^= 0x11
            try:
                payload = codecs.encode(codec, image, base if codec.base_ratio else None).tobytes()
            except CkptError as error:
                raise Violation(f"{codec} does not encode: {error}") from error
            if len(payload) < 1 << 15:
                found.append(_HEAD.pack(kind, seed, length) + payload)
    return found


def _declared(data: bytes) -> int:
    if data[:1] == b"{" or len(data) < _HEAD.size:
        return 0
    return _SCRATCH * (int(_HEAD.unpack_from(data)[2]) % _LONGEST)


CODECS: Final = Target("codec", _run, _seeds, declared=_declared)
