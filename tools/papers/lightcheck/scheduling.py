"""LightCheck, Table III and Fig. 14: completion times of jobs that share a device and are preempted every round.

*Physical*: some jobs train in turns on one core. Every round the job with the least service so far runs (LAS); in its
end it gets SIGTERM, makes its latest step durable, and ends; its next round restores it. *torch.save* saves the state
then; *LightCheck* has saved layer by layer all the time, so that only the last save is waited for. *Simulation*: a
cluster of 90 devices under LAS, jobs arriving at random, with the measured cost of a switch.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.bench.training.training_cases import environment
from tools.goodput.life import begun
from tools.papers.lives import Way, lived, starting
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table
from tools.warm import MODULES, Warm

__all__ = ["average_completion", "run"]

WAYS: Final = (Way("torch.save", 1_000_000, "torch.save"), Way("layer-host", 4, "LightCheck: layer-wise, every 4"))
PAPER: Final = {"static": (2.38, 2.20), "continuous": (1.67, 1.38)}
"""Hours, torch.save and LightCheck, measured."""
DEVICES: Final = 90
ROUND: Final = 360.0
"""Seconds of a simulated round."""


@dataclass(slots=True)
class _Job:
    """A job: when it arrived, its service in iterations, and when it was done; seconds of the schedule's clock."""

    number: int
    steps: int
    arrives: float
    served: int = 0
    done: float = 0.0
    digest: str = ""


@dataclass(slots=True)
class _Schedule:
    """What a schedule took: each job's completion; each round, and its seconds beside training."""

    completions: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def run(asked: Asked) -> Result:
    """Run the experiment."""
    shape = asked.pick((32, 2, 1, 16), (128, 6, 4, 64), (192, 6, 8, 64))
    steps, quantum = asked.pick(((6, 4), 3), ((48, 32, 20), 16), ((120, 80, 60, 100), 20))
    found: dict[tuple[str, str], _Schedule] = {}
    with Warm(MODULES, env=environment()) as warm:
        alone = [
            lived(warm, Way("none", 1, "none"), shape, count, (), asked.scratch / f"alone-{n}")
            for n, count in enumerate(steps)
        ]
        iteration = statistics.median(one.seconds / one.steps for one in alone)
        for trace in ("static", "continuous"):
            arrivals = [0.0 if trace == "static" else n * quantum * iteration for n in range(len(steps))]
            for way in WAYS:
                jobs = [_Job(n, *each) for n, each in enumerate(zip(steps, arrivals, strict=True))]
                folder = asked.scratch / f"{trace}-{way.strategy}"
                found[trace, way.label] = _scheduled(warm, way, shape, jobs, quantum, folder)
                mean = statistics.fmean(found[trace, way.label].completions)
                asked.told(f"{trace}, {way.label}: mean completion {mean:.2f} s")
    return _result(asked, found, [one.digest for one in alone], {"shape": shape, "steps": steps, "round": quantum})


def _scheduled(warm: Warm, way: Way, shape: Sequence[int], jobs: list[_Job], quantum: int, folder: Path) -> _Schedule:
    """Run jobs in rounds of so many iterations. Its clock leaves starts of processes out."""
    found, clock = _Schedule(), 0.0
    while waiting := [job for job in jobs if not job.done]:
        present = [job for job in waiting if job.arrives <= clock]
        if not present:
            clock = min(job.arrives for job in waiting)
            continue
        job = min(present, key=lambda one: (one.served, one.number))
        seconds, switch = _round(warm, way, shape, job, quantum, folder / str(job.number))
        clock += seconds
        found.switches.append(switch)
        found.rounds.append(seconds)
        if job.digest:
            job.done = clock
    found.completions = [job.done - job.arrives for job in jobs]
    found.digests = [job.digest for job in jobs]
    return found


