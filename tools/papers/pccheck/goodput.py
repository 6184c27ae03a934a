"""PCcheck, Fig. 2 and 9: goodput when a recorded trace of preemptions is replayed; by the formula, and for real."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tools.bench.training.training_cases import Case, Plan
from tools.goodput import kills, model
from tools.goodput.model import Way
from tools.goodput.traces import SAMPLE, SAMPLES, Failure, recorded
from tools.papers.limited_disk import throttled
from tools.papers.pccheck.measuring import LABELS, Cost, planned
from tools.papers.pccheck.throughput import LIMITED, Measured, measured_frequencies
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["recomputed", "replayed", "way_of"]

PAPER_ITERATION: Final = 2.0
"""Seconds: OPT-1.3B, 0.5 iterations a second."""
OURS: Final = ("ckptstore-4", "topk")
PEERS: Final = ("checkfreq", "gpm", "gemini")


def way_of(cost: Cost, iteration: float) -> Way:
    """A way with its measured costs."""
    stall = max(0.0, cost.slowdown - 1) * iteration * cost.interval
    durable, restore = cost.median("durable_s"), cost.median("restore_s")
    return Way(cost.label, cost.interval, stall, durable, restore)


def recomputed(asked: Asked) -> Result:
    """Fig. 2 and 9: the paper's formula and our simulation, with measured costs. In the time of our iterations."""
    found = measured_frequencies(asked)
    seconds = SAMPLES * SAMPLE * found.iteration / PAPER_ITERATION
    failures = recorded(seconds)
    rows: list[list[Cell]] = []
    goodput: dict[tuple[str, int], float] = {}
    apart = []
    for cost in found.limited:
        if not cost.slowdowns:
            continue
        way = way_of(cost, found.iteration)
        by_formula = model.formula(way, found.iteration, seconds, len(failures))
        outcome = model.simulated(way, found.iteration, seconds, failures)
        goodput[cost.strategy, cost.interval] = outcome.goodput
        apart.append(abs(by_formula - outcome.goodput))
        rows.append(
            [cost.label, cost.interval, 1 / cost.slowdown, by_formula, outcome.goodput, outcome.again / seconds]
        )
    intervals = sorted({interval for _, interval in goodput})
    heads = ("way", "every", "throughput", "goodput, formula", "goodput, simulated", "iterations again a second")
    return Result(
        tables=[Table("Goodput by that of a job without saves and failures", heads, rows, {"every": "d"})],
        claims=_claims(goodput, intervals, max(apart)),
        figures=[
            Figure(
                "Goodput by interval, the recorded trace (1: no saves, no failures)",
                "lines",
                intervals,
                {
                    LABELS[name]: [goodput.get((name, interval)) for interval in intervals]
                    for name in dict.fromkeys(name for name, _ in goodput)
                },
                "iterations between saves",
                "goodput",
                "x",
            )
        ],
        compared=[Compared("the last checkpoint of each loop", *[sum(len(one.samples) for one in found.limited)] * 2)],
        remarks=[
            LIMITED,
            f"The trace is the one that the paper replays: {len(failures)} changes of a cluster of spot GPUs in 3.76 "
            f"hours; here in {seconds:.0f} s, as an iteration takes {1e3 * found.iteration:.0f} ms instead of 2 s.",
            "As in the paper, disks are attached again, and Gemini's peers are never lost together; see `jobs`.",
        ],
        settings={"iteration_s": found.iteration, "seconds": seconds, "failures": len(failures)},
        numbers={"goodput": [[*key, value] for key, value in goodput.items()]},
    )


def _claims(goodput: Mapping[tuple[str, int], float], intervals: Sequence[int], apart: float) -> list[Claim]:
    def ratio(mine: str, its: str) -> tuple[float, int]:
        both = [at for at in intervals if (its, at) in goodput and (mine, at) in goodput]
        return max((goodput[mine, at] / max(1e-9, goodput[its, at]), at) for at in both)

    def peak(name: str) -> float:
        return max(value for (one, _), value in goodput.items() if one == name)

    concurrent, at = ratio("ckptstore-4", "checkfreq")
    diffs, often = ratio("topk", "checkfreq")
    peaks = {name: max(map(peak, OURS)) / peak(name) for name in PEERS}
    best = max(goodput, key=lambda key: goodput[key])
    return [
        Claim(
            "at one interval, up to 2.86 times the goodput of CheckFreq",
            "2.86 (1.77 for OPT-1.3B every 10)",
            f"{max(concurrent, diffs):.2f}: step diffs {diffs:.2f} every {often}, fulls with N = 4 {concurrent:.2f} "
            f"every {at}",
            max(concurrent, diffs) >= 2.86,
            "Concurrent fulls alone gain what the disk gives to many streams by what it gives to one, here 2.2; step "
            "diffs write less.",
        ),
        Claim(
            "peak against peak, up to 1.25 times CheckFreq, 1.27 times GPM, 1.44 times Gemini",
            "1.25, 1.27, 1.44",
            ", ".join(f"{peaks[name]:.2f}" for name in PEERS),
            all(one >= 1 for one in peaks.values()),
            ""
            if all(one >= 1 for one in peaks.values())
            else "a peer's memory takes a copy sooner than any disk, as long as no two machines are lost together",
        ),
        Claim(
            "less waste than every baseline at its best interval",
            "yes",
            f"{LABELS[best[0]]}, every {best[1]}: {goodput[best]:.2f}",
            best[0] in OURS,
            ""
            if best[0] in OURS
            else "a peer's memory takes copies sooner than a disk; `jobs` counts what two machines lose",
        ),
        Claim(
            "the formula describes the replay",
            "it is the paper's figure",
            f"it differs from the simulation by {apart:.3f} at most",
            apart < 0.1,
            "" if apart < 0.1 else "failures come in groups, and the formula takes the mean",
        ),
    ]


