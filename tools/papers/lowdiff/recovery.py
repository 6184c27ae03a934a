"""LowDiff, Exp. 5: how long recovery takes, by the distance between fulls.

A failure comes half a distance after a full, on average. *torch.save* loads the full and trains the rest again. *Naive
DC* loads the full and applies the differences, one after the other. *LowDiff* replays the compressed gradients: by one
thread, or over parameters by all. *LowDiff+ (S)* takes the state from the agent's memory.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from tools.bench.training.every_step_recovery import recovered
from tools.bench.training.training_cases import Case
from tools.bench.training.training_loop import Shape, Trainer, digest
from tools.bench.training.training_strategies import Ledger, Options
from tools.bench.training.training_worker import ALL
from tools.papers.loops import planned
from tools.papers.lowdiff.diff_run import diff_run
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table

__all__ = ["run"]

PAPER: Final = {10: ("-83.2 %", "-55.8 %")}
"""LowDiff against torch.save, and against naive DC, by the distance between fulls."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    shape = asked.pick(Shape(32, 2, 1, 16), Shape(192, 6, 8, 64), Shape(320, 6, 8, 64))
    every = asked.pick((4, 8), (5, 10, 20, 50), (5, 10, 20, 50))
    halves = [distance // 2 for distance in every]
    rounds = asked.pick(1, 2, 3)
    with diff_run(asked.scratch / "ours", shape) as one:
        one.take(1 + halves[-1], noted=tuple(1 + half for half in halves))
        one.settle()
        iteration = statistics.median(one.iterations[1:])
        one.restored(1 + halves[0])
        ours = {half: [one.restored(1 + half) for _ in range(rounds)] for half in halves}
        serial = {half: [one.restored(1 + half, threads=1) for _ in range(rounds)] for half in halves}
    asked.told(f"replayed; an iteration takes {iteration * 1e3:.0f} ms")
    equal = sum(all(same for _, same in found) for way in (ours, serial) for found in way.values())
    naive, kept = _strategy("naive-topk", shape, halves, asked.scratch / "naive")
    full, same = _strategy("torch.save", shape, [0], asked.scratch / "full")
    equal += same
    asked.told("differences and fulls are restored")
    with planned(asked, (shape.width, shape.layers, shape.batch, shape.context)) as plan:
        agent = [
            recovered(replace(plan, full_every=100), Case("recover", "dense-replica", 1), asked.scratch / f"s{n}", 50)
            for n in range(asked.pick(1, 1, 3))
        ]
    memory = statistics.median(found["recover_s"] for found in agent)
    rows = []
    for distance, half in zip(every, halves, strict=True):
        best = min(seconds for seconds, _ in ours[half])
        base = full[0] + half * iteration
        rows.append(
            (
                *(distance, base, naive[half], min(seconds for seconds, _ in serial[half]), best, memory),
                *(
                    best / base - 1,
                    PAPER.get(distance, ("", ""))[0],
                    best / naive[half] - 1,
                    base / best,
                    base / memory,
                ),
            )
        )
    columns = (
        *("full every", "torch.save s", "naive DC s", "LowDiff, 1 thread s", "LowDiff s", "LowDiff+ (S) s"),
        *("LowDiff / torch.save", "paper", "LowDiff / naive DC", "LowDiff x", "LowDiff+ x"),
    )
    formats = dict.fromkeys(columns[1:6], ".3f") | {"LowDiff / torch.save": "+.1%", "LowDiff / naive DC": "+.1%"}
    formats |= {"LowDiff x": ".1f", "LowDiff+ x": ".1f"}
    at_ten = next((row for row in rows if row[0] == 10), rows[-1])
    last = rows[-1]
    return Result(
        tables=[Table("Seconds to the last saved iteration", columns, rows, formats)],
        claims=[
            Claim(
                f"at a full every {at_ten[0]}, LowDiff recovers 83.2 % faster than torch.save",
                "-83.2 %",
                f"{at_ten[6]:+.1%}",
                at_ten[6] < -0.5,
                "half a distance of five iterations is little to repeat; the gain grows with the distance"
                if at_ten[6] > -0.832
                else "",
            ),
            Claim(
                "and 55.8 % faster than naive DC",
                "-55.8 %",
                f"{at_ten[8]:+.1%}",
                at_ten[8] < -0.3,
                "differences of whole states are read and decoded at every step" if at_ten[8] < -0.3 else _NAIVE,
            ),
            Claim(
                "LowDiff+ from memory is 9.4 to 57.1 times faster than torch.save",
                "9.4-57.1x",
                f"{rows[0][10]:.1f}-{last[10]:.1f}x",
                last[10] > 9.4,
                "from memory it takes as long as half a distance of iterations",
                "the time from memory does not depend on the distance; it includes opening the store and comparing the "
                "whole state",
            ),
            Claim(
                "recovering is at least ten times faster than computing again (the project's own aim)",
                ">= 10x",
                f"LowDiff {last[9]:.1f}x, LowDiff+ {last[10]:.1f}x at a full every {last[0]}",
                max(last[9], last[10]) >= 10,
                "from memory; replay from the store depends on how long an iteration is beside a replayed one",
            ),
        ],
        figures=[
            Figure(
                "Recovery by the distance between fulls",
                "lines",
                list(every),
                {
                    "torch.save, trained again": [row[1] for row in rows],
                    "naive DC": [row[2] for row in rows],
                    "LowDiff": [row[4] for row in rows],
                    "LowDiff+ (S)": [row[5] for row in rows],
                },
                x="iterations between fulls",
                y="s",
                log="y",
            )
        ],
        compared=[
            Compared("restored states, and the state from the agent's memory", 2 * len(every) + 2, equal + 1),
            Compared(
                "states of naive DC", len(every), kept, "of each change of a weight only the largest hundredth is kept"
            ),
        ],
        settings={"shape": repr(shape), "iteration_ms": iteration * 1e3, "rounds": rounds},
    )


_NAIVE: Final = "a difference is as quick to apply as a replayed step here: the state is small"


def _strategy(name: str, shape: Shape, distances: list[int], folder: Path) -> tuple[dict[int, float], int]:
    """(seconds to restore, by distance from the full; how many were equal). Files after a step are deleted for it."""
    folder.mkdir(parents=True)
    trainer, ledger = Trainer(shape), Ledger()
    way = ALL[name](folder, trainer, Options(1, full_every=1000), ledger)
    digests = {}
    for step in range(1, 2 + max(distances)):
        trainer.take()
        way.save(step)
        digests[step] = digest(trainer.state())
    way.close()
    seconds, equal = {}, 0
    for distance in sorted(distances, reverse=True):
        for path in folder.iterdir():
            if int(path.stem.split("-")[1]) > 1 + distance:
                path.unlink()
        other = Trainer(shape, seed=2)
        other.take()
        began = time.perf_counter()
        found = ALL[name].restore(folder, other)
        seconds[distance] = time.perf_counter() - began
        equal += found == 1 + distance and digest(other.state()) == digests[1 + distance]
    return seconds, equal
