"""LightCheck, Fig. 10: a layer at a time against the whole state at once, on the same medium.

The loops are those of `tools.bench.training.layerwise`, interleaved in one process. *Whole*: training waits until the
state is copied (`save_async`). *Layer by layer*: each layer is copied once it is updated, and its next update waits for
that copy alone. *Direct*: layers are copied into shared memory that stands for PM; whole states go to the disk.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch

from tools.bench.training.layerwise import Settings, measure
from tools.bench.training.training_loop import Shape, Trainer, digest
from tools.bench.training.training_strategies import STRATEGIES, Ledger, Options
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table

__all__ = ["run"]

SHARED: Final = Path("/dev/shm")


def run(asked: Asked) -> Result:
    """Run the experiment."""
    settings = asked.pick(
        Settings(width=32, blocks=2, rows=16, every=1, saves=2, pin=True),
        Settings(width=256, blocks=4, rows=192, every=2, saves=5, pin=True),
        Settings(width=512, blocks=6, rows=256, every=3, saves=4, pin=True),
    )
    rounds = asked.pick(1, 2, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure(settings, rounds, asked.scratch, SHARED if SHARED.is_dir() else None)
    finally:
        torch.set_num_threads(threads)
    loops = {one.way: one for one in found}
    base = {name: loops[f"{name}: no saves"].loop for name in ("one AdamW", "AdamW in backward")}
    over = {one.way: one.loop / base[one.way.partition(": ")[0]] - 1 for one in found}
    rows = [
        (one.way, over[one.way], 1e3 * one.loss, 1e3 * one.stall, 1e3 * one.copying)
        for one in found
        if not one.way.endswith("no saves")
    ]
    columns = ("way", "slowdown", "a save costs ms", "training waits ms", "copying ms")
    whole, layered = "AdamW in backward: save_async", "AdamW in backward: layer by layer"
    equal = sum(_equal(asked.scratch / mode, mode) for mode in ("layer-host", "layer-device", "layer-direct"))
    ways = [str(row[0]) for row in rows]
    return Result(
        tables=[
            Table(
                f"A save every {settings.every} iterations",
                columns,
                rows,
                {"slowdown": ".1%"} | dict.fromkeys(columns[2:], ".1f"),
            )
        ],
        claims=[
            Claim(
                "layer-wise checkpointing costs up to 10 %, whole states on the same medium up to 41 %",
                "<= 10 % against <= 41 %",
                f"{over[layered]:.1%} against {over[whole]:.1%}",
                over[layered] < over[whole],
                "copies by another thread take memory bandwidth from a trainer on the CPU, as the copy in the call "
                "does; only the waiting is gone"
                if over[layered] >= over[whole]
                else "",
            ),
            Claim(
                "training waits less for layers than for whole states",
                "less",
                f"{loops[layered].stall * 1e3:.1f} ms against {loops[whole].stall * 1e3:.1f} ms",
                loops[layered].stall < loops[whole].stall,
                "the state is copied faster than a layer's next update comes",
            ),
        ],
        figures=[
            Figure(
                "Slowdown",
                "bars",
                [way.replace(": ", "\n") for way in ways],
                {"here": [over[way] for way in ways]},
                limit=0.1,
            )
        ],
        compared=[Compared("a state from layer-wise snapshots, in each mode", 3, equal)],
        settings={"settings": repr(settings), "rounds": rounds},
    )


def _equal(folder: Path, name: str) -> bool:
    """Whether what layer-wise snapshots saved while training went on is what was trained."""
    place = Path(tempfile.mkdtemp(dir=SHARED)) if name == "layer-direct" and SHARED.is_dir() else folder
    place.mkdir(parents=True, exist_ok=True)
    try:
        shape = Shape(32, 2, 1, 16)
        trainer = Trainer(shape)
        trainer.take()
        way = STRATEGIES[name](place, trainer, Options(2), Ledger())
        trained = ""
        for _ in range(5):
            trainer.backward()
            way.before_update()
            trainer.update()
            if trainer.step % 2 == 0:
                way.save(trainer.step)
                trained = digest(trainer.state())
            trainer.clear()
        way.close()
        other = Trainer(shape, seed=2)
        other.take()
        return STRATEGIES[name].restore(place, other) == 6 and digest(other.state()) == trained
    finally:
        if place != folder:
            shutil.rmtree(place)
