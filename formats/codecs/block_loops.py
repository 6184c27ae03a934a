"""Encode and decode chunks block by block with any codec, check every bound, and apply chains of deltas.

A codec (`codec`) processes one *block* at a time (SPEC section 5.4.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats.codecs.blocks import BLOCK, CHUNK, OVERHEAD, ZERO_GROUP, block_count, bound
from ckptstore.formats.codecs.codec import Buffer, Codec
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.plane_coder import FAST, Cursor
from ckptstore.formats.kernel_choice import steady

_NOTHING = np.empty(0, np.uint8)


@steady
def encode(
    codec: Codec, chunk: Buffer, base: Buffer | None = None, out: Bytes | None = None, level: int = FAST
) -> Bytes:
    """Encode one chunk.

    Args:
        codec: the codec.
        chunk: at most ``CHUNK`` (16 MiB) bytes of the tensor's little-endian image.
        base: for deltas, the same range of the base tensor (``codec.base_ratio`` bytes for each byte of the chunk).
        out: memory for the payload, at least ``bound(len(chunk))`` bytes. Reusing it avoids the page faults of fresh
            memory, a fifth of the time.
        level: 0: fast. 1: the smallest planes, even if slower. 2 to 19: zstd's levels, for data with repetitions. Only
            the encoder needs it.

    Returns:
        The payload, a view of ``out`` (or of fresh memory). It is at most 16 bytes per MiB longer than the chunk (one
        byte per MiB, except for ``sub`` with context). It is empty if the chunk equals what the base predicts.

    Raises:
        ValueError: the chunk exceeds ``CHUNK``, or the base or ``out`` has the wrong length.
    """
    data, reference = as_bytes(chunk), base_of(codec, len(as_bytes(chunk)), base)
    if len(data) > CHUNK:
        raise ValueError(f"a chunk has at most {CHUNK} bytes, not {len(data)}")
    target = np.empty(bound(len(data)), np.uint8) if out is None else out
    if len(target) < bound(len(data)):
        raise ValueError(f"out has {len(target)} bytes, but a chunk of {len(data)} needs {bound(len(data))}")
    at, ratio = 0, codec.base_ratio
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        at = codec.write(block, reference[start * ratio : (start + len(block)) * ratio], target, at, level)
    few = ratio and len(data) % codec.word == 0 and at <= OVERHEAD * block_count(len(data))
    unchanged = few and bool((target[:at] == ZERO_GROUP).all())
    return target[: 0 if unchanged else at]


def decode(codec: Codec, payload: Buffer, length: int, base: Buffer | None = None, out: Bytes | None = None) -> Bytes:
    """Decode a payload to its ``length`` logical bytes, into ``out`` if given. ``out`` may be the base of a delta.

    Raises:
        CorruptSegmentError: the payload is not a valid one of this codec for exactly ``length`` bytes.
        FormatError: ``length`` exceeds ``CHUNK``.
        ValueError: the base or ``out`` has the wrong length.
    """
    reference = base_of(codec, length, base)
    target = _target(length, out)
    cursor, ratio = _cursor(codec, payload, length), codec.base_ratio
    for start in range(0, length, BLOCK):
        block = target[start : start + BLOCK]
        codec.read(cursor, reference[start * ratio : (start + len(block)) * ratio], block)
    _finished(cursor)
    return target


def apply(links: Sequence[tuple[Codec, Buffer]], out: Bytes) -> None:
    """Apply a chain of payloads to ``out`` in one pass: block by block, all links while the block is in cache.

    ``out`` holds the base of the first link, unless that link needs none. All links encode the same range. A link of
    ``base_ratio`` 0 replaces the contents; a delta is added to them. No intermediate state is stored.

    Raises:
        CorruptSegmentError: as ``decode``. ``out`` is then partly changed, and must not be used.
        ValueError: a link has a base of another size (``derive``), so it cannot be applied.
    """
    _target(len(out), out)
    if any(codec.base_ratio > 1 for codec, _ in links):
        raise ValueError("a copy derived from another tensor (codec derive) cannot be applied in a chain")
    cursors = [(codec, _cursor(codec, payload, len(out))) for codec, payload in links]
    for start in range(0, len(out), BLOCK):
        block = out[start : start + BLOCK]
        for codec, cursor in cursors:
            codec.read(cursor, block if codec.base_ratio else _NOTHING, block)
    for _, cursor in cursors:
        _finished(cursor)


def as_bytes(data: Buffer) -> Bytes:
    """A flat uint8 view of any contiguous buffer. Raises `ValueError` if it is not contiguous."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("codecs need a contiguous array")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def base_of(codec: Codec, length: int, base: Buffer | None) -> Bytes:
    """The bytes of a chunk's base; empty if the codec needs none. Raises `ValueError` if it has another length."""
    needed = length * codec.base_ratio
    found = _NOTHING if base is None or not needed else as_bytes(base)
    if len(found) != needed:
        raise ValueError(f"{codec.name} needs {needed} bytes of base for a chunk of {length}, not {len(found)}")
    return found


def _target(length: int, out: Bytes | None) -> Bytes:
    if not 0 <= length <= CHUNK:
        raise FormatError(f"a chunk of {length} logical bytes; at most {CHUNK} are allowed")
    if out is None:
        return np.empty(length, np.uint8)
    if len(out) != length or out.dtype != np.uint8:
        raise ValueError(f"out has {len(out)} elements of {out.dtype}, but a chunk needs {length} of uint8")
    return out


def _cursor(codec: Codec, payload: Buffer, length: int) -> Cursor:
    data = as_bytes(payload)
    if not len(data) and codec.base_ratio and length % codec.word == 0:
        return _Unchanged(data)
    return Cursor(data)


class _Unchanged(Cursor):
    """Reads the empty payload of a chunk that equals its base: any number of zero groups (SPEC section 5.4.1)."""

    __slots__ = ()

    def byte(self) -> int:
        return ZERO_GROUP


def _finished(cursor: Cursor) -> None:
    if cursor.left:
        raise CorruptSegmentError(f"{cursor.left} bytes follow the last block of a payload")


class Fields:
    """Reads a codec's JSON parameters strictly: every problem raises a ``FormatError`` naming codec and parameter."""

    def __init__(self, codec: str, params: Mapping[str, Any]) -> None:
        self._codec = codec
        self._left = dict(params)

    def integer(self, key: str, default: int | None, allowed: range | tuple[int, ...]) -> int:
        """Read the integer ``key``, one of ``allowed``. If absent, return ``default`` (None: it is required)."""
        value = self._left.pop(key, default)
        if type(value) is not int or value not in allowed:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """Read the string ``key``, one of ``allowed``. If absent, return ``default``."""
        value = self._left.pop(key, default)
        if value not in allowed:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return str(value)

    def integers(self, key: str, count: int) -> tuple[int, ...] | None:
        """Read a list of ``count`` integers from 0 to 65535. If absent, return None."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        if any(type(item) is not int or not 0 <= item <= 65535 for item in value):
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return tuple(value)

    def finish(self) -> None:
        """Raise `FormatError` if parameters are left: the codec does not know them, a newer encoder might."""
        if self._left:
            raise FormatError(f"codec {self._codec}: unknown parameter {next(iter(self._left))!r}")
