"""The experiments, by name, without what they import: a listing must not import torch."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tools.papers.result import Asked, Result

__all__ = ["EXPERIMENTS", "Experiment", "chosen"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        name: what the command takes: the paper, and the number of the experiment or figure there.
        paper: LowDiff, PCcheck, LightCheck or XOR delta; Scale: what no paper has.
        figure: where it is in the paper.
        title: in a line.
        module: has ``run(asked) -> Result``; ``module:name`` if the function has another name.
        quick_seconds: about how long ``--quick`` takes on two idle cores.
    """

    name: str
    paper: str
    figure: str
    title: str
    module: str
    quick_seconds: int

    @property
    def heading(self) -> str:
        """The title of its picture."""
        return f"{self.paper}, {self.figure}: {self.title}"

    def run(self, asked: Asked) -> Result:
        """Run it."""
        return self.function()(asked)

    def function(self) -> Callable[[Asked], Result]:
        """What runs it. Imports its module."""
        module, _, name = self.module.partition(":")
        found: Callable[[Asked], Result] = getattr(importlib.import_module(f"tools.papers.{module}"), name or "run")
        return found


_LOWDIFF: Final = (
    Experiment(
        *("lowdiff-1", "LowDiff", "Exp. 1, Fig. 11", "A save after every iteration, gradients compressed"),
        *("lowdiff.overhead:compressed", 60),
    ),
    Experiment(
        *("lowdiff-2", "LowDiff", "Exp. 2, Fig. 12", "A save after every iteration, gradients not compressed"),
        *("lowdiff.overhead:uncompressed", 30),
    ),
    Experiment(
        *("lowdiff-3", "LowDiff", "Exp. 3, 9, 10; Fig. 13, 18, 19", "Wasted and effective time under failures"),
        *("lowdiff.failures", 110),
    ),
    Experiment(
        *("lowdiff-4", "LowDiff", "Exp. 4, Fig. 14", "The most frequent saves that slow training by 3.5 %"),
        *("lowdiff.overhead:frequency", 20),
    ),
    Experiment("lowdiff-5", "LowDiff", "Exp. 5, Fig. 15", "Time to recover", "lowdiff.recovery", 40),
    Experiment(
        *("lowdiff-6", "LowDiff", "Exp. 6, Fig. 16", "Batches of step diffs: segments, time, memory"),
        *("lowdiff.batches:batching", 20),
    ),
    Experiment("lowdiff-7", "LowDiff", "Exp. 7, Table III", "Bytes of a checkpoint", "lowdiff.stored_bytes", 5),
    Experiment(
        *("lowdiff-8", "LowDiff", "Exp. 8, Fig. 17", "Compression ratios", "lowdiff.batches:densities", 20),
    ),
    Experiment(
        *("lowdiff-table1", "LowDiff", "Table I", "Wasted time by fulls and batches", "lowdiff.batches:grid", 15),
    ),
)
_PCCHECK: Final = (
    Experiment(
        *("pccheck-8", "PCcheck", "Fig. 8", "Throughput of a loop that saves every f iterations"),
        *("pccheck.throughput:frequencies", 90),
    ),
    Experiment(
        *("pccheck-9", "PCcheck", "Fig. 2 and 9", "Goodput on a trace of preemptions, by the paper's formula"),
        *("pccheck.goodput:recomputed", 2),
    ),
    Experiment(
        *("pccheck-9-real", "PCcheck", "Fig. 9", "Goodput of real jobs that are killed at the times of the trace"),
        *("pccheck.goodput:replayed", 110),
    ),
    Experiment(
        *("pccheck-10", "PCcheck", "Fig. 10", "Throughput on persistent memory"),
        *("pccheck.throughput:pmem", 30),
    ),
    Experiment("pccheck-11", "PCcheck", "Fig. 11", "Time until one checkpoint is durable", "pccheck.persisting", 20),
    Experiment(
        *("pccheck-12", "PCcheck", "Fig. 12", "Throughput by N, the saves in flight"),
        *("pccheck.throughput:concurrent", 40),
    ),
    Experiment(
        *("pccheck-13", "PCcheck", "Fig. 13", "Throughput by p, the threads that write one checkpoint"),
        *("pccheck.throughput:threads", 60),
    ),
    Experiment(
        *("pccheck-14", "PCcheck", "Fig. 14", "Throughput by M, the memory for copies"),
        *("pccheck.throughput:chunks", 60),
    ),
)
_LIGHTCHECK: Final = (
    Experiment(
        *("lightcheck-1", "LightCheck", "Table I, Fig. 5, 6", "The most frequent saves that slow training by 5 %"),
        *("lightcheck.frequency", 30),
    ),
    Experiment(
        *("lightcheck-2", "LightCheck", "Table II, Fig. 9", "Total training time with failures"),
        *("lightcheck.failures", 40),
    ),
    Experiment(
        *("lightcheck-3", "LightCheck", "Table III, Fig. 14", "Completion times of preempted jobs"),
        *("lightcheck.scheduling", 30),
    ),
    Experiment(
        *("lightcheck-7", "LightCheck", "Fig. 7, 8", "Utilization while checkpoints are taken"),
        *("lightcheck.utilization", 30),
    ),
    Experiment("lightcheck-10", "LightCheck", "Fig. 10", "Layer by layer against whole", "lightcheck.layers", 30),
    Experiment("lightcheck-11", "LightCheck", "Fig. 11-13", "Separated against mixed", "lightcheck.layout", 5),
    Experiment("lightcheck-15", "LightCheck", "Fig. 15", "Accuracy after resumes", "lightcheck.accuracy", 20),
)
_XOR: Final = (
    Experiment("xor-3", "XOR delta", "Fig. 3", "Ratio of weights, by model", "xor.weights", 30),
    Experiment("xor-4", "XOR delta", "Fig. 4, 5", "Checkpoints between four nodes", "xor.nodes", 15),
    Experiment("xor-6", "XOR delta", "Fig. 6", "Ratio of weights during training", "xor.weights:over_training", 15),
    Experiment("xor-7", "XOR delta", "Fig. 7", "Distinct prefixes of moments", "xor.moments:prefixes", 5),
    Experiment("xor-8", "XOR delta", "Fig. 8", "Ratio of moments", "xor.moments", 5),
    Experiment("xor-t", "XOR delta", "section 3.4", "The interval between a delta and its base", "xor.intervals", 20),
)
_SCALE: Final = (
    Experiment("baselines", "Scale", "the papers' baselines", "Killed and restored", "scale.baselines", 20),
    Experiment("jobs", "Scale", "beyond the papers", "Goodput of 1 to 16,384 workers", "scale.jobs", 60),
    Experiment("ranks", "Scale", "beyond the papers", "Commits of many ranks", "scale.commits", 15),
)
EXPERIMENTS: Final = (*_LOWDIFF, *_PCCHECK, *_LIGHTCHECK, *_XOR, *_SCALE)
"""In the order of the page."""


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of names and globs (``all``, ``lowdiff-*``), in the order of the page.

    Raises:
        KeyError: a name that matches none.
    """
    found: list[Experiment] = []
    for name in names:
        pattern = "*" if name == "all" else name
        matching = [one for one in EXPERIMENTS if fnmatch.fnmatchcase(one.name, pattern)]
        if not matching:
            raise KeyError(name)
        found += matching
    return [one for one in EXPERIMENTS if one in found]
