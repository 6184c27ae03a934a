"""Goodput of 1 to 16,384 workers under failures: measured costs, simulated jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tools.goodput import model
from tools.goodput.model import Way
from tools.goodput.traces import SAMPLE, SAMPLES, Failure, exponential, recorded
from tools.papers.pccheck.measuring import LABELS, Cost, compared, disk_like_the_papers, measured, planned
from tools.papers.result import Asked, Cell, Claim, Figure, Result, Table
from tools.papers.scale.commits import commit_seconds

__all__ = ["run"]

WORKERS: Final = (1, 8, 64, 512, 4096, 16384)
DAY: Final = 86_400.0
MTBF: Final = 2.5e7
"""Seconds between failures of one worker: 290 days; 16,384 of them fail every 25 minutes."""
ITERATION: Final = 2.0
"""Seconds, as OPT-1.3B on the paper's machine; all measured times are scaled to it."""
RESTART: Final = 60.0
STORAGE: Final = 3 * 3600.0
"""Gemini saves to storage every three hours."""
COPIES: Final = 16
"""A drained copy takes so many times as long as a save to the local disk."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured, and scaled to `ITERATION`."""

    cost: Cost
    scale: float

    @property
    def stall(self) -> float:
        """Seconds that a save costs the loop."""
        return max(0.0, self.cost.slowdown - 1) * ITERATION * self.cost.interval

    def seconds(self, name: str) -> float:
        """Of a number of its samples."""
        return self.cost.median(name) * self.scale


def run(asked: Asked) -> Result:
    """Run the experiment."""
    names = ("checkfreq", "gpm", "torch.save", "gemini", "ckptstore-4", "topk", "full-agent", "dense-replica")
    with planned(asked) as plan:
        _, iteration = measured(asked, plan, [("checkfreq", 10)], 1)
        disk = disk_like_the_papers(iteration)
        limited = [(name, 1 if name == "topk" else 10) for name in names]  # step diffs hold every iteration
        found, iteration = measured(asked, plan, limited, asked.pick(1, 1, 3), disk)
    costs = {one.strategy: Costs(one, ITERATION / iteration) for one in found if one.slowdowns and one.samples}
    rows: list[list[Cell]] = []
    curves: dict[str, list[float]] = {}
    for way in _ways(costs):
        curves[way.name] = [_goodput(way, workers, asked.pick(1, 2, 10)) for workers in WORKERS]
        failures = recorded()
        at_trace = model.simulated(way, ITERATION, SAMPLES * SAMPLE, failures, restart=RESTART).goodput
        rows.append([way.name, way.stall, way.durable if way.durable < 1e9 else None, *curves[way.name], at_trace])
    ours = {name for name in curves if name.startswith("ckptstore")}
    last = {name: 1 - curve[-1] for name, curve in curves.items()}
    mine, its = min(last[name] for name in ours), min(last[name] for name in set(last) - ours)
    trace = {str(row[0]): float(row[-1] or 0) for row in rows}
    ratio = max(trace[name] for name in ours) / trace["CheckFreq-like"]
    heads = ("way", "stall s a save", "durable s", *(f"{number:,}" for number in WORKERS), "trace")
    return Result(
        tables=[Table("Goodput (1: no saves, no failures) by workers, and on the recorded trace", heads, rows)],
        claims=[
            Claim(
                f"at {WORKERS[-1]:,} workers, wasted time below every baseline",
                "-",
                f"{mine:.1%} against {its:.1%}",
                mine < its,
                "" if mine < its else "a peer's memory takes copies sooner than any disk",
            ),
            Claim(
                "on the trace, up to 2.86 times the goodput of CheckFreq",
                "2.86, at one of the intervals",
                f"{ratio:.2f} every 10 iterations",
                ratio >= 2.86,
                ""
                if ratio >= 2.86
                else "every 10 iterations CheckFreq waits for half of the time at most, so no way gains more than "
                "twice; `pccheck-9` has the other intervals",
            ),
            Claim(
                "where a trace takes many machines at once, memory of peers alone does not suffice",
                '"bulky preemptions are very common"',
                f"Gemini-like {trace['Gemini-like']:.2f} on the trace",
                trace["Gemini-like"] < max(trace[name] for name in ours),
                ""
                if trace["Gemini-like"] < max(trace[name] for name in ours)
                else "no machine and its peer were lost together in this draw",
            ),
        ],
        figures=[
            Figure("Goodput by workers", "lines", WORKERS, dict(curves), "workers", "goodput", "x"),
            Figure("Goodput on the recorded trace", "bars", list(trace), {"goodput": list(trace.values())}),
        ],
        compared=[compared(found)],
        remarks=[
            f"Failures are independent, one of a worker every {MTBF / DAY:.0f} days; a fifth take the machine with its "
            f"memory. Disks are attached again, as in the paper; only of two tiers the near one goes with its machine. "
            f"A failure costs {RESTART:.0f} s of restart. Measured times are scaled so that an iteration takes "
            f"{ITERATION:g} s. A save of many ranks takes in addition what `ranks` finds for a commit.",
            "Checked against real jobs that are killed at the trace's times: `pccheck-9-real`.",
        ],
        settings={"mtbf_s": MTBF, "restart_s": RESTART, "iteration_s": ITERATION, "workers": list(WORKERS)},
        numbers={name: one.cost.numbers() for name, one in costs.items()},
    )


def _ways(costs: dict[str, Costs]) -> Sequence[Way]:
    """The baselines, and what this store offers."""

    def fulls(name: str, label: str | None = None) -> Way:
        one = costs[name]
        return Way(label or LABELS[name], 10, one.stall, one.seconds("durable_s"), one.seconds("restore_s"))

    local, diffs, agent, replica = (fulls(one) for one in ("ckptstore-4", "topk", "full-agent", "dense-replica"))
    peers = fulls("gemini")
    return [
        *(fulls(one) for one in ("torch.save", "checkfreq", "gpm")),
        replace(
            peers,
            durable=STORAGE / 2,
            every=10,
            near=peers.durable,
            near_restore=peers.restore,
            restore=costs["torch.save"].seconds("restore_s"),
            peers=True,
        ),
        local,
        replace(
            local,
            name="ckptstore, N = 4, two tiers",
            durable=local.durable * COPIES,
            every=10,
            near=local.durable,
            near_restore=local.restore,
            restore=2 * local.restore,
        ),
        replace(diffs, interval=1),
        replace(agent, every=10, near=0.0, near_restore=agent.restore),
        replace(replica, every=1, near=0.0, near_restore=replica.restore),
    ]


def _goodput(way: Way, workers: int, draws: int) -> float:
    """Of jobs with so many workers: long enough for 50 failures, a day at least."""
    seconds = max(DAY, min(50 * MTBF / workers, 100 * DAY))
    commit = commit_seconds(workers) if way.name.startswith("ckptstore") else 0.0
    there = replace(way, durable=way.durable + commit)
    found = [_one(there, seconds, exponential(seconds, workers, MTBF, seed=draw), draw) for draw in range(draws)]
    return sum(found) / draws


def _one(way: Way, seconds: float, failures: Sequence[Failure], seed: int) -> float:
    return model.simulated(way, ITERATION, seconds, failures, restart=RESTART, seed=seed).goodput
