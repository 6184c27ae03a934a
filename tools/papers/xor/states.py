"""Pairs of states of several trajectories, and what each method makes of them (`ckptstore.analysis`)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptstore
from ckptstore.analysis.analysis import Analysis, Options, analyze
from ckptstore.formats.codecs import PAPER_POLICY
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tools.bench.codecs.trajectories import Trajectory, ensure
from tools.papers.result import Asked

__all__ = ["GROUPS", "METHODS", "NAMES", "Pair", "analyzed", "exact", "pairs", "ratios", "xor_gzip"]

NAMES: Final = {
    "lm": "language model",
    "finetune": "fine-tuning",
    "cnn": "CNN",
    "bf16": "bf16 weights",
}
GROUPS: Final = {"model": "weights", "exp_avg": "first moment", "exp_avg_sq": "second moment", "momentum": "momentum"}
METHODS: Final = ("gzip", "zstd", "xor", "sub", "planes", "prefix", "prefix-grouped")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two states of a trajectory, `gap` steps apart."""

    trajectory: Trajectory
    step: int
    gap: int

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files of the earlier and the later state."""
        return self.trajectory.path(self.step), self.trajectory.path(self.step + self.gap)


def pairs(asked: Asked, name: str) -> Iterator[Pair]:
    """The pairs of a trajectory, gaps of 1 and 10 at each of its phases. Trains it, unless it is cached."""
    import torch

    threads = torch.get_num_threads()
    try:
        found = ensure(asked.pick("small-", "small-", "") + name)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    asked.told(f"{NAMES[name]}: {len(found.steps)} states")
    for step in found.recipe.phases.values():
        for gap in (1, 10):
            if step + gap in found.steps:
                yield Pair(found, step, gap)


def analyzed(pair: Pair, methods: Sequence[str] = METHODS) -> Analysis:
    """What the methods make of the later state, and of it and the earlier one."""
    options = Options(sample=None, methods=tuple({*methods, "xor"}), gaps=(1,), threads=1)
    return analyze([str(path) for path in pair.paths], options)


def ratios(found: Analysis) -> dict[tuple[str, str], float]:
    """(class of tensors, method) -> raw bytes over stored bytes."""
    return {
        (found.groups[one.group].kind, one.method): 1 / one.estimate.fraction
        for one in found.summaries
        if one.encode is not None or one.method == "raw"
    }


def xor_gzip(pair: Pair, part: str) -> float:
    """The ratio of the exclusive or of two states under gzip: the form that the paper describes most simply."""
    first, last = (pair.trajectory.load(step, f"{part}.") for step in (pair.step, pair.step + pair.gap))
    raw = sum(one.nbytes for one in last.values())
    return raw / sum(len(gzip.compress((last[name] ^ first[name]).tobytes(), 6)) for name in last)


def exact(asked: Asked, pair: Pair, part: str) -> bool:
    """Whether the later state comes back bit for bit from a store that keeps it as the paper does.

    That is its exclusive or with the earlier one; of moments the dictionaries of their prefixes.
    """
    first, last = (pair.trajectory.load(step, f"{part}.") for step in (pair.step, pair.step + pair.gap))
    folder = asked.scratch / f"{pair.trajectory.name}-{part}-{pair.step}-{pair.gap}"
    bound = RestoreBound(times=None, depth=1)
    options = DeltaOptions(interval=1, form="paper", bound=bound, policy=PAPER_POLICY)
    with ckptstore.open(folder, create=True) as store:
        with store.writer(deltas=options, poll_seconds=None) as writer:
            writer.save({part: _plain(first)}, 1)
            writer.save({part: _plain(last)}, 2)
        found: Mapping[str, Any] = store.load(2, framework="numpy")[part]
        return bool(last) and all(np.array_equal(np.asarray(found[name]), image) for name, image in last.items())


def _plain(state: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return dict(state)
