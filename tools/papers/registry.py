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
        *("pccheck.goodput:replayed", 90),
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
_SCALE: Final = (
    Experiment("baselines", "Scale", "the papers' baselines", "Killed and restored", "scale.baselines", 20),
    Experiment("jobs", "Scale", "beyond the papers", "Goodput of 1 to 16,384 workers", "scale.jobs", 60),
    Experiment("ranks", "Scale", "beyond the papers", "Commits of many ranks", "scale.commits", 15),
)
EXPERIMENTS: Final = (
    Experiment("lowdiff-7", "LowDiff", "Exp. 7, Table III", "Bytes of a checkpoint", "lowdiff.stored_bytes", 5),
    *_PCCHECK,
    *_SCALE,
)
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
