"""What is measured: general compressors, every codec here, and the entropy bounds, on one unit at a time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from ckptstore.formats import codecs, compiled
from ckptstore.formats.codecs import Codec, Policy, Prefix, Raw, Sample, Sub, Xor
from ckptstore.formats.codecs.plain import MAPS
from ckptstore.host.buffers import Bytes

__all__ = ["BOUNDS", "DELTAS", "METHODS", "Coded", "Methods", "prefix_counts"]

METHODS: Final = (
    *("gzip", "zstd", "raw", "planes", "prefix", "prefix-grouped", "derive"),
    *("xor", "sub", "sub-context"),
)
"""Everything that is measured with a time, in the order of tables. ``gzip`` is level 6, ``zstd`` level 3."""
DELTAS: Final = ("xor", "sub", "sub-context")
"""Those that need an earlier checkpoint."""
BOUNDS: Final = {"planes": "bound", "xor": "bound-xor", "sub": "bound-sub"}
"""Codec -> its bound, in each block the least of: the order-0 entropy of the byte planes of the numbers, and for the
latter two of their difference, as they are or with the sign moved last; and what this codec, and those without a base,
made of the block: repetitions that zstd finds are below order 0. So no codec without context is below its bound."""
_UNBOUND: Final = ("gzip", "zstd", "derive", "sub-context")
SLOW: Final = ("gzip",)
"""Measured on a part of a sample: it costs more time than all others together."""
TOP: Final = 12
"""Bits of the longest prefix counted."""

_MANTISSA: Final = ("F64", "F32", "BF16", "F16", "C128", "C64", "C32")
_TRIES: Final = 5
"""Runs of which one is to be free of kernels that load; other threads load some, too."""
_P = TypeVar("_P", bound="bytes | Bytes")
_R = TypeVar("_R")
Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Coded:
    """One unit by one method: stored bytes (a bound's need not be whole), processor seconds of one core."""

    method: str
    stored: float
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods for one group, with the parameters that suit it.

    Attributes:
        dtype: logical dtype of the group.
        wanted: names from `METHODS`.
        chosen: name -> codec with parameters, of the codecs without a base.
    """

    dtype: str
    wanted: tuple[str, ...]
    chosen: dict[str, Codec] = field(default_factory=dict)

    @classmethod
    def suited(cls, dtype: str, data: Sequence[Bytes], wanted: Sequence[str]) -> Methods:
        """Try the parameters of ``planes`` and ``prefix`` on units of the group, as a writer does on its samples."""
        samples = [Sample(one) for one in data]
        chosen: dict[str, Codec] = {}
        if "raw" in wanted:
            chosen["raw"] = Raw()
        if "planes" in wanted:
            chosen["planes"] = codecs.evaluate(samples, codecs.candidates(dtype, samples, Policy(("planes",))))[0].codec
        prefixes = codecs.candidates(dtype, samples[:1], Policy(("prefix",)))
        for name, grouped in (("prefix", False), ("prefix-grouped", True)):
            tried = [one for one in prefixes if isinstance(one, Prefix) and bool(one.group) == grouped]
            if name in wanted and tried:
                chosen[name] = codecs.evaluate(samples[:1], tried)[0].codec
        return cls(dtype, tuple(wanted), chosen)

    @property
    def word(self) -> int:
        """Bytes of one number."""
        return codecs.word_size(self.dtype)

    def deltas(self, samples: Sequence[Sample]) -> dict[str, Codec]:
        """The deltas for one pair of checkpoints, from samples of it: name -> codec."""
        found: dict[str, Codec] = {"xor": Xor(self.word), "sub": Sub(self.word)}
        if "sub-context" in self.wanted:
            for one in codecs.candidates(self.dtype, samples, Policy(("sub",), context=True)):
                if isinstance(one, Sub) and one.context is not None:
                    found["sub-context"] = one
        return {name: codec for name, codec in found.items() if name in self.wanted}

    def alone(self, data: Bytes, *, slow: bool) -> list[Coded]:
        """Everything that needs no base; the slow one only where `slow`."""
        found = []
        if "gzip" in self.wanted and slow:
            found.append(_timed("gzip", lambda: zlib.compress(data.data, 6), zlib.decompress)[0])
        if "zstd" in self.wanted:
            squeeze, expand = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
            found.append(_timed("zstd", lambda: squeeze.compress(data.data), expand.decompress)[0])
        for name, codec in self.chosen.items():
            if slow or name not in SLOW:
                found.append(_coded(name, codec, data, None))
        if "planes" in self.chosen:
            found.append(self._bound("planes", data, self._entropy(_words(data, self.word)), found))
        return found

    def against(self, data: Bytes, base: Bytes, deltas: dict[str, Codec], alone: Sequence[Coded]) -> list[Coded]:
        """Every delta against the same unit of an earlier checkpoint, and their bounds, given what `alone` said."""
        found = {name: _coded(name, codec, data, base) for name, codec in deltas.items()}
        new, old = _words(data, self.word), _words(base, self.word)
        bounds = []
        if "xor" in found:
            bounds.append(self._bound("xor", data, self._entropy(new ^ old), [*alone, found["xor"]]))
        if "sub" in found:
            bounds.append(self._bound("sub", data, codecs.difference_entropy(new, old), [*alone, found["sub"]]))
        return [*found.values(), *bounds]

    def _entropy(self, words: Words) -> float:
        """Bits of a word, by the byte planes of whichever order of its bits is best."""
        return min(codecs.plane_entropy(_mapped(words, how)) for how in MAPS)

    def derived(self, data: Bytes, master: Bytes) -> list[Coded]:
        """As the rounded copy of an fp32 master."""
        return [_coded("derive", codecs.codec("derive", {"to": self.dtype}), data, master)]

    def _bound(self, codec: str, data: Bytes, bits: float, coded: Sequence[Coded]) -> Coded:
        reached = [one.stored for one in coded if one.method not in _UNBOUND]
        return Coded(BOUNDS[codec], min([bits / (8 * self.word) * len(data), *reached]))


def _words(data: Bytes, word: int) -> Words:
    return data[: len(data) // word * word].view(f"<u{word}")


def _mapped(words: Words, how: str) -> Words:
    """As ``planes`` maps numbers: rotated left by one, or zigzag (``fold``)."""
    bits = words.dtype.type(8 * words.itemsize - 1)
    one = words.dtype.type(1)
    if how == "rotate":
        return (words << one) | (words >> bits)
    if how == "fold":
        return (words << one) ^ (np.zeros_like(words) - (words >> bits))
    return words


def _coded(name: str, codec: Codec, data: Bytes, base: Bytes | None) -> Coded:
    """Encode and decode one unit, which is at most a block. Raises `AssertionError` where that is not exact."""
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
    """The processor time of this thread alone, without that of kernels which are compiled or loaded meanwhile."""
    for _ in range(_TRIES):
        before = compiled.loaded()
        began = time.thread_time()
        payload = encode()
        encoded = time.thread_time()
        restored = decode(payload)
        decoded = time.thread_time()
        if compiled.loaded() == before:
            break
    return Coded(name, len(payload), encoded - began, decoded - encoded), restored


def prefix_counts(data: Bytes, word: int) -> npt.NDArray[np.int64] | None:
    """How many numbers have each prefix of 12 bits (int64, 4096 of them); None for one-byte numbers."""
    if word < 2:
        return None
    words = _words(data, word)
    return np.bincount((words >> words.dtype.type(8 * word - TOP)).astype(np.int64), minlength=1 << TOP)
