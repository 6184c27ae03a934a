"""The loops over a chunk's blocks that all codecs share.

A codec (`codec`) codes one *block* at a time; the functions here cut chunks into blocks, check every bound, and apply
chains of deltas.
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
    """The payload of one chunk.

    Args:
        chunk: at most ``CHUNK`` (16 MiB) bytes of the tensor's little-endian image.
        base: for deltas, the same range of the base tensor (``codec.base_ratio`` bytes for each of the chunk's).
        out: memory for the payload, at least ``bound(len(chunk))`` bytes; reusing it saves the page faults of fresh
            memory, a fifth of the time.
        level: 0 fast; 1 the smallest planes even where slower; 2 to 19 zstd's levels, for data with repetitions.
            Only the encoder needs it.

    Returns:
        A view of ``out`` (or of fresh memory), at most ``len(chunk)`` + 16 bytes per MiB long (one per MiB, except
        for ``sub`` with context); empty for a chunk that is what its base says.

    Raises:
        ValueError: a chunk beyond ``CHUNK``, or a base of the wrong length.
    """
    data, reference = as_bytes(chunk), _base(codec, len(as_bytes(chunk)), base)
    if len(data) > CHUNK:
        raise ValueError(f"a chunk has at most {CHUNK} bytes, not {len(data)}")
    target = np.empty(bound(len(data)), np.uint8) if out is None else out
    if len(target) < bound(len(data)):
        raise ValueError(f"{len(target)} bytes of space for a chunk of {len(data)}, {bound(len(data))} needed")
    at, ratio = 0, codec.base_ratio
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        at = codec.write(block, reference[start * ratio : (start + len(block)) * ratio], target, at, level)
    few = ratio and len(data) % codec.word == 0 and at <= OVERHEAD * block_count(len(data))
    unchanged = few and bool((target[:at] == ZERO_GROUP).all())
    return target[: 0 if unchanged else at]


def decode(codec: Codec, payload: Buffer, length: int, base: Buffer | None = None, out: Bytes | None = None) -> Bytes:
    """The ``length`` logical bytes of a payload, into ``out`` if given. ``out`` may be the base of a delta itself.

    Raises:
        CorruptSegmentError: the payload is not exactly one of this codec for ``length`` bytes.
        FormatError: ``length`` exceeds ``CHUNK``.
        ValueError: a base or ``out`` of the wrong length.
    """
    reference = _base(codec, length, base)
    target = _target(length, out)
    cursor, ratio = _cursor(codec, payload, length), codec.base_ratio
    for start in range(0, length, BLOCK):
        block = target[start : start + BLOCK]
        codec.read(cursor, reference[start * ratio : (start + len(block)) * ratio], block)
    _finished(cursor)
    return target


def apply(links: Sequence[tuple[Codec, Buffer]], out: Bytes) -> None:
    """Apply a chain of payloads to ``out`` in one pass: block by block, every link while the block is in cache.

    ``out`` holds the base of the first link, unless that link needs none. Every link codes the same range; a link
    of ``base_ratio`` 0 replaces what is below it, a delta is added to it. No intermediate state exists.

    Raises:
        CorruptSegmentError: as ``decode``. ``out`` is then partly changed, and worthless.
        ValueError: a link whose base is of another size (``derive``) cannot be applied.
    """
    _target(len(out), out)
    if any(codec.base_ratio > 1 for codec, _ in links):
        raise ValueError("a copy derived from another tensor has no base to be applied to")
    cursors = [(codec, _cursor(codec, payload, len(out))) for codec, payload in links]
    for start in range(0, len(out), BLOCK):
        block = out[start : start + BLOCK]
        for codec, cursor in cursors:
            codec.read(cursor, block if codec.base_ratio else _NOTHING, block)
    for _, cursor in cursors:
        _finished(cursor)


def as_bytes(data: Buffer) -> Bytes:
    """A flat uint8 view of any contiguous buffer."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("codecs work on contiguous memory")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _base(codec: Codec, length: int, base: Buffer | None) -> Bytes:
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
        raise ValueError(f"{len(out)} elements of space for a chunk of {length} bytes")
    return out


def _cursor(codec: Codec, payload: Buffer, length: int) -> Cursor:
    data = as_bytes(payload)
    if not len(data) and codec.base_ratio and length % codec.word == 0:
        return _Unchanged(data)
    return Cursor(data)


class _Unchanged(Cursor):
    """The payload of a chunk that equals its base: as many zero groups as are asked for, in no bytes at all."""

    __slots__ = ()

    def byte(self) -> int:
        return ZERO_GROUP


def _finished(cursor: Cursor) -> None:
    if cursor.left:
        raise CorruptSegmentError(f"{cursor.left} bytes follow the last block of a payload")


class Fields:
    """Strict reading of a codec's JSON parameters: every problem is a ``FormatError`` naming codec and parameter."""

    def __init__(self, codec: str, params: Mapping[str, Any]) -> None:
        self._codec = codec
        self._left = dict(params)

    def integer(self, key: str, default: int | None, allowed: range | tuple[int, ...]) -> int:
        """The integer ``key``, one of ``allowed``; ``default`` if absent (None: it must be there)."""
        value = self._left.pop(key, default)
        if type(value) is not int or value not in allowed:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """The text ``key``, one of ``allowed``."""
        value = self._left.pop(key, default)
        if value not in allowed:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return str(value)

    def integers(self, key: str, count: int) -> tuple[int, ...] | None:
        """A list of ``count`` integers from 0 to 65535, or None if absent."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count:
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        if any(type(item) is not int or not 0 <= item <= 65535 for item in value):
            raise FormatError(f"codec {self._codec}: parameter {key!r} is {value!r}")
        return tuple(value)

    def finish(self) -> None:
        """Raise for parameters that nobody asked for: a newer encoder may have meant something by them."""
        if self._left:
            raise FormatError(f"codec {self._codec}: unknown parameter {next(iter(self._left))!r}")
