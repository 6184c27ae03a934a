"""The codecs, in one table. A class in `KINDS` is all that another codec needs to be written, read, tried and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ckptstore.errors import IncompatibleFormatError
from ckptstore.formats.codecs.codec import Codec, Method
from ckptstore.formats.codecs.derive import Derive
from ckptstore.formats.codecs.prefix import Prefix
from ckptstore.formats.codecs.raw_planes import Planes, Raw
from ckptstore.formats.codecs.xor_sub import Sub, Xor

__all__ = [
    "CODECS",
    "FROM_MASTER",
    "KINDS",
    "METHODS",
    "TRIED",
    "WITHOUT_BASE",
    "codec",
    "copies_of",
    "kind_of",
    "methods_of",
]

_KINDS: tuple[type[Codec], ...] = (Raw, Planes, Xor, Sub, Prefix, Derive)
KINDS: Final[Mapping[str, type[Codec]]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Every class of codecs, by name."""
CODECS: Final[Mapping[str, Callable[[Mapping[str, Any]], Codec]]] = MappingProxyType(
    {name: kind.parse for name, kind in KINDS.items()}
)
"""Every codec's parser of parameters, by name."""
WITHOUT_BASE: Final = frozenset(name for name, kind in KINDS.items() if kind.base_ratio != 1)
"""Codecs of tensors that build on no tensor of another checkpoint."""
FROM_MASTER: Final = frozenset(name for name, kind in KINDS.items() if kind.base_ratio == 2)
"""Codecs of tensors that are restored from an fp32 master of the same step."""
TRIED: Final = tuple(name for name, kind in KINDS.items() if kind.tried)
"""What a writer tries where its policy names no codecs."""
_ORDER: Final = (0, 2, 1)
METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {method.name: method for ratio in _ORDER for kind in _KINDS if kind.base_ratio == ratio for method in kind.methods}
)
"""Every method by name, in the order of tables: those without a base, copies of a master, deltas."""
_KIND_OF: Final = {method.name: kind for kind in _KINDS for method in kind.methods}


def kind_of(method: str) -> type[Codec]:
    """The class that a method uses. Raises `KeyError`."""
    return _KIND_OF[method]


def methods_of(ratio: int) -> tuple[str, ...]:
    """Names of the methods with this `Codec.base_ratio`: 1 needs an earlier checkpoint, 2 an fp32 master."""
    return tuple(name for name in METHODS if _KIND_OF[name].base_ratio == ratio)


def copies_of(dtype: str) -> list[Codec]:
    """The codecs that store a tensor of this dtype as the copy of an fp32 master; none: it is no copy."""
    return [found for name in sorted(FROM_MASTER) for found in KINDS[name].suited(dtype, (), context=False)]


def codec(name: str, params: Mapping[str, Any]) -> Codec:
    """The codec that a segment's metadata names.

    Raises ``IncompatibleFormatError`` for an unknown name, ``FormatError`` for an unknown parameter.
    """
    if name not in CODECS:
        raise IncompatibleFormatError(f"unknown codec {name!r:.80}: this version knows {', '.join(CODECS)}")
    return CODECS[name](params)
