"""Measure one unit with every method: general compressors, every codec of the format, and the entropy bounds."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from ckptstore.formats import codecs, kernel_choice
from ckptstore.formats.codecs import Codec, Method, Sample
from ckptstore.host.buffers import Bytes

__all__ = [
    "BOUNDS",
    "COMPARED",
    "COPIES",
    "DELTAS",
    "METHODS",
    "SHOWN",
    "Coded",
    "Methods",
    "prefix_counts",
]

GENERAL: Final = (Method("gzip", "#999999", 0, "x"), Method("zstd", "#56B4E9", 0, "v"))
"""General compressors for comparison: ``gzip`` is level 6, ``zstd`` level 3."""
SHOWN: Final[Mapping[str, Method]] = MappingProxyType({one.name: one for one in GENERAL} | dict(codecs.METHODS))
"""All timed methods, by name. The properties of a codec's method come from its class."""
METHODS: Final = tuple(SHOWN)
"""Their names, in the order of tables."""
DELTAS: Final = codecs.methods_of(1)
"""Methods that need an earlier checkpoint."""
COPIES: Final = codecs.methods_of(2)
"""Methods that need an fp32 master of which the tensor is a copy."""
COMPARED: Final = tuple(name for name, method in SHOWN.items() if method.marker)
"""Methods that are compared over training, and for sending a checkpoint."""
BOUNDS: Final = {name: method.bound.name for name, method in SHOWN.items() if method.bound is not None}
"""Method -> its bound. In each block it is the minimum of two sizes. The first is the order-0 entropy of the byte
planes of the numbers, or of their difference. The second is what this method, and those without a base, stored: zstd
finds repetitions and can be below order 0. So no codec without context is below its bound."""
SLOW: Final = ("gzip",)
"""Methods measured on a part of a sample, because they take more time than all others together."""
TOP: Final = 12
"""Bits of the longest counted prefix."""

_FEW: Final = 2
"""Maximum number of a method's candidates that are tried on every unit; more are tried only on the first unit."""
_P = TypeVar("_P", bound="bytes | Bytes")
_R = TypeVar("_R")
Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Coded:
    """One unit by one method: stored bytes (fractional for a bound), and processor seconds of one core."""

    method: str
    stored: float
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods for one group, with suitable parameters.

    Attributes:
        dtype: logical dtype of the group.
        wanted: names from `METHODS`.
        chosen: name -> codec with parameters, for codecs without a base.
    """

    dtype: str
    wanted: tuple[str, ...]
    chosen: dict[str, Codec] = field(default_factory=dict)

    @classmethod
    def suited(cls, dtype: str, data: Sequence[Bytes], wanted: Sequence[str]) -> Methods:
        """Fit the parameters of codecs without a base on units of the group, as a writer does on its samples."""
        samples = [Sample(one) for one in data]
        chosen: dict[str, Codec] = {}
        for name in codecs.methods_of(0):
            suited = codecs.kind_of(name).suited(dtype, samples, context=False)
            tried = [one for one in suited if one.method == name]
            if name in wanted and tried:
                few = samples if len(tried) <= _FEW else samples[:1]
                chosen[name] = tried[0] if len(tried) == 1 else codecs.evaluate(few, tried)[0].codec
        return cls(dtype, tuple(wanted), chosen)

    @property
    def word(self) -> int:
        """Bytes of one number."""
        return codecs.word_size(self.dtype)

    def deltas(self, samples: Sequence[Sample]) -> dict[str, Codec]:
        """The deltas for one pair of checkpoints, fitted on samples of it: name -> codec."""
        context = any(SHOWN[name].context for name in self.wanted)
        found: dict[str, Codec] = {}
        for kind in dict.fromkeys(map(codecs.kind_of, DELTAS)):
            found |= {one.method: one for one in kind.suited(self.dtype, samples, context=context)}
        return {name: codec for name, codec in found.items() if name in self.wanted}

    def alone(self, data: Bytes, *, slow: bool) -> list[Coded]:
        """Measure every method that needs no base; the slow one only if `slow`."""
        found = []
        if "gzip" in self.wanted and slow:
            found.append(_timed("gzip", lambda: zlib.compress(data.data, 6), zlib.decompress)[0])
        if "zstd" in self.wanted:
            squeeze, expand = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
            found.append(_timed("zstd", lambda: squeeze.compress(data.data), expand.decompress)[0])
        for name, codec in self.chosen.items():
            if slow or name not in SLOW:
                found.append(_coded(name, codec, data, None))
        words = _words(data, self.word)
        return [*found, *(self._bound(name, data, words, words, found) for name in self.chosen if name in BOUNDS)]

    def against(self, data: Bytes, base: Bytes, deltas: dict[str, Codec], alone: Sequence[Coded]) -> list[Coded]:
        """Measure every delta against the unit of an earlier checkpoint, with bounds, given the result of `alone`."""
        found = {name: _coded(name, codec, data, base) for name, codec in deltas.items()}
        new, old = _words(data, self.word), _words(base, self.word)
        bounds = [self._bound(name, data, new, old, [*alone, one]) for name, one in found.items() if name in BOUNDS]
        return [*found.values(), *bounds]

    def derived(self, data: Bytes, master: Bytes) -> list[Coded]:
        """Measure the unit as the rounded copy of an fp32 master."""
        suited = [one for one in codecs.copies_of(self.dtype) if one.method in self.wanted]
        return [_coded(one.method, one, data, master) for one in suited]

    def _bound(self, method: str, data: Bytes, new: Words, old: Words, coded: Sequence[Coded]) -> Coded:
        bound = SHOWN[method].bound
        assert bound is not None
        ours = [one.stored for one in coded if one.method in codecs.METHODS and not SHOWN[one.method].context]
        return Coded(bound.name, min([bound.entropy(new, old) / (8 * self.word) * len(data), *ours]))


def _words(data: Bytes, word: int) -> Words:
    return data[: len(data) // word * word].view(f"<u{word}")


def _coded(name: str, codec: Codec, data: Bytes, base: Bytes | None) -> Coded:
    """Encode and decode one unit, which is at most a block. Raises `AssertionError` if the result differs."""
    space = np.empty(codecs.bound(len(data)), np.uint8)

    def encode() -> Bytes:
        return codecs.encode(codec, data, base, out=space)

    def decode(payload: Bytes) -> Bytes:
        return codecs.decode(codec, payload, len(data), base)

    found, restored = _timed(name, encode, decode)
    if not np.array_equal(restored, data):
        raise AssertionError(f"codec {name} is not exact")
    return found


def _timed(name: str, encode: Callable[[], _P], decode: Callable[[_P], _R]) -> tuple[Coded, _R]:
    """Measure this thread's processor time, without that of comparing kernels with numpy."""
    began = _own_seconds()
    payload = encode()
    encoded = _own_seconds()
    restored = decode(payload)
    decoded = _own_seconds()
    return Coded(name, len(payload), encoded - began, decoded - encoded), restored


def _own_seconds() -> float:
    return time.thread_time() - kernel_choice.comparing_seconds()


def prefix_counts(data: Bytes, word: int) -> npt.NDArray[np.int64] | None:
    """How many numbers have each prefix of 12 bits (int64, 4096 of them); None for one-byte numbers."""
    if word < 2:
        return None
    words = _words(data, word)
    return np.bincount((words >> words.dtype.type(8 * word - TOP)).astype(np.int64), minlength=1 << TOP)