def replayed(asked: Asked) -> Result:
    """Fig. 9, for real: a job that is killed at the times of the trace, in the time of our iterations."""
    found = measured_frequencies(asked)
    until, seconds = asked.pick((12, 6.0), (16, 20.0), (75, 240.0))
    names = ("checkfreq", "ckptstore-4", "topk") if asked.short else ("checkfreq", "gpm", "gemini", *OURS)
    intervals = dict.fromkeys(names, 10) | {"topk": 1}  # step diffs hold every iteration
    times = [one.at for one in recorded(seconds, until)]
    lives: dict[str, kills.Lives] = {}
    equal: dict[str, int] = {}
    costs = {
        one.strategy: one for one in found.limited if one.interval == intervals.get(one.strategy) and one.slowdowns
    }
    with planned(asked) as plan:
        with throttled(found.disk):
            for name in names:
                lives[name] = kills.lived(plan, Case("live", name, intervals[name]), times, seconds)
                asked.told(f"{LABELS[name]}: step {lives[name].useful} after {len(lives[name].restored)} restores")
        together, twice = _two_workers(asked, plan, times, seconds, costs["ckptstore-4"].median("durable_s"))
        lives["ranks"] = twice
        for name, one in lives.items():
            base = "none-topk" if name.startswith("topk") else "none"
            restarts = [step for step, _ in one.restored]
            # Bits depend on the number of threads, and two ranks share the cores.
            alike = replace(plan, pinned=name != "ranks")
            known = kills.digests(alike, base, max(restarts), restarts) if any(restarts) else {}
            equal[name] = one.equal(known)
    ratio = {name: one.useful / max(1, lives["checkfreq"].useful) for name, one in lives.items()}
    rows, apart = _rows({name: lives[name] for name in names}, costs, found, times)
    rows.append(together)
    best = max(ratio[name] for name in names if name in OURS)
    heads = ("way", "useful steps", "by CheckFreq's", "steps again", "down s", "goodput", "model")
    return Result(
        tables=[
            Table(f"{len(times)} kills in {seconds:g} s; fulls every 10 iterations, step diffs at each", heads, rows)
        ],
        claims=[
            Claim(
                "every 10 iterations: goodput by CheckFreq's (OPT-1.3B)",
                "1.77",
                f"{best:.2f} (fulls with N = 4: {ratio['ckptstore-4']:.2f})",
                best >= 1.77,
                ""
                if best >= 1.77
                else "a restart takes a larger part of the time between kills than in the paper, for every way alike",
            ),
            Claim(
                "the model agrees with the real job",
                "-",
                f"it is {apart:.0%} off in the median",
                apart < 0.2,
                "" if apart < 0.2 else "costs and lives were measured at different loads of the machine",
            ),
        ],
        figures=[
            Figure(
                "Goodput of killed jobs (1: no saves, no failures)",
                "bars",
                [LABELS[name] for name in names],
                {"real": [row[5] for row in rows[:-1]], "model": [row[6] for row in rows[:-1]]},  # type: ignore[misc]
            )
        ],
        compared=[
            Compared(
                "the state that each life restored",
                sum(len(one.restored) for one in lives.values()),
                sum(equal.values()),
            )
        ],
        remarks=[
            LIMITED,
            "Every life is a process, killed with SIGKILL. A restart is a fork of a process that has imported torch, "
            "the restore and the new writer. Of two ranks the loop without kills is the measure.",
            "Each restored state is compared with that of a job that was never killed; where gradients are compressed, "
            "of one that drops its residuals at the same steps, as a restart does (`TopKHook(exact=False)`).",
        ],
        settings={"seconds": seconds, "kills": times, "iteration_s": found.iteration},
        numbers={"down": {name: one.down for name, one in lives.items()}},
    )


def _two_workers(
    asked: Asked, plan: Plan, times: Sequence[float], seconds: float, durable: float
) -> tuple[list[Cell], kills.Lives]:
    """A job of two ranks: without kills, and with them. Its goodput is relative to itself without kills."""
    case, kept = Case("live", "ranks", 10), replace(plan, pinned=False)
    whole = kills.lived(kept, case, [], seconds / 2, ranks=2)
    found = kills.lived(kept, case, times, seconds, ranks=2)
    asked.told(f"two ranks: step {found.useful} after {len(found.restored)} restores")
    each = whole.seconds / max(1, whole.useful)
    down = statistics.median(found.down) if found.down else 0.0
    failures = [Failure(at, 0, 2) for at in times]
    expected = model.simulated(Way("ranks", 10, 0.0, durable, 0.0), each, seconds, failures, restart=down).goodput
    row: list[Cell] = ["ckptstore, two ranks, N = 2", found.useful, None, found.again, down]
    return [*row, found.useful * each / seconds, expected], found


def _rows(
    lives: Mapping[str, kills.Lives], costs: Mapping[str, Cost], found: Measured, times: Sequence[float]
) -> tuple[list[list[Cell]], float]:
    rows: list[list[Cell]] = []
    off = []
    for name, one in lives.items():
        down = statistics.median(one.down) if one.down else 0.0
        way = replace(way_of(costs[name], found.iteration), restore=0.0)
        failures = [Failure(at, 0, 1) for at in times]
        expected = model.simulated(way, found.iteration, one.seconds, failures, restart=down)
        goodput = one.useful * found.iteration / one.seconds
        off.append(abs(expected.goodput / max(goodput, 1e-9) - 1))
        by = one.useful / max(1, lives["checkfreq"].useful)
        rows.append([LABELS[name], one.useful, by, one.again, down, goodput, expected.goodput])
    return rows, statistics.median(off)
