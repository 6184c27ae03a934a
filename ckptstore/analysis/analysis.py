"""Run the whole analysis: open, classify, plan, measure, conclude."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.analysis.comparison_plan import POINTS, plan_targets, spacing
from ckptstore.analysis.measurement import Measurements, MethodMeasurement, measure
from ckptstore.analysis.methods import DELTAS, METHODS, TOP
from ckptstore.analysis.recommendations import Advice, Shipping, Summary, advise, ship, summarize
from ckptstore.analysis.sampling import SampleGroup, group_tensors
from ckptstore.analysis.series import Checkpoint, Skipped, open_series, shared_tensors
from ckptstore.analysis.tensor_roles import TensorClass, classify
from ckptstore.errors import UsageError
from ckptstore.host.progress import Progress
from ckptstore.write.policy.delta_interval import RestoreBound

__all__ = ["PREFIX_BITS", "SAMPLE", "Analysis", "Options", "PrefixCount", "analyze"]

SAMPLE: Final = 8 << 20
"""Default number of bytes to measure of each group and checkpoint."""
PREFIX_BITS: Final = range(7, TOP + 1)
"""Lengths of the prefixes that are counted."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to analyze, and how.

    Attributes:
        sample: bytes of each group to measure at each checkpoint, or a share of the group (a float up to 1); None: all.
        gaps: gaps to compare over, in checkpoints; empty: chosen automatically.
        points: number of steps to measure; None: all.
        methods: names from `METHODS`; ``raw`` is always measured, and at least one delta is required.
        overrides: (glob, class) of tensors.
        bound: the maximum cost of restoring any checkpoint.
        compress_fulls: also encode fulls.
        links: link speeds in bits per second.
        cores: number of cores that encode and decode, for times.
        threads: number of threads that measure; None: the number of cores.
    """

    sample: int | float | None = SAMPLE
    gaps: tuple[int, ...] = ()
    points: int | None = POINTS
    methods: tuple[str, ...] = METHODS
    overrides: tuple[tuple[str, TensorClass], ...] = ()
    bound: RestoreBound = field(default_factory=RestoreBound)
    compress_fulls: bool = False
    links: tuple[float, ...] = (1e9, 1e10, 1e11)
    cores: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise UsageError(f"there is no codec {unknown[0]!r} to measure; there are {', '.join(METHODS)}")
        if not set(self.methods) & set(DELTAS):
            raise UsageError(f"the codecs to measure need a delta among them: {', '.join(DELTAS)}")
        if isinstance(self.sample, float) and not 0 < self.sample <= 1:
            raise UsageError(f"a sample of {self.sample:.0%}: give a size, or a share up to 100%")
        if any(gap < 1 for gap in self.gaps):
            raise UsageError("gaps are numbers of checkpoints, at least 1")


@dataclass(frozen=True, slots=True)
class PrefixCount:
    """Distinct prefixes among the measured numbers of a group at a checkpoint (the XOR paper's figure 7).

    Attributes:
        group: position among the groups.
        index: position of the checkpoint.
        bits: length of the prefix.
        distinct: number of different prefixes.
        entropy: bits that an ideal entropy coder needs for a prefix.
    """

    group: int
    index: int
    bits: int
    distinct: int
    entropy: float


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of an analysis.

    Attributes:
        series: the checkpoints.
        spacing: steps from one checkpoint to the next; the unit of gaps.
        gaps: the measured gaps.
        groups: tensors by class and dtype.
        skipped: tensors that were left out.
        options: the options.
        measurements: one per group, step, gap and method.
        summaries: their means over steps.
        prefixes: counts of distinct prefixes.
        advice: the recommendation.
        shipping: times over links.
    """

    series: tuple[Checkpoint, ...]
    spacing: int
    gaps: tuple[int, ...]
    groups: tuple[SampleGroup, ...]
    skipped: tuple[Skipped, ...]
    options: Options
    measurements: tuple[MethodMeasurement, ...]
    summaries: tuple[Summary, ...]
    prefixes: tuple[PrefixCount, ...]
    advice: Advice
    shipping: tuple[Shipping, ...]

    @property
    def sampled(self) -> float:
        """Measured share of the compared bytes, at each step."""
        return sum(group.sampled for group in self.groups) / sum(group.nbytes for group in self.groups)

    @property
    def exact(self) -> bool:
        """Whether every byte was measured."""
        return all(len(group.units) == group.blocks for group in self.groups)

    @property
    def gap(self) -> int:
        """The gap that represents all gaps: the one measured most often; of several, the smallest."""
        counts = Counter(gap for _, gap in {((one.index, one.base), one.gap) for one in self.measurements})
        return max(self.gaps, key=lambda gap: (counts[gap], -gap))

    def over_training(self, group: int, method: str) -> list[MethodMeasurement]:
        """Measurements of a method at each step; for a delta, against the previous checkpoint, whatever the gap."""
        found = (one for one in self.measurements if (one.group, one.method) == (group, method))
        return [one for one in found if one.base in (None, one.index - 1)]

    @property
    def major(self) -> tuple[int, ...]:
        """Positions of the groups with at least a thousandth of the bytes."""
        total = sum(group.nbytes for group in self.groups)
        return tuple(number for number, group in enumerate(self.groups) if group.nbytes >= total / 1000)

    def label(self, number: int) -> str:
        """A group's name for people: its class, and its dtype if the class has several."""
        group = self.groups[number]
        name = group.kind.replace("_", " ") + ("s" if group.kind != "other" else "")
        several = sum(other.kind == group.kind for other in self.groups) > 1
        return f"{name} {group.dtype}" if several else name


def analyze(
    inputs: Sequence[str],
    options: Options | None = None,
    *,
    refs: Sequence[str] = (),
    progress: Progress | None = None,
) -> Analysis:
    """Analyze a series of checkpoints. The memory needed does not depend on their sizes.

    Args:
        inputs: see `open_series`.
        options: see `Options`.
        refs: the checkpoints of a store to analyze.
        progress: called with (bytes done, total bytes), in logical bytes encoded.

    Raises:
        UsageError: fewer than two checkpoints, no tensor in common, or an option that matches nothing.
        FormatError, UnsupportedStateError, CorruptionError, StorageError, MissingDependencyError: see `open_series`.
    """
    asked = options or Options()
    series = open_series(inputs, refs, progress)
    steps = [checkpoint.step for checkpoint in series]
    plan = plan_targets(steps, asked.gaps, asked.points)
    # Open only what is measured: opening a checkpoint in a chain of step diffs takes as long as its whole chain.
    shared, skipped = shared_tensors([series[index] for index in plan.needed], progress)
    with series[-1].open() as read:
        classes = classify(shared, read, asked.overrides)
    groups = group_tensors(shared, classes, asked.sample)
    wanted = tuple(name for name in METHODS if name in {*asked.methods, "raw"})
    measured = measure(series, groups, plan.targets, wanted=wanted, threads=asked.threads, progress=progress)
    summaries = summarize(measured.results)
    advice = advise(groups, summaries, plan.gaps, asked.bound, compress_fulls=asked.compress_fulls)
    return Analysis(
        series=tuple(series),
        spacing=spacing(steps),
        gaps=plan.gaps,
        groups=tuple(groups),
        skipped=tuple(skipped),
        options=asked,
        measurements=tuple(measured.results),
        summaries=tuple(summaries),
        prefixes=tuple(_prefixes(measured)),
        advice=advice,
        shipping=tuple(ship(groups, summaries, advice, asked.links, asked.cores)),
    )


def _prefixes(measured: Measurements) -> list[PrefixCount]:
    found = []
    for (group, index), counts in measured.prefixes.items():
        for bits in PREFIX_BITS:
            merged = counts.reshape(1 << bits, -1).sum(axis=1)
            found.append(PrefixCount(group, index, bits, int(np.count_nonzero(merged)), _entropy(merged)))
    return found


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    present = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(present * np.log2(present)).sum()))  # -0.0 of a single prefix is 0
