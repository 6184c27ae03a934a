"""Loops that save, each in a process of its own, on this disk and on one like the paper's.

The paper's disk took 18 iterations for one checkpoint of OPT-1.3B (`torch.save`, one stream), and 57 for one of VGG16;
several streams together got 2.2 times as much. This machine's disk is faster in relation to its processor. So each
figure has two forms: this disk as it is, and a limit of its rate (`tools.baselines.medium`) under which one stream
takes 18 iterations for a checkpoint, and gets 46 % of what many get. The link to Gemini's peer takes 4.3 iterations for
one, as the paper's network did.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.bench.storage.rounds import WorkerError
from tools.bench.training.training_cases import BASELINES, Case, Plan, environment, finished
from tools.papers.limited_disk import Disk, limited_to, throttled
from tools.papers.result import Asked, Compared
from tools.warm import MODULES, Warm

__all__ = ["LABELS", "SHAPE", "Cost", "compared", "disk_like_the_papers", "measured", "planned"]

SHAPE: Final = (128, 6, 4, 32)
"""Width, layers, batch, context: 1.2 million parameters, 14.7 MB of state, iterations of 128 tokens."""
TINY: Final = (32, 1, 1, 8)
"""Of ``--smoke``."""
STATE_BYTES: Final = 14_700_000
ITERATIONS_A_SAVE: Final = 18.0
"""OPT-1.3B, from the paper's numbers: 10 iterations with CheckFreq take 39 s, 20 s without saves."""
ONE_STREAM: Final = 0.46
"""VGG16, Fig. 8a at 10 iterations: 2.94 iterations a second with CheckFreq, 6.35 with PCcheck."""
ITERATIONS_A_COPY: Final = 4.3
"""OPT-1.3B, 16.2 GB over the 15 Gbit/s that the paper measured between its machines."""
LABELS: Final = BASELINES | {
    "ckptstore-1": "ckptstore, N = 1",
    "ckptstore-2": "ckptstore, N = 2",
    "ckptstore-4": "ckptstore, N = 4",
    "gradient-diffs": "ckptstore, step diffs",
    "topk": "ckptstore, top-k step diffs",
    "topk-agent": "ckptstore, top-k, agent",
    "dense-replica": "ckptstore, replica",
    "full-agent": "ckptstore, fulls by an agent",
}


@dataclass(slots=True)
class Cost:
    """What a loop that saves came to.

    Attributes:
        strategy, interval: the case.
        slowdowns: an iteration by one without saves, of the same round.
        samples: what the worker reported.
        error: why there is none.
    """

    strategy: str
    interval: int
    slowdowns: list[float] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def slowdown(self) -> float:
        """The median."""
        return statistics.median(self.slowdowns)

    def median(self, name: str) -> float:
        """Of a number of the samples."""
        return statistics.median(one[name] for one in self.samples if name in one)

    @property
    def label(self) -> str:
        """For tables."""
        return LABELS.get(self.strategy, self.strategy)

    def numbers(self) -> dict[str, Any]:
        """For the JSON."""
        kept = ("iteration_s", "stall_s", "durable_s", "restore_s")
        return {
            "strategy": self.strategy,
            "interval": self.interval,
            "slowdowns": self.slowdowns,
            **{name: [one[name] for one in self.samples if name in one] for name in kept},
        } | ({"error": self.error} if self.error else {})


def disk_like_the_papers(iteration: float, state_bytes: float = STATE_BYTES) -> Disk:
    """The limit, for iterations of so many seconds."""
    return limited_to(state_bytes, iteration, ITERATIONS_A_SAVE, ITERATIONS_A_COPY, ONE_STREAM)


@contextlib.contextmanager
def planned(asked: Asked, shape: tuple[int, int, int, int] = SHAPE, full_every: int = 100) -> Iterator[Plan]:
    """A plan whose processes start warm."""
    with Warm(MODULES, env=environment()) as nursery:
        width, layers, batch, context = TINY if asked.smoke else shape
        yield Plan(width, layers, batch, context, 10, full_every, "cpu", True, asked.scratch, warm=nursery)


def measured(
    asked: Asked, plan: Plan, ways: Sequence[tuple[str, int]], rounds: int, disk: Disk | None = None
) -> tuple[list[Cost], float]:
    """Measure every (strategy, interval) `rounds` times -> the costs, and the seconds of an iteration without saves.

    The loop without saves has a turn in each round.
    """
    found = [Cost(strategy, interval) for strategy, interval in ways]
    plain: list[float] = []
    with throttled(disk or Disk()):
        for turn in range(rounds):
            bases = {
                name: _loop(plan, Case("loop", name, 10))["iteration_s"] for name in {_base(way) for way, _ in ways}
            }
            plain.append(bases.get("none", min(bases.values())))
            for place in range(len(found)):
                one = found[(place + turn) % len(found)]
                if one.error:
                    continue
                try:
                    sample = _loop(plan, Case("loop", one.strategy, one.interval))
                except WorkerError as error:
                    one.error = str(error)
                    continue
                one.slowdowns.append(sample["iteration_s"] / bases[_base(one.strategy)])
                one.samples.append(sample)
                asked.told(f"{one.label}, every {one.interval}: {one.slowdowns[-1]:.2f} of an iteration without saves")
    return found, statistics.median(plain)


def _base(strategy: str) -> str:
    return "none-topk" if strategy.startswith("topk") else "none"


def _loop(plan: Plan, case: Case) -> dict[str, Any]:
    folder = plan.scratch / "loop"
    try:
        return finished(plan, "loop", case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compared(found: Sequence[Cost], what: str = "the last checkpoint of each loop") -> Compared:
    """That each loop restored its last state; a worker whose state differs raises."""
    samples = [(one, sample) for one in found for sample in one.samples]
    equal = sum("restore_s" in sample for _, sample in samples)
    return Compared(what, len(samples) + sum(bool(one.error) for one in found), equal)
