"""Codecs: a chunk's bytes <-> fewer bytes, as pure functions on buffers.

=========  ================================================================================================
``raw``    the bytes themselves
``planes`` byte planes of the numbers, each left alone, packed, or Huffman-coded by zstd, as a sample suggests
``xor``    exclusive or with a base tensor, as planes
``diff``   difference of the bit patterns as integers, as planes; with ``context`` sorted by the base's exponents
``prefix`` the XOR paper's dictionary of sign and exponent prefixes
``derive`` a bf16 or fp16 tensor that is the rounded copy of an fp32 one: nothing
=========  ================================================================================================

Chunks are at most 16 MiB (``CHUNK``) of a tensor's little-endian image. Everything is lossless for every bit
pattern, and a payload is never larger than its chunk and 16 bytes per MiB. The functions keep no state, release
the interpreter lock in nearly all they do, and may run in as many threads as there are chunks.

A writer chooses a codec once for a tensor and encodes its chunks; the metadata keeps name and parameters::

    >>> import numpy as np
    >>> from ckptstore.formats import codecs
    >>> old = np.linspace(-1, 1, 100_000, dtype="<f4")
    >>> new = old * np.float32(1.00001)
    >>> ranges = codecs.sample_ranges(new.nbytes)
    >>> image, base = codecs.as_bytes(new), codecs.as_bytes(old)
    >>> chosen = codecs.choose("F32", [codecs.Sample(image[a:b], base[a:b]) for a, b in ranges])
    >>> chosen.name, chosen.params, chosen.ratio > 3
    ('diff', {'word': 4}, True)
    >>> payload = codecs.encode(chosen.codec, image, base, level=chosen.level)

A reader makes the codec of the metadata, and decodes. ``fold`` applies a whole chain in one pass, in place::

    >>> codec = codecs.codec("diff", {"word": 4})
    >>> restored = codecs.decode(codec, payload, len(image), base)
    >>> bool((restored == image).all())
    True
    >>> state = base.copy()
    >>> codecs.fold([(codec, payload), (codec, b"")], state)  # an empty payload: the chunk did not change
    >>> bool((state == image).all())
    True

Errors: ``FormatError`` for parameters that no codec of this version has, ``CorruptSegmentError`` for payloads that
are not what the codec writes; whatever the bytes, decoding ends, stays in bounds, and allocates a small multiple
of the chunk. The caller, who knows them, adds file, tensor and offset.

``formats/SPEC.md`` (5.4) specifies the bytes, ``docs/codecs.md`` says what each codec is for. ``kernels`` holds the hot
loops, in numpy; where numba is installed, compiled forms of them run, several times as fast and to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptstore.errors import IncompatibleFormatError
from ckptstore.formats.codecs.blocks import BLOCK, CHUNK, bound
from ckptstore.formats.codecs.choice import (
    FAST_POLICY,
    PAPER_POLICY,
    SMALL_POLICY,
    CodecChoice,
    Policy,
    Sample,
    candidates,
    choose,
    evaluate,
    sample_ranges,
    word_size,
)
from ckptstore.formats.codecs.coding import Buffer, Codec, as_bytes, decode, encode, fold
from ckptstore.formats.codecs.deltas import MAX_CLASSES, RUN, Context, Diff, Xor
from ckptstore.formats.codecs.derive import Derive
from ckptstore.formats.codecs.measure import context_entropy, difference_entropy, plane_entropy
from ckptstore.formats.codecs.plain import Planes, Raw
from ckptstore.formats.codecs.planecoder import DEPTH, FAST, THRIFTY
from ckptstore.formats.codecs.pooling import TINY, Member, Pool, plan_pools
from ckptstore.formats.codecs.prefix import Prefix, distinct_prefixes
from ckptstore.formats.codecs.sums import add, is_additive

__all__ = [
    "BLOCK",
    "CHUNK",
    "CODECS",
    "DEPTH",
    "FAST",
    "FAST_POLICY",
    "MAX_CLASSES",
    "PAPER_POLICY",
    "RUN",
    "SMALL_POLICY",
    "THRIFTY",
    "TINY",
    "Buffer",
    "Codec",
    "CodecChoice",
    "Context",
    "Derive",
    "Diff",
    "Member",
    "Planes",
    "Policy",
    "Pool",
    "Prefix",
    "Raw",
    "Sample",
    "Xor",
    "add",
    "as_bytes",
    "bound",
    "candidates",
    "choose",
    "codec",
    "context_entropy",
    "decode",
    "difference_entropy",
    "distinct_prefixes",
    "encode",
    "evaluate",
    "fold",
    "is_additive",
    "plan_pools",
    "plane_entropy",
    "sample_ranges",
    "word_size",
]

CODECS: Mapping[str, Callable[[Mapping[str, Any]], Codec]] = MappingProxyType(
    {kind.name: kind.parse for kind in (Raw, Planes, Xor, Diff, Prefix, Derive)}
)
"""Every codec's parser of parameters, by name."""


def codec(name: str, params: Mapping[str, Any]) -> Codec:
    """The codec that a segment's metadata names.

    Raises ``IncompatibleFormatError`` for an unknown name, ``FormatError`` for an unknown parameter.
    """
    if name not in CODECS:
        raise IncompatibleFormatError(f"unknown codec {name!r:.80}: this version knows {', '.join(CODECS)}")
    return CODECS[name](params)