def _round(warm: Warm, way: Way, shape: Sequence[int], job: _Job, quantum: int, folder: Path) -> tuple[float, float]:
    """One round of a job -> (its seconds from the model on, those of them beside training)."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    last = job.served + quantum >= job.steps
    until = job.steps if last else 10 * job.steps  # it is preempted before
    with begun(starting(warm, way, shape, until, folder), folder.parent) as life:
        said: dict[str, Any] = {}
        taken, spent = 0, 0.0
        for document in life.says():
            said |= document
            spent += document.get("spent", 0.0)
            taken += "at" in document
            if "at" in document and taken == quantum and not last:
                life.preempt()
        ended = time.monotonic()
        life.done = "digest" in said
    job.served = int(said["step"])
    if last:
        job.digest = said["digest"]
    restoring = said["restored"] - said["begun"]
    return ended - said["begun"] - spent, restoring + (ended - said["trained"])


def _result(
    asked: Asked, found: dict[tuple[str, str], _Schedule], alone: Sequence[str], settings: dict[str, object]
) -> Result:
    labels = [way.label for way in WAYS]
    means = {key: statistics.fmean(one.completions) for key, one in found.items()}
    switch = {
        label: statistics.median(each for trace in PAPER for each in found[trace, label].switches) for label in labels
    }
    # The share of a round that a switch takes is the measured one of the physical rounds.
    length = {
        label: statistics.median(each for trace in PAPER for each in found[trace, label].rounds) for label in labels
    }
    lost = {label: ROUND * min(0.9, switch[label] / length[label]) for label in labels}
    rates = asked.pick((1.0, 4.0), (1.0, 2.0, 3.0, 3.5, 4.0), (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0))
    count = asked.pick(100, 1500, 5000)
    simulated = {
        label: [average_completion(rate, lost[label], count, asked.seed) / 3600 for rate in rates] for label in labels
    }
    rows = [
        (
            *(trace, label, PAPER[trace][place], PAPER[trace][place] / PAPER[trace][0]),
            *(means[trace, label], means[trace, label] / means[trace, labels[0]], switch[label] * 1e3),
        )
        for trace in PAPER
        for place, label in enumerate(labels)
    ]
    columns = (
        *("trace", "way", "paper: mean completion h", "paper: of torch.save", "here s", "here: of torch.save"),
        "a switch ms",
    )
    formats = {columns[3]: ".2f", "here s": ".2f", columns[5]: ".2f", "a switch ms": ".0f"}
    gain = {trace: 1 - means[trace, labels[1]] / means[trace, labels[0]] for trace in PAPER}
    low = 1 - simulated[labels[1]][0] / simulated[labels[0]][0]
    equal = sum(digest == trained for one in found.values() for digest, trained in zip(one.digests, alone, strict=True))
    why = (
        "a switch here is mostly opening and restoring, some tens of milliseconds of a round of a second; saving is "
        "the smaller part of it, and layer-wise saves during the round cost more than one torch.save of a small state"
    )
    return Result(
        tables=[
            Table("Jobs that take turns on one core", columns, rows, formats),
            Table(
                f"Simulated: {DEVICES} devices, mean completion h by jobs an hour and device",
                ("jobs an hour and device", *labels),
                [(rate, *(simulated[label][n] for label in labels)) for n, rate in enumerate(rates)],
                dict.fromkeys(labels, ".2f"),
            ),
        ],
        claims=[
            Claim(
                f"mean completion is {shown} lower with LightCheck ({trace})",
                f"-{shown}",
                f"{-gain[trace]:+.0%}",
                gain[trace] > 0,
                "" if gain[trace] > 0 else why,
            )
            for trace, shown in (("static", "8 %"), ("continuous", "17 %"))
        ]
        + [
            Claim(
                "simulated, at a low load 12 % lower, and a higher load is possible (Fig. 14)",
                "-12 %",
                f"{-low:+.0%} at {rates[0]:g} jobs an hour and device",
                low > 0,
                "" if low > 0 else why,
            )
        ],
        figures=[
            Figure(
                "Mean completion (Table III)",
                "bars",
                list(PAPER),
                {label: [means[trace, label] for trace in PAPER] for label in labels},
                y="s",
            ),
            Figure(
                f"Simulated mean completion on {DEVICES} devices (Fig. 14)",
                "lines",
                list(rates),
                simulated,
                x="jobs an hour and device",
                y="h",
                log="y",
            ),
        ],
        compared=[
            Compared("the last state of each preempted job, with that of a job alone", len(found) * len(alone), equal)
        ],
        remarks=["The schedule's clock leaves starts of processes out: they are the same for both."],
        settings=settings,
        numbers={"switch_s": switch, "completions": {" ".join(key): one.completions for key, one in found.items()}},
    )


def average_completion(rate: float, lost: float, count: int, seed: int) -> float:
    """Mean seconds from a job's arrival to its end, of the middle half of `count` jobs.

    Args:
        rate: jobs an hour and device; a job needs 720 s of a device on average, exponential.
        lost: seconds of each round that saving and restoring take.
    """
    chance, now = random.Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        now += chance.expovariate(rate * DEVICES / 3600)
        arrivals.append((now, chance.expovariate(1 / 720.0)))
    clock, place, done = 0.0, 0, [0.0] * count
    waiting: list[tuple[float, int, float]] = []  # service so far, number, service needed
    while place < count or waiting:
        while place < count and arrivals[place][0] <= clock:
            heapq.heappush(waiting, (0.0, place, arrivals[place][1]))
            place += 1
        if not waiting:
            clock = arrivals[place][0]
            continue
        for served, number, needed in [heapq.heappop(waiting) for _ in range(min(DEVICES, len(waiting)))]:
            got = served + ROUND - lost
            if got >= needed:
                done[number] = clock + lost + (needed - served) - arrivals[number][0]
            else:
                heapq.heappush(waiting, (got, number, needed))
        clock += ROUND
    return statistics.fmean(done[count // 4 : count - count // 4])
