"""Choosing a codec for a tensor: code samples of it with every candidate, and compare.

No rule about names or dtypes decides, only what the candidates make of the data itself. First moments, say, are
smaller as a delta from one step to the next, but not over ten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.formats.codecs.block_loops import as_bytes, encode
from ckptstore.formats.codecs.blocks import BLOCK
from ckptstore.formats.codecs.codec import Codec, Sample
from ckptstore.formats.codecs.codec_table import KINDS, TRIED
from ckptstore.formats.codecs.plane_coder import FAST, THRIFTY
from ckptstore.formats.codecs.raw_planes import Raw

SAMPLE_BYTES = 128 << 10
SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be chosen, and what for.

    Attributes:
        codecs: names of the codecs to try; ``raw`` always is. An unknown one raises `UsageError`.
        context: whether ``sub`` may sort by the base's exponents: 3 to 25 % smaller at half the speed.
        level: the encoder's level (``encode``).
        gain: the least share of the bytes a codec has to save against ``raw``.
        bandwidth: bytes per second at which payloads are written. If given, the candidate with the least time to
            encode and write wins (encoding by one core, measured on the samples); else the smallest payload.
    """

    codecs: tuple[str, ...] = TRIED
    context: bool = False
    level: int = FAST
    gain: float = 0.02
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.codecs if name not in KINDS]:
            raise UsageError(f"policy: no codec is called {unknown[0]!r:.80}; there are {', '.join(KINDS)}")


FAST_POLICY = Policy()
"""At least as fast as reading and writing what it saves, on a core or two."""
SMALL_POLICY = Policy(context=True, level=THRIFTY)
"""The fewest bytes."""
PAPER_POLICY = Policy(codecs=("planes", "xor", "prefix"))
"""What the XOR paper proposes: XOR for weights, prefix dictionaries for moments."""


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
    found: list[Codec] = []
    for name in policy.codecs:
        kind = KINDS[name]
        if kind.base_ratio and not (samples and all(sample.base_for(kind) is not None for sample in samples)):
            continue
        if kind is not Raw:  # which needs no trial
            found += kind.suited(dtype, samples, context=policy.context)
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
