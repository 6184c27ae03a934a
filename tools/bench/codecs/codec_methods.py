"""The compression methods that the codec benchmark compares: ours, and those of other libraries, on the same chunks.

Other libraries support no base, so they get the XOR with it, as in the literature; their encode and decode times
include that pass, as ours include our subtraction. All methods run on one thread here; ``all_cores`` of the driver runs
chunks in a thread pool. ZipNN starts a thread even when set to use one, so the driver counts the processor time of the
whole process.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zstandard

from ckptstore.formats import codecs
from tools.bench.codecs.codec_cases import Case, Part

Encoded = Any


class Method(Protocol):
    """A pair of functions that encode and decode a part. ``scratch`` is reusable memory of the calling thread."""

    label: str
    slow: bool

    def encode(self, part: Part, scratch: dict[str, np.ndarray]) -> Encoded: ...

    def decode(self, payload: Encoded, part: Part, scratch: dict[str, np.ndarray]) -> np.ndarray: ...


def buffer(scratch: dict[str, np.ndarray], name: str, size: int) -> np.ndarray:
    """``size`` bytes that stay allocated: fresh memory would add page faults that no engine has."""
    if name not in scratch or len(scratch[name]) < size:
        scratch[name] = np.zeros(size, np.uint8)
    return scratch[name][:size]


@dataclass(frozen=True)
class Ours:
    """A codec of this package."""

    label: str
    codec: codecs.Codec
    level: int = codecs.FAST
    slow: bool = False

    def _base(self, part: Part) -> np.ndarray | None:
        return (None, part.base, part.master)[self.codec.base_ratio]

    def encode(self, part: Part, scratch: dict[str, np.ndarray]) -> np.ndarray:
        out = buffer(scratch, "encoded", codecs.bound(len(part.data)))
        return codecs.encode(self.codec, part.data, self._base(part), out, self.level)

    def decode(self, payload: np.ndarray, part: Part, scratch: dict[str, np.ndarray]) -> np.ndarray:
        out = buffer(scratch, "decoded", len(part.data))
        return codecs.decode(self.codec, payload, len(part.data), self._base(part), out)


@dataclass(frozen=True)
class Other:
    """A general compressor; with a base it gets the XOR."""

    label: str
    compress: Callable[[memoryview], bytes]
    decompress: Callable[[bytes], Any]
    slow: bool = False

    def encode(self, part: Part, scratch: dict[str, np.ndarray]) -> bytes:
        data = part.data
        if part.base is not None:
            data = buffer(scratch, "xor", len(data))
            np.bitwise_xor(_words(part.data), _words(part.base), out=_words(data))
        return self.compress(data.data)

    def decode(self, payload: bytes, part: Part, scratch: dict[str, np.ndarray]) -> np.ndarray:
        plain = np.frombuffer(self.decompress(payload), np.uint8)
        if part.base is None:
            return plain
        out = buffer(scratch, "decoded", len(part.data))
        np.bitwise_xor(_words(plain), _words(part.base), out=_words(out))
        return out


def _words(data: np.ndarray) -> np.ndarray:
    return data.view("<u4") if len(data) % 4 == 0 else data


def _zstd(level: int) -> Other:
    return Other(
        f"zstd-{level}",
        lambda data: zstandard.ZstdCompressor(level).compress(data),
        lambda payload: zstandard.ZstdDecompressor().decompress(payload),  # threads must not share it
        slow=level > 3,
    )


def _lz4() -> Other:
    import lz4.frame

    return Other("lz4", lz4.frame.compress, lz4.frame.decompress)


def _blosc2(word: int) -> Other:
    import blosc2

    blosc2.set_nthreads(1)

    def compress(data: memoryview) -> bytes:
        return bytes(
            blosc2.compress(data, typesize=word, clevel=5, filter=blosc2.Filter.SHUFFLE, codec=blosc2.Codec.ZSTD)
        )

    return Other("blosc2 shuffle+zstd", compress, blosc2.decompress, slow=True)


def _zipnn(dtype: str) -> Other:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it imports torch.jit
        from zipnn import ZipNN

    kind = {"F32": "float32", "BF16": "bfloat16"}[dtype]

    def compress(data: memoryview) -> bytes:
        # It reorders bits in its input buffer. It may overwrite our copy of a delta, but not a tensor.
        return bytes(ZipNN(bytearray_dtype=kind, threads=1).compress(bytearray(data)))

    return Other("ZipNN", compress, lambda payload: ZipNN(bytearray_dtype=kind, threads=1).decompress(payload))


def _pcodec(word: int) -> Other:
    from pcodec import ChunkConfig, standalone

    numbers = {2: np.uint16, 4: np.uint32}[word]

    def compress(data: memoryview) -> bytes:
        return bytes(standalone.simple_compress(np.frombuffer(data, numbers), ChunkConfig()))

    return Other("pcodec", compress, lambda payload: standalone.simple_decompress(payload).view(np.uint8), slow=True)


def others(case: Case) -> tuple[list[Method], dict[str, str]]:
    """The other libraries' methods for a case, and the reasons why some are missing."""
    word = codecs.word_size(case.dtype)
    makers: Mapping[str, Callable[[], Other]] = {
        "lz4": _lz4,
        "blosc2": lambda: _blosc2(word),
        "ZipNN": lambda: _zipnn(case.dtype),
        "pcodec": lambda: _pcodec(word),
    }
    found: list[Method] = [
        Other("gzip-6", lambda data: gzip.compress(data, 6), gzip.decompress, slow=True),
        _zstd(1),
        _zstd(3),
        _zstd(9),
    ]
    missing = {}
    for name, make in makers.items():
        try:
            found.append(make())
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def ours(case: Case, parts: list[Part]) -> list[Method]:
    """This package's codecs for a case. Contexts come from a sample, as the writer would choose them."""
    word = codecs.word_size(case.dtype)
    largest = max(parts, key=lambda part: len(part.data))
    samples = [
        codecs.Sample(largest.data[a:b], None if largest.base is None else largest.base[a:b])
        for a, b in codecs.sample_ranges(len(largest.data))
    ]
    planes = codecs.choose(
        case.dtype, [codecs.Sample(s.data) for s in samples], codecs.Policy(codecs=("planes",), gain=-1)
    )
    found: list[Method] = [Ours("planes", planes.codec)]
    if case.master:
        found.append(Ours("derive", codecs.Derive(case.dtype)))
    if case.gap:
        small = codecs.candidates(case.dtype, samples, codecs.Policy(codecs=("sub",), context=True))
        found += [Ours("xor", codecs.Xor(word)), Ours("sub", codecs.Sub(word))]
        found += [Ours("sub + context", codec, codecs.THRIFTY) for codec in small if codec != codecs.Sub(word)]
    elif word == 4:
        found += [Ours("prefix 9", codecs.Prefix(4, 9)), Ours("prefix 9, groups", codecs.Prefix(4, 9, 1024))]
    return found
