"""Data that is hard for codecs, for every dtype: one named class each, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ckptstore.formats import codecs, dtypes
from tests.kernel_forms import FORMS, KINDS, use_form

WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
MANTISSA = {"F64": 52, "F32": 23, "BF16": 7, "F16": 10, "C128": 52, "C64": 23, "C32": 10}
Bytes = np.ndarray


def _specials(word: int, rng: np.random.Generator, count: int) -> np.ndarray:
    """NaN payloads (quiet and signalling), infinities, signed zeros, denormals, extremes: as bit patterns."""
    bits = 8 * word
    exponents = {4: 8, 2: 5, 8: 11, 1: 4}[word]
    infinity = ((1 << exponents) - 1) << (bits - 1 - exponents)
    quiet = 1 << (bits - 2 - exponents)
    patterns = [0, 1, 2, quiet, infinity, infinity | 1, infinity | quiet, infinity | quiet | 1, (1 << (bits - 1)) - 1]
    if word == 2:
        patterns += [0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x0080, 0x007F]
    both = [p | sign for p in patterns for sign in (0, 1 << (bits - 1))]
    return rng.choice(np.array(both, WORDS[word]), count)


def _numbers(dtype: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Weights as a model has them (floats), or small signed integers."""
    word = codecs.word_size(dtype)
    if dtype in ("F64", "C128"):
        return rng.normal(0, 0.02, count).astype("<f8").view("<u8")
    if word == 4 and dtype in MANTISSA:
        return rng.normal(0, 0.02, count).astype("<f4").view("<u4")
    if dtype in ("F16", "C32"):
        return rng.normal(0, 0.02, count).astype("<f2").view("<u2")
    if dtype == "BF16":
        return (rng.normal(0, 0.02, count).astype("<f4").view("<u4") >> 16).astype("<u2")
    return rng.geometric(0.4, count).astype(WORDS[word]) * rng.choice(np.array([1, -1]), count).astype(WORDS[word])


CLASSES: dict[str, Callable[[str, np.random.Generator, int], np.ndarray]] = {
    "noise": lambda d, r, n: np.frombuffer(r.bytes(n * codecs.word_size(d)), WORDS[codecs.word_size(d)]),
    "zero": lambda d, r, n: np.zeros(n, WORDS[codecs.word_size(d)]),
    "constant": lambda d, r, n: np.full(n, r.integers(0, 256), WORDS[codecs.word_size(d)]),
    "specials": lambda d, r, n: _specials(codecs.word_size(d), r, n),
    "numbers": _numbers,
    "sparse": lambda d, r, n: np.where(r.random(n) < 0.01, _numbers(d, r, n), 0).astype(WORDS[codecs.word_size(d)]),
    "ramp": lambda d, r, n: np.arange(n).astype(WORDS[codecs.word_size(d)]),
    "bits": lambda d, r, n: (r.random(n) < 0.5).astype(WORDS[codecs.word_size(d)]),
}

CHANGES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "same": lambda base, r: base.copy(),
    "near": lambda base, r: base + (r.geometric(0.02, len(base)) * r.choice([1, -1], len(base))).astype(base.dtype),
    "few": lambda base, r: np.where(r.random(len(base)) < 0.003, base ^ base.dtype.type(0x81), base),
    "other": lambda base, r: np.frombuffer(r.bytes(base.nbytes), base.dtype),
}


def image(dtype: str, kind: str, count: int, seed: int) -> Bytes:
    """The little-endian bytes of ``count`` words (complex: parts) of a class."""
    with np.errstate(over="ignore"):
        words = CLASSES[kind](dtype, np.random.default_rng(seed), count)
    return np.ascontiguousarray(words).view(np.uint8)


def pair(dtype: str, kind: str, change: str, count: int, seed: int) -> tuple[Bytes, Bytes]:
    """A base and a tensor that differs from it by ``change``."""
    base = image(dtype, kind, count, seed)
    words = base.view(WORDS[codecs.word_size(dtype)])
    with np.errstate(over="ignore"):
        changed = CHANGES[change](words, np.random.default_rng(seed + 1))
    return base, np.ascontiguousarray(changed.astype(words.dtype)).view(np.uint8)


def codecs_of(dtype: str) -> list[codecs.Codec]:
    """Every codec that takes a dtype, in several configurations."""
    word = codecs.word_size(dtype)
    found: list[codecs.Codec] = [codecs.Raw(), codecs.Xor(word), codecs.Sub(word)]
    found += [codecs.Planes(word, mapping) for mapping in ("none", "rotate", "fold")]
    found += [codecs.Prefix(word, bits, group) for bits in (1, 7, 9, 12) if bits < 8 * word for group in (0, 256)]
    shift = MANTISSA.get(dtype, 8 * word - 5)
    top = (1 << (8 * word - 1 - shift)) - 1
    found += [
        codecs.Sub(word, codecs.Context(shift, low, low + width))
        for low, width in ((0, 1), (top // 2, min(7, top // 2)))
    ]
    if dtype in ("BF16", "F16"):
        found.append(codecs.Derive(dtype))
    return found


def base_of(codec: codecs.Codec, base: Bytes) -> Bytes | None:
    """A base of the size that the codec wants, made from ``base``."""
    if codec.base_ratio == 2:
        return (base.view("<u2").astype("<u4") << 16).view(np.uint8)
    return base if codec.base_ratio else None


ALL_DTYPES = tuple(dtypes.DTYPES)


@pytest.fixture(scope="module", autouse=True, params=KINDS)
def both_forms(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run all tests of a module with the kernels in numpy, then compiled. A module says ``form = both_forms``."""
    use_form(request.param)
    yield request.param
    use_form(None)


@pytest.fixture(scope="module", autouse=True, params=FORMS)
def every_form(request: pytest.FixtureRequest) -> Iterator[str]:
    """`both_forms`, and compiled for every instruction set."""
    use_form(request.param)
    yield request.param
    use_form(None)
