"""Choose how to store a step: find the kernel arithmetic that training used, and the smallest encoding.

Nothing is assumed, as in `codec_choice`: samples are encoded in every way, and the sizes compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ckptstore.formats.codecs import THRIFTY, sample_ranges
from ckptstore.formats.codecs.codec_choice import SAMPLE_BYTES, SAMPLES
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.optim import inferred, predicted, replayed, scaled
from ckptstore.formats.optim.gradients import Gradient, SparseGradient
from ckptstore.formats.optim.step_chain import SCALED, Encoding
from ckptstore.formats.optim.step_settings import Optimizer, Rule, Skip, Step
from ckptstore.formats.optim.step_tiles import Array


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A way to store one step of one parameter, with its results on the samples.

    Attributes:
        encoding, rule: for ``step_chain.StepLink``. With rule ``Skip``, ``predicted`` is a plain integer delta.
        variant: the optimizer's variant that the rule was made with; "" for ``Skip``.
        bits: stored bits per number of the parameter (the state has 32 bits per slot).
        throughput: bytes of state encoded per second by one core: one measurement on this thread.
    """

    encoding: Encoding
    rule: Rule
    variant: str
    bits: float
    throughput: float


def choose_variant(
    optimizer: Optimizer,
    step: Step,
    old: Sequence[Array],
    new: Sequence[Array],
    gradient: Gradient | None = None,
) -> str:
    """Choose the variant whose encoding of sampled ranges is smallest; the first of equals.

    The variant depends on the machine that trains and on the optimizer's implementation, not on the step. So call this
    once per tensor, and again when training moves to another machine.
    """
    ranges = _ranges(old)[:2]
    encoding: Encoding = "predicted" if gradient is None else "replayed"
    sizes = {
        variant: _size(encoding, optimizer.rule(step, variant), old, new, gradient, ranges)
        for variant in optimizer.variants
    }
    return min(sizes, key=lambda variant: sizes[variant])


def evaluate(
    optimizer: Optimizer,
    step: Step,
    old: Sequence[Array],
    new: Sequence[Array],
    gradient: Gradient | None = None,
    variant: str | None = None,
    *,
    small: bool = False,
) -> list[StepChoice]:
    """Try every way to store the step on samples. Returns them, smallest first.

    The arguments are those of ``predicted.encode`` and ``replayed.encode``, but of any length: two to six ranges of
    32 Ki numbers are sampled. Without ``variant``, ``choose_variant`` finds it first. Without a gradient, a bf16
    gradient is inferred, if there is one (``inferred``). ``small``: also try the encodings with scales (``scaled``).
    """
    found = choose_variant(optimizer, step, old, new, gradient) if variant is None else variant
    rule = optimizer.rule(step, found)
    ways: list[tuple[Encoding, Rule]] = [("predicted", Skip(rule.slots))]
    if not isinstance(rule, Skip):
        ways.append(("predicted", rule))
        if gradient is not None:
            ways.append(("sparse" if isinstance(gradient, SparseGradient) else "replayed", rule))
        elif inferred.explains(rule, old, new):
            ways.append(("replayed", rule))
        if small:
            given = [encoding for encoding, _ in ways[1:] if f"{encoding}/2" in SCALED and scaled.suits(rule, gradient)]
            ways += [(cast(Encoding, f"{encoding}/2"), rule) for encoding in given]
    ranges = _ranges(old)
    count = max(1, sum(stop - start for start, stop in ranges))
    choices = []
    for encoding, tried in ways:
        began = time.thread_time()
        size = _size(encoding, tried, old, new, gradient, ranges)
        seconds = max(time.thread_time() - began, 1e-9)
        bits, state = 8 * size / count, 4 * count * len(rule.slots)
        choices.append(StepChoice(encoding, tried, "" if isinstance(tried, Skip) else found, bits, state / seconds))
    return sorted(choices, key=lambda choice: choice.bits)


def choose(
    optimizer: Optimizer,
    step: Step,
    old: Sequence[Array],
    new: Sequence[Array],
    gradient: Gradient | None = None,
    variant: str | None = None,
    *,
    small: bool = False,
) -> StepChoice:
    """Choose the smallest way to store the step, by samples (``evaluate``)."""
    return evaluate(optimizer, step, old, new, gradient, variant, small=small)[0]


def encode(
    encoding: Encoding,
    rule: Rule,
    old: Sequence[Array],
    new: Sequence[Array],
    gradient: Gradient | None,
    out: Bytes | None = None,
) -> Bytes:
    """Encode a chunk as chosen. Where the choice needs a gradient and there is none, it is inferred.

    The arguments, the result and the errors are those of ``replayed.encode``.
    """
    if encoding == "predicted":
        return predicted.encode(rule, old, new, out=out)
    if gradient is None and encoding != "predicted/2":
        gradient = inferred.gradient(rule, old, new)
    if encoding not in SCALED:
        assert gradient is not None
        return replayed.encode(rule, old, new, gradient, out=out)
    assert not isinstance(gradient, SparseGradient)
    dense = None if encoding == "predicted/2" else gradient
    return scaled.encode(rule, old, new, dense, out=out, level=THRIFTY)


def bound(encoding: Encoding, rule: Rule, count: int) -> int:
    """The bytes of space that ``encode`` needs for a chunk of ``count`` numbers."""
    if encoding in SCALED:
        return scaled.bound(rule, count)
    return predicted.bound(rule, count) if encoding == "predicted" else replayed.bound(rule, count)


def _ranges(old: Sequence[Array]) -> list[tuple[int, int]]:
    """Choose 2 to 6 ranges of 32 Ki numbers, at most an eighth of a large tensor: each is encoded in several ways."""
    nbytes = 4 * old[0].size
    count = min(SAMPLES, max(2, nbytes // (8 * SAMPLE_BYTES)))
    return [(start // 4, stop // 4) for start, stop in sample_ranges(nbytes, count)]


def _size(
    encoding: Encoding,
    rule: Rule,
    old: Sequence[Array],
    new: Sequence[Array],
    gradient: Gradient | None,
    ranges: Sequence[tuple[int, int]],
) -> int:
    """The bytes of all payloads of the ranges."""
    size = 0
    for start, stop in ranges:
        before = [np.ascontiguousarray(part).reshape(-1)[start:stop] for part in old]
        after = [np.ascontiguousarray(part).reshape(-1)[start:stop] for part in new]
        part = gradient
        if gradient is not None:
            part = (
                gradient.part(start, stop) if isinstance(gradient, SparseGradient) else gradient.reshape(-1)[start:stop]
            )
        size += len(encode(encoding, rule, before, after, part))
    return size
