"""PCcheck, Fig. 11: seconds until one checkpoint is durable, by its size; training stands still."""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Final

import torch

from tools.baselines.catalog import BASELINES
from tools.baselines.strategy import Ledger, Options, Strategy
from tools.bench.training.pccheck_settings import PCCHECK
from tools.bench.training.training_loop import Shape, Trainer, digest
from tools.papers.pccheck.measuring import LABELS
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["run"]

SHAPES: Final = (Shape(128, 6, 1, 8), Shape(320, 6, 1, 8), Shape(576, 6, 1, 8))
WAYS: Final = ("torch.save", "checkfreq", "gpm", "gemini", "n1-p1", "n1-p3")
SKIPPED: Final = 2
"""Saves that are not counted: memory is touched in them."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    kinds: dict[str, type[Strategy]] = {**BASELINES, **PCCHECK}
    labels = {name: LABELS.get(name, kinds[name].label) for name in WAYS}
    shapes = SHAPES[: asked.pick(1, 2, 3)]
    rounds = asked.pick(1, 5, 12)
    rows: list[list[Cell]] = []
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    sizes, equal = [], 0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shape in shapes:
            found, size, same = _measured(asked, {name: kinds[name] for name in WAYS}, shape, rounds)
            equal += same
            sizes.append(round(size / 1e6))
            for name in WAYS:
                times[name].append(statistics.median(found[name]))
                row: list[Cell] = [f"{size / 1e6:.0f} MB", labels[name], 1e3 * times[name][-1], 1e3 * min(found[name])]
                rows.append([*row, size / 1e6 / times[name][-1]])
            asked.told(f"{size / 1e6:.0f} MB: " + ", ".join(f"{name} {1e3 * times[name][-1]:.0f} ms" for name in WAYS))
    finally:
        torch.set_num_threads(before)
    ours = [min(times["n1-p1"][at], times["n1-p3"][at]) for at in range(len(shapes))]
    gains = {name: [its / mine for its, mine in zip(times[name], ours, strict=True)] for name in ("checkfreq", "gpm")}
    best = max(max(one) for one in gains.values())
    gemini = all(its <= mine for its, mine in zip(times["gemini"], ours, strict=True))
    return Result(
        tables=[
            Table(
                f"One checkpoint at a time, {rounds} of each in turns",
                ("state", "way", "median ms", "best ms", "MB/s"),
                rows,
                {"median ms": ".0f", "best ms": ".0f", "MB/s": ".0f"},
            )
        ],
        claims=[
            Claim(
                "one checkpoint is durable up to 1.9 times sooner than with CheckFreq and GPM",
                "1.9",
                "; ".join(f"{LABELS[name]} " + ", ".join(f"{one:.2f}" for one in own) for name, own in gains.items()),
                best >= 1.9,
                "" if best >= 1.9 else "this disk takes one stream almost as fast as three: CheckFreq loses less",
            ),
            Claim(
                "Gemini has the lowest time, as it writes to no storage",
                "yes",
                ", ".join(f"{1e3 * one:.0f} ms" for one in times["gemini"]),
                gemini,
                "" if gemini else "its peer shares the cores of this machine, and every byte is hashed on both sides",
            ),
        ],
        figures=[
            Figure(
                "Seconds until durable, by MB",
                "lines",
                sizes,
                {labels[name]: times[name] for name in WAYS},
                "MB",
                "seconds",
                "xy",
            )
        ],
        compared=[Compared("the last checkpoint of each way", len(WAYS) * len(shapes), equal)],
        settings={"shapes": [[one.width, one.layers] for one in shapes], "rounds": rounds},
    )


def _measured(
    asked: Asked, kinds: dict[str, type[Strategy]], shape: Shape, rounds: int
) -> tuple[dict[str, list[float]], int, int]:
    """Seconds by way, bytes of the state, and how many ways restored it."""
    trainer = Trainer(shape)
    trainer.take()
    ways = {}
    for name, kind in kinds.items():
        folder = asked.scratch / name
        folder.mkdir()
        ways[name] = kind(folder, trainer, Options(), Ledger())
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + SKIPPED):
        trainer.step += 1  # steps of a store ascend
        order = list(kinds)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.perf_counter()
            ways[name].save(trainer.step)
            ways[name].settle()
            if turn >= SKIPPED:
                found[name].append(time.perf_counter() - began)
            for path in sorted((asked.scratch / name).glob("step-*"))[:-1]:
                path.unlink()
    equal = 0
    for name, kind in kinds.items():
        ways[name].close()
        other = Trainer(shape, seed=2)
        other.take()
        equal += kind.restore(asked.scratch / name, other) == trainer.step and digest(other.state()) == digest(
            trainer.state()
        )
        shutil.rmtree(asked.scratch / name)
    return found, 12 * trainer.parameters, equal
