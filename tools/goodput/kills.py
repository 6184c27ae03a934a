"""A real job that is killed at given times, and restored each time: its goodput, counted.

Each life is a process (`training_worker live`), killed with SIGKILL. The time from one kill until the next life trains
counts: a start (warm: a fork that has imported torch), the restore, the writer.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.bench.storage.rounds import WorkerError
from tools.bench.training.training_cases import Case, Plan, finished

__all__ = ["Lives", "digests", "lived"]


@dataclass(slots=True)
class Lives:
    """A job's lives.

    Attributes:
        seconds: of the whole.
        useful: the last step.
        again: steps that were trained more than once.
        down: seconds from each kill until the next life trained.
        restored: of every life but the first, the step that it began from, and the digest of its state.
    """

    seconds: float
    useful: int = 0
    again: int = 0
    down: list[float] = field(default_factory=list)
    restored: list[tuple[int, str]] = field(default_factory=list)

    def equal(self, known: dict[int, str]) -> int:
        """How many of the restored states are the trained ones, bit for bit; a start from nothing is."""
        return sum(not step or known.get(step) == told for step, told in self.restored)


def lived(plan: Plan, case: Case, kills: Sequence[float], seconds: float) -> Lives:
    """Run a job for some seconds, and kill it at the times.

    Raises:
        WorkerError: a life ended by itself.
    """
    folder, found = plan.scratch / f"lives-{case.strategy}-{case.interval}", Lives(seconds)
    folder.mkdir()
    begin, killed = time.monotonic(), 0.0
    try:
        for end in [*(at for at in kills if at < seconds), seconds]:
            if begin + end > time.monotonic():  # else it is still being restored from the kill before
                killed = _life(plan, case, folder, begin + end, killed, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _life(plan: Plan, case: Case, folder: Path, end: float, killed: float, found: Lives) -> float:
    """One life, until a time of the monotonic clock -> when it was killed."""
    with tempfile.TemporaryFile("w+", dir=plan.scratch) as trouble, plan.begun("live", case, folder, trouble) as life:
        timer = threading.Timer(end - time.monotonic(), lambda: life.send_signal(signal.SIGKILL))
        timer.start()
        assert life.stdout is not None
        reached = None
        for line in life.stdout:
            try:
                said: dict[str, Any] = json.loads(line)
            except ValueError:
                break  # it was killed as it wrote
            if "restored" in said:
                reached = said["restored"]
                if killed:
                    found.down.append(time.monotonic() - killed)
                    found.restored.append((reached, said["digest"]))
                    found.again += max(0, found.useful - reached)
            elif "step" in said and said["at"] <= end:
                reached = said["step"]
        timer.cancel()
        if life.wait() != -signal.SIGKILL:
            trouble.seek(0)
            raise WorkerError((trouble.read().strip().splitlines() or ["a life ended by itself"])[-1])
        if reached is not None:
            found.useful = reached
    return end


def digests(plan: Plan, base: str, steps: int) -> dict[int, str]:
    """The digest of every step of a job without saves. `base`: the strategy of its loop, ``none`` or ``none-topk``."""
    folder = plan.scratch / "reference"
    case = Case("loop", base, max(1, steps))
    found = finished(replace(plan, steps=1), "digests", case, folder)["digests"]
    shutil.rmtree(folder, ignore_errors=True)
    return {int(step): told for step, told in found.items()}
