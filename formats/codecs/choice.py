"""Choosing a codec for a tensor: code samples of it with every candidate, and compare.

No rule about names or dtypes decides, only what the candidates make of the data itself. First moments, say, are
smaller as a delta from one step to the next, but not over ten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptstore.formats import dtypes
from ckptstore.formats.codecs import kernels
from ckptstore.formats.codecs.blocks import BLOCK
from ckptstore.formats.codecs.coding import Buffer, Codec, as_bytes, encode
from ckptstore.formats.codecs.deltas import MAX_CLASSES, Context, Sub, Xor
from ckptstore.formats.codecs.derive import TARGETS, Derive
from ckptstore.formats.codecs.plain import Planes, Raw, words_of
from ckptstore.formats.codecs.planecoder import FAST, THRIFTY
from ckptstore.formats.codecs.prefix import Prefix

SAMPLE_BYTES = 128 << 10
SAMPLES = 6
_MANTISSA = {"F64": 52, "F32": 23, "BF16": 7, "F16": 10, "C128": 52, "C64": 23, "C32": 10}
_SIGNED = {"I8", "I16", "I32", "I64"}


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be chosen, and what for.

    Attributes:
        codecs: names of the codecs to try; ``raw`` always is.
        context: whether ``sub`` may sort by the base's exponents: 3 to 25 % smaller at half the speed.
        level: the encoder's level (``encode``).
        gain: the least share of the bytes a codec has to save against ``raw``.
        bandwidth: bytes per second at which payloads are written. If given, the candidate with the least time to
            encode and write wins (encoding by one core, measured on the samples); else the smallest payload.
    """

    codecs: tuple[str, ...] = ("planes", "xor", "sub", "derive")
    context: bool = False
    level: int = FAST
    gain: float = 0.02
    bandwidth: float | None = None


FAST_POLICY = Policy()
"""At least as fast as reading and writing what it saves, on a core or two."""
SMALL_POLICY = Policy(context=True, level=THRIFTY)
"""The fewest bytes."""
PAPER_POLICY = Policy(codecs=("planes", "xor", "prefix"))
"""What the XOR paper proposes: XOR for weights, prefix dictionaries for moments."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One range of a tensor: its bytes, the same range of the base tensor, the same elements of an fp32 master."""

    data: Buffer
    base: Buffer | None = None
    master: Buffer | None = None

    def base_for(self, codec: Codec) -> Buffer | None:
        """What ``encode`` wants as this codec's base."""
        return (None, self.base, self.master)[codec.base_ratio]


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec, and what it did to the samples.

    ``ratio`` is logical bytes over stored bytes (infinite where nothing is stored), ``throughput`` logical bytes
    encoded per second of one core.
    """

    codec: Codec
    level: int
    ratio: float
    throughput: float

    @property
    def name(self) -> str:
        """The codec's name, for the metadata."""
        return self.codec.name

    @property
    def params(self) -> dict[str, Any]:
        """The codec's parameters, for the metadata."""
        return self.codec.params

    def seconds(self, bandwidth: float) -> float:
        """Time to encode one byte and write what becomes of it."""
        return 1 / self.throughput + 1 / (self.ratio * bandwidth)


def word_size(dtype: str) -> int:
    """Bytes of one number of a logical dtype: of the real part, for complex numbers. Raises ``FormatError``."""
    found = dtypes.get(dtype)
    return found.itemsize // (2 if found.trailing else 1)


