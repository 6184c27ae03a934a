"""LightCheck, Fig. 7 and 8: how steadily the trainer's processor is used while checkpoints are taken.

The paper samples a GPU's memory and computation every 50 ms. Here the trainer is a thread on one core: its processor
time, and the process's memory, every 50 ms.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Final

from tools.bench.training.every_step_turns import Worker
from tools.bench.training.training_cases import Case
from tools.papers.loops import LABELS, planned
from tools.papers.lowdiff.overhead import SHAPE, TINY
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table

__all__ = ["run"]

WAYS: Final = (("none", 1), ("layer-host", 2), ("checkfreq", 2), ("torch.save", 2))
PERIOD: Final = 0.05
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def run(asked: Asked) -> Result:
    """Run the experiment."""
    shape, steps = asked.pick(TINY, SHAPE, SHAPE), asked.pick(4, 16, 80)
    used: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    restored = 0
    with planned(asked, shape) as plan:
        for name, interval in WAYS:
            with Worker(plan, Case("loop", name, interval)) as worker:
                watch = _Watch(worker.pid)
                watch.start()
                worker.ask(steps)
                watch.stop()
                restored += "restore_s" in worker.ask(0)
            used[name], memory[name] = watch.used(), watch.memory
            asked.told(f"{name}: {statistics.fmean(used[name]):.0%} of a core")
    base = statistics.fmean(used["none"])
    rows = [
        (
            *(LABELS[name], statistics.fmean(values) / base, min(_windows(values)) / base),
            *(statistics.pstdev(_windows(values)), memory[name] / 1e6),
        )
        for name, values in used.items()
    ]
    by = dict(zip(used, rows, strict=True))
    columns = ("way", "processor used, of training alone", "least 0.25 s", "deviation", "memory MB")
    formats = dict.fromkeys(columns[1:4], ".2f") | {"memory MB": ".0f"}
    length = min(map(len, used.values()))
    return Result(
        tables=[
            Table(f"The training thread's use of its core, saved every {WAYS[1][1]} iterations", columns, rows, formats)
        ],
        claims=[
            Claim(
                "layer-wise saving keeps the utilization stable; CheckFreq's drops to 0 while it saves",
                "stable, drops to 0",
                ", ".join(f"{LABELS[name]} {by[name][2]:.0%}" for name in ("layer-host", "checkfreq", "torch.save")),
                float(by["layer-host"][2]) >= float(by["torch.save"][2]),
                "CheckFreq waits for its last save before the next one begins, so it drops where saves are more "
                "frequent than the medium takes them",
            ),
        ],
        figures=[
            Figure(
                "Use of the training thread's core",
                "lines",
                [round(PERIOD * place, 3) for place in range(length)],
                {LABELS[name]: values[:length] for name, values in used.items()},
                x="s",
                y="of a core",
            )
        ],
        compared=[Compared("the last checkpoint of each loop", len(WAYS) - 1, restored)],
        remarks=["Processor time is counted in ticks of 10 ms; the figure shows samples of 50 ms."],
        settings={"shape": shape, "steps": steps},
    )


def _windows(values: list[float], width: int = 5) -> list[float]:
    """Means of a quarter of a second."""
    return [statistics.fmean(values[at : at + width]) for at in range(0, max(1, len(values) - width + 1), width)]


class _Watch(threading.Thread):
    """Samples a process's first thread."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.memory = 0.0
        self._samples: list[tuple[float, float]] = []
        self._end = threading.Event()

    def run(self) -> None:
        stat = Path(f"/proc/{self.pid}/task/{self.pid}/stat")
        while True:
            fields = stat.read_text().rpartition(")")[2].split()
            self._samples.append((time.monotonic(), (int(fields[11]) + int(fields[12])) / _TICKS))
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.memory = max(self.memory, pages * os.sysconf("SC_PAGE_SIZE"))
            if self._end.wait(PERIOD):
                return

    def stop(self) -> None:
        """End, and keep what it saw."""
        self._end.set()
        self.join()

    def used(self) -> list[float]:
        """Shares of a core, sample by sample."""
        pairs = zip(self._samples, self._samples[1:], strict=False)
        return [(later[1] - now[1]) / (later[0] - now[0]) for now, later in pairs] or [0.0]
