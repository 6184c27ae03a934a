"""The experiments, by name, without what they import: a listing must not import torch."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterator, Sequence
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


_TABLE: Final = """
# LowDiff
lowdiff-1 | Exp. 1, Fig. 11 | A save after every iteration, gradients compressed | lowdiff.overhead:compressed | 60
lowdiff-2 | Exp. 2, Fig. 12 | A save after every iteration, gradients whole | lowdiff.overhead:uncompressed | 30
lowdiff-3 | Exp. 3, 9, 10; Fig. 13, 18, 19 | Wasted and effective time under failures | lowdiff.failures | 110
lowdiff-4 | Exp. 4, Fig. 14 | The most frequent saves that slow training by 3.5 % | lowdiff.overhead:frequency | 20
lowdiff-5 | Exp. 5, Fig. 15 | Time to recover | lowdiff.recovery | 40
lowdiff-6 | Exp. 6, Fig. 16 | Batches of step diffs: segments, time, memory | lowdiff.batches:batching | 20
lowdiff-7 | Exp. 7, Table III | Bytes of a checkpoint | lowdiff.stored_bytes | 5
lowdiff-8 | Exp. 8, Fig. 17 | Compression ratios | lowdiff.batches:densities | 20
lowdiff-table1 | Table I | Wasted time by fulls and batches | lowdiff.batches:grid | 15
# PCcheck
pccheck-8 | Fig. 8 | Throughput of a loop that saves every f iterations | pccheck.throughput:frequencies | 90
pccheck-9 | Fig. 2 and 9 | Goodput on a trace of preemptions, by the paper's formula | pccheck.goodput:recomputed | 2
pccheck-9-real | Fig. 9 | Goodput of real jobs, killed at the times of the trace | pccheck.goodput:replayed | 110
pccheck-10 | Fig. 10 | Throughput on persistent memory | pccheck.throughput:pmem | 30
pccheck-11 | Fig. 11 | Time until one checkpoint is durable | pccheck.persisting | 20
pccheck-12 | Fig. 12 | Throughput by N, the saves in flight | pccheck.throughput:concurrent | 40
pccheck-13 | Fig. 13 | Throughput by p, the threads that write one checkpoint | pccheck.throughput:threads | 60
pccheck-14 | Fig. 14 | Throughput by M, the memory for copies | pccheck.throughput:chunks | 60
pccheck-piped | section 3.1 | Writing from the first copied chunk on | pccheck.pipeline | 30
# LightCheck
lightcheck-1 | Table I, Fig. 5, 6 | The most frequent saves that slow training by 5 % | lightcheck.frequency | 30
lightcheck-2 | Table II, Fig. 9 | Total training time with failures | lightcheck.failures | 40
lightcheck-3 | Table III, Fig. 14 | Completion times of preempted jobs | lightcheck.scheduling | 30
lightcheck-7 | Fig. 7, 8 | Utilization while checkpoints are taken | lightcheck.utilization | 30
lightcheck-10 | Fig. 10 | Layer by layer against whole | lightcheck.layers | 30
lightcheck-11 | Fig. 11-13 | Separated against mixed | lightcheck.layout | 5
lightcheck-15 | Fig. 15 | Accuracy after resumes | lightcheck.accuracy | 20
# XOR delta
xor-3 | Fig. 3 | Ratio of weights, by model | xor.weights | 30
xor-4 | Fig. 4, 5 | Checkpoints between four nodes | xor.nodes | 15
xor-6 | Fig. 6 | Ratio of weights during training | xor.weights:over_training | 15
xor-7 | Fig. 7 | Distinct prefixes of moments | xor.moments:prefixes | 5
xor-8 | Fig. 8 | Ratio of moments | xor.moments | 5
xor-t | section 3.4 | The interval between a delta and its base | xor.intervals | 20
# Scale
baselines | the papers' baselines | Killed and restored | scale.baselines | 20
jobs | beyond the papers | Goodput of 1 to 16,384 workers | scale.jobs | 60
ranks | beyond the papers | Commits of many ranks | scale.commits | 15
"""
"""Below the name of a paper its experiments: name | place in the paper | title | module | seconds of the quick form."""


def _read(table: str) -> Iterator[Experiment]:
    paper = ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            paper = line[2:]
            continue
        name, figure, title, module, seconds = line.split(" | ")
        yield Experiment(name, paper, figure, title, module, int(seconds))


EXPERIMENTS: Final = tuple(_read(_TABLE))
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
