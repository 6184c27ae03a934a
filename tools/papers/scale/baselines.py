"""Every baseline is trained, killed at a random moment and restored: what it lost, and whether the rest is equal."""

from __future__ import annotations

import random
import shutil
from typing import Any

from tools.bench.training.training_cases import BASELINES, LOSSY, Case, killed
from tools.papers.pccheck.measuring import SHAPE, planned
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["run"]


def run(asked: Asked) -> Result:
    """Run the experiment."""
    shape = (64, 2, 1, 32) if asked.short else SHAPE
    rounds = asked.pick(1, 1, 5)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in BASELINES}
    with planned(asked, shape, full_every=10) as plan:
        for turn in range(rounds):
            for name in BASELINES:
                folder = plan.scratch / name
                found = killed(plan, Case("kill", name, 4), folder, random.Random(f"{asked.seed} {turn} {name}"))
                shutil.rmtree(folder, ignore_errors=True)
                samples[name].append(found)
                asked.told(f"{name}: killed after step {found['trained']}, restored {found['restored']}")
    rows: list[list[Cell]] = []
    for name, own in samples.items():
        last = own[-1]
        said = "equal, bit for bit"
        if name in LOSSY:
            said = (
                f"{last['differing']:.0%} of the weights differ, by {last['distance']:.1%} of their norm; loss "
                f"{last['loss']:.3f} instead of {last['loss_trained']:.3f}"
            )
        lost = sum(one["lost"] for one in own) / len(own)
        restore = sorted(one["restore_s"] for one in own)[len(own) // 2]
        rows.append([BASELINES[name], lost, 1e3 * restore, said])
    exact = [one for name, own in samples.items() if name not in LOSSY for one in own]
    lossy = [one for name, own in samples.items() if name in LOSSY for one in own]
    return Result(
        tables=[
            Table(
                "Killed at a random moment, a save every 4 steps",
                ("baseline", "steps lost", "restore ms", "restored state"),
                rows,
                {"steps lost": ".1f", "restore ms": ".0f"},
            )
        ],
        claims=[
            Claim(
                "a baseline loses the steps since its last save, two intervals at most",
                "f to 2 f",
                f"{max(one['lost'] for one in exact + lossy)} of 4",
                max(one["lost"] for one in exact + lossy) <= 8 + 1,
                "" if max(one["lost"] for one in exact + lossy) <= 9 else "the save before had not been durable either",
            )
        ],
        figures=[
            Figure("Steps lost", "bars", [BASELINES[name] for name in samples], {"lost": [row[1] for row in rows]})  # type: ignore[misc]
        ],
        compared=[
            Compared("restored states", len(exact), sum(one["equal"] for one in exact)),
            Compared(
                "of naive top-k DC",
                len(lossy),
                sum(one["equal"] for one in lossy),
                loss="it stores a hundredth of each change of the weights",
            ),
        ],
        remarks=["Each is a process, killed with SIGKILL; another one restores, and compares with what was trained."],
        settings={"shape": shape, "interval": 4, "full_every": 10, "rounds": rounds},
    )
