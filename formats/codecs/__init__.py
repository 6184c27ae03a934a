"""Codecs: a chunk's bytes <-> fewer bytes, as pure functions on buffers; docs/codecs.md shows how they are used.

`kernels` holds the hot loops, in numpy; where numba is installed, compiled forms of them run, to the same bytes.
Imports what is in `formats` and knows nothing of codecs.
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
from ckptstore.formats.codecs.coding import Buffer, Codec, apply, as_bytes, decode, encode
from ckptstore.formats.codecs.deltas import MAX_CLASSES, RUN, Context, Sub, Xor
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
    "WITHOUT_BASE",
    "Buffer",
    "Codec",
    "CodecChoice",
    "Context",
    "Derive",
    "Member",
    "Planes",
    "Policy",
    "Pool",
    "Prefix",
    "Raw",
    "Sample",
    "Sub",
    "Xor",
    "add",
    "apply",
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
    "is_additive",
    "plan_pools",
    "plane_entropy",
    "sample_ranges",
    "word_size",
]

_KINDS: tuple[type[Raw | Planes | Xor | Sub | Prefix | Derive], ...] = (Raw, Planes, Xor, Sub, Prefix, Derive)
CODECS: Mapping[str, Callable[[Mapping[str, Any]], Codec]] = MappingProxyType(
    {kind.name: kind.parse for kind in _KINDS}
)
"""Every codec's parser of parameters, by name."""
WITHOUT_BASE = frozenset(kind.name for kind in _KINDS if kind.base_ratio != 1)
"""Codecs of tensors that build on no tensor of another checkpoint."""


def codec(name: str, params: Mapping[str, Any]) -> Codec:
    """The codec that a segment's metadata names.

    Raises ``IncompatibleFormatError`` for an unknown name, ``FormatError`` for an unknown parameter.
    """
    if name not in CODECS:
        raise IncompatibleFormatError(f"unknown codec {name!r:.80}: this version knows {', '.join(CODECS)}")
    return CODECS[name](params)
