"""Choose a codec for a tensor: encode samples of it with every candidate, and compare the sizes.

The choice depends on how well the candidates compress the data itself, not on tensor names or roles. First moments, for
example, are smaller as a delta over one step, but not over ten. A policy may name candidates for a class of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.formats.codecs.block_loops import as_bytes, encode
from ckptstore.formats.codecs.blocks import BLOCK
from ckptstore.formats.codecs.codec import Codec, Sample
from ckptstore.formats.codecs.codec_table import KINDS, TRIED
from ckptstore.formats.codecs.plane_coder import FAST, THRIFTY
from ckptstore.formats.codecs.raw_planes import Raw
from ckptstore.formats.tensor_classes import CLASSES, TensorClass, class_by_name

SAMPLE_BYTES = 128 << 10
"""Bytes of one sample."""
SAMPLES = 6
"""Most samples of one tensor."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Which codecs may be chosen, and by what criterion.

    Attributes:
        codecs: names of the codecs to try. ``raw`` is always a candidate. An unknown name raises `UsageError`.
        context: whether ``sub`` may sort by the base's exponents: 3 to 25 % smaller at half the speed.
        level: the encoder's level (``encode``).
        gain: the least share of the bytes that a codec must save compared to ``raw``.
        bandwidth: bytes per second at which payloads are written. If given, the candidate with the least time to
            encode and write wins (encoding by one core, measured on the samples). Otherwise the smallest payload wins.
        by_class: class of tensors -> the codecs to try on these instead of `codecs`. The name of a tensor shows its
            class (`formats.tensor_classes`). ``{"first_moment": ("prefix",), "second_moment": ("prefix",)}`` stores
            Adam's moments as the XOR paper does. An unknown class or codec raises `UsageError`.
    """

    codecs: tuple[str, ...] = TRIED
    context: bool = False
    level: int = FAST
    gain: float = 0.02
    bandwidth: float | None = None
    by_class: Mapping[TensorClass, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.by_class, Mapping):
            raise UsageError(f"policy: by_class={self.by_class!r:.80}; a mapping of classes to codecs is needed")
        if strange := [name for name in self.by_class if name not in CLASSES]:
            raise UsageError(f"policy: no class is called {strange[0]!r:.80}; there are {', '.join(CLASSES)}")
        given: list[object] = list(self.by_class.values())
        if single := [names for names in given if isinstance(names, str)]:
            raise UsageError(f"policy: by_class: {single[0]!r:.80}; a tuple of names of codecs is needed")
        object.__setattr__(self, "by_class", {kind: tuple(names) for kind, names in self.by_class.items()})
        tried = [*self.codecs, *(name for names in self.by_class.values() for name in names)]
        if unknown := [name for name in tried if name not in KINDS]:
            raise UsageError(f"policy: no codec is called {unknown[0]!r:.80}; there are {', '.join(KINDS)}")

    def for_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> Policy:
        """The policy for one tensor of a state.

        Args:
            name: as in the state's tree. dtype: logical dtype.
        """
        kind = class_by_name(name, dtype, shape) if self.by_class else None
        if kind is None or kind not in self.by_class:
            return self
        return replace(self, codecs=self.by_class[kind], by_class={})


FAST_POLICY = Policy()
"""Encodes on one or two cores at least as fast as the saved bytes could be read and written."""
SMALL_POLICY = Policy(context=True, level=THRIFTY)
"""Produces the fewest bytes."""
PAPER_POLICY = Policy(
    codecs=("planes", "xor", "prefix"), by_class={"first_moment": ("prefix",), "second_moment": ("prefix",)}
)
"""What the XOR paper proposes: XOR for weights, prefix dictionaries for moments."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec with its results on the samples.

    Attributes:
        codec: the codec, with its parameters.
        level: the encoder's level.
        ratio: logical bytes divided by stored bytes; infinite if nothing is stored.
        throughput: logical bytes encoded per second by one core.
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
        """Seconds to encode one logical byte and to write the result at `bandwidth` bytes per second."""
        return 1 / self.throughput + 1 / (self.ratio * bandwidth)


def sample_ranges(nbytes: int, count: int = SAMPLES, size: int = SAMPLE_BYTES) -> list[tuple[int, int]]:
    """The byte ranges (start, stop) at which to sample a tensor of ``nbytes``. A small tensor is one range.

    The ranges are evenly spread, because a tensor differs from place to place (the embeddings of rare tokens hardly
    change). They start at multiples of 16, so that they contain whole elements of every dtype.
    """
    if nbytes <= count * size:
        return [(0, nbytes)] if nbytes else []
    stride = (nbytes - size) / (count - 1)
    starts = [int(index * stride) // 16 * 16 for index in range(count)]
    return [(start, start + size) for start in starts]


def candidates(dtype: str, samples: Sequence[Sample], policy: Policy) -> list[Codec]:
    """The codecs to try on a tensor of this dtype under this policy, with their parameters."""
    found: list[Codec] = []
    for name in policy.codecs:
        kind = KINDS[name]
        if kind.base_ratio and not (samples and all(sample.base_for(kind) is not None for sample in samples)):
            continue
        if kind is not Raw:  # its size is known
            found += kind.suited(dtype, samples, context=policy.context)
    return found


def evaluate(samples: Sequence[Sample], tried: Sequence[Codec], level: int = FAST) -> list[CodecChoice]:
    """Encode the samples with each codec. Returns the results, smallest payload first (ties in the order given).

    Takes about 1 ms per codec and MiB. The sizes are exact for the samples. The throughput is a single measurement of
    this thread's processor time.
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
    """Choose the codec for a tensor from samples of it.

    Args:
        dtype: logical dtype of the tensor (``dtypes``).
        samples: ranges of the tensor (at ``sample_ranges``), with the base if there is one.
        policy: which codecs may be chosen, and by what criterion.

    Returns:
        The choice. It is ``raw`` if no codec saves ``policy.gain`` of the bytes, or if there are no samples.
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
