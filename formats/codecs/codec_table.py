"""The table of codecs. A class listed here is written, read, tried by writers and shown in analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
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
"""Every codec class, by name."""
CODECS: Final[Mapping[str, Callable[[Mapping[str, Any]], Codec]]] = MappingProxyType(
    {name: kind.parse for name, kind in KINDS.items()}
)
"""The parameter parser of every codec, by name."""
WITHOUT_BASE: Final = frozenset(name for name, kind in KINDS.items() if kind.base_ratio != 1)
"""Codecs that need no tensor of another checkpoint."""
FROM_MASTER: Final = frozenset(name for name, kind in KINDS.items() if kind.base_ratio == 2)
"""Codecs that restore a tensor from an fp32 master of the same step."""
TRIED: Final = tuple(name for name, kind in KINDS.items() if kind.tried)
"""Codecs that a writer tries if its policy names none."""
_ORDER: Final = (0, 2, 1)
METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {method.name: method for ratio in _ORDER for kind in _KINDS if kind.base_ratio == ratio for method in kind.methods}
)
"""Every method by name, in the order of tables: without a base, copies of a master, deltas."""
_KIND_OF: Final = {method.name: kind for kind in _KINDS for method in kind.methods}


def kind_of(method: str) -> type[Codec]:
    """The codec class of a method. Raises `KeyError` for an unknown method."""
    return _KIND_OF[method]


def methods_of(ratio: int) -> tuple[str, ...]:
    """Names of the methods with this `Codec.base_ratio`: 1 needs an earlier checkpoint, 2 an fp32 master."""
    return tuple(name for name in METHODS if _KIND_OF[name].base_ratio == ratio)


@cache
def copies_of(dtype: str) -> tuple[Codec, ...]:
    """The codecs that store a tensor of this dtype as a copy of an fp32 master. Empty if no codec can."""
    return tuple(found for name in sorted(FROM_MASTER) for found in KINDS[name].suited(dtype, (), context=False))


def codec(name: str, params: Mapping[str, Any]) -> Codec:
    """Make the codec that a segment's metadata names (SPEC section 5.4).

    Raises:
        IncompatibleFormatError: the name is unknown.
        FormatError: a parameter is unknown, missing or invalid.
    """
    if name not in CODECS:
        raise IncompatibleFormatError(f"unknown codec {name!r:.80}: this version knows {', '.join(CODECS)}")
    return CODECS[name](params)