def sample_ranges(nbytes: int, count: int = SAMPLES, size: int = SAMPLE_BYTES) -> list[tuple[int, int]]:
    """(start, stop) byte ranges to sample a tensor of ``nbytes`` at, spread evenly; all of a small one.

    Ranges start at multiples of 16, so that they hold whole numbers of every dtype. A tensor is not the same
    everywhere (rare tokens' embeddings hardly move), therefore several.
    """
    if nbytes <= count * size:
        return [(0, nbytes)] if nbytes else []
    stride = (nbytes - size) / (count - 1)
    starts = [int(index * stride) // 16 * 16 for index in range(count)]
    return [(start, start + size) for start in starts]


def candidates(dtype: str, samples: Sequence[Sample], policy: Policy) -> list[Codec]:
    """The codecs worth trying on a tensor of this dtype under this policy, with their parameters."""
    word, found = word_size(dtype), []
    based = bool(samples) and all(sample.base is not None for sample in samples)
    mastered = bool(samples) and all(sample.master is not None for sample in samples)
    for name in policy.codecs:
        if name == "planes":
            found += _planes(dtype, word)
        elif name == "prefix" and word > 1:
            found += [Prefix(word, bits, group) for bits in (8, 9, 10, 12) for group in (0, 256, 1024, 4096)]
        elif name == "xor" and based:
            found.append(Xor(word))
        elif name == "sub" and based:
            found.append(Sub(word))
            if policy.context and dtype in _MANTISSA:
                found += _contexts(word, _MANTISSA[dtype], samples)
        elif name == "derive" and mastered and dtype in TARGETS:
            found.append(Derive(dtype))
    return found


def evaluate(samples: Sequence[Sample], tried: Sequence[Codec], level: int = FAST) -> list[CodecChoice]:
    """What each codec makes of the samples, smallest payload first (then in the order given).

    Costs about 1 ms per codec and MiB. Sizes are exact for the samples; throughput is one measurement of this
    thread's processor time.
    """
    choices = []
    for codec in tried:
        logical = stored = 0
        began = time.thread_time()
        for sample in samples:
            data = as_bytes(sample.data)
            for start in range(0, len(data), BLOCK):
                stop = min(start + BLOCK, len(data))
                base, ratio = sample.base_for(codec), codec.base_ratio
                part = None if base is None else as_bytes(base)[start * ratio : stop * ratio]
                stored += len(encode(codec, data[start:stop], part, level=level))
            logical += len(data)
        seconds = max(time.thread_time() - began, 1e-9)
        saving = logical / stored if stored else (float("inf") if logical else 1.0)
        choices.append(CodecChoice(codec, level, saving, logical / seconds))
    return sorted(choices, key=lambda choice: -choice.ratio)


def choose(dtype: str, samples: Sequence[Sample], policy: Policy = FAST_POLICY) -> CodecChoice:
    """The codec for a tensor, from samples of it.

    Args:
        dtype: logical dtype of the tensor (``dtypes``).
        samples: ranges of the tensor (``sample_ranges`` says which), with the base where there is one.
        policy: what may be chosen, and what for.

    Returns:
        The choice; ``raw`` where nothing saves ``policy.gain`` of the bytes, or there is nothing to sample.
    """
    raw = CodecChoice(Raw(), policy.level, 1.0, float("inf"))
    found = evaluate(samples, candidates(dtype, samples, policy), policy.level) if samples else []
    worthy = [choice for choice in found if 1 - 1 / choice.ratio >= policy.gain]
    if not worthy:
        return raw
    if policy.bandwidth is None:
        return worthy[0]
    bandwidth = policy.bandwidth
    return min([*worthy, raw], key=lambda choice: choice.seconds(bandwidth))


def _planes(dtype: str, word: int) -> list[Codec]:
    plain = Planes(word)
    if word == 1 and dtype not in _SIGNED:
        return [plain]
    return [plain, replace(plain, map="fold" if dtype in _SIGNED else "rotate")]


def _contexts(word: int, mantissa: int, samples: Sequence[Sample]) -> list[Codec]:
    """``sub`` with the exponents that most of the base's words have, all others in the outermost classes."""
    exponents = []
    for sample in samples:
        words, _ = words_of(as_bytes(sample.base if sample.base is not None else b""), word)
        magnitudes = words[:: max(1, len(words) // 4096)] & kernels.WORDS[word].type((1 << (8 * word - 1)) - 1)
        exponents.append(magnitudes >> mantissa)
    present = np.concatenate(exponents)
    if not len(present):
        return []
    low, high = (int(bound) for bound in np.percentile(present, (2, 99.5), method="nearest"))
    low = max(low, high - MAX_CLASSES + 1)
    return [Sub(word, Context(mantissa, low, high))] if high > low else []
