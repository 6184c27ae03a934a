"""A real job that is killed at given times, and restored each time: its goodput, counted.

Each life is a process (`tools.goodput.life`), killed with SIGKILL. The time from one kill until the next life trains
counts: a start (warm: a fork that has imported torch), the restore, the writer.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any
from unittest import mock

from tools.bench.training.training_cases import RANK, Case, Plan, finished
from tools.goodput.life import begun
from tools.objects.server import free_port

__all__ = ["Lives", "digests", "lived", "note"]


@dataclass(slots=True)
class Lives:
    """A job's lives.

    Attributes:
        seconds: of the whole.
        useful: the last step.
        again: steps that were trained more than once.
        down: seconds from each kill until the next life trained.
        restored: of every life but the first, the step that it began from, and the digest of its state.
        each: seconds of every step, from the one before in the same life.
        start: seconds until a life trained for the first time; None: none has.
    """

    seconds: float
    useful: int = 0
    again: int = 0
    down: list[float] = field(default_factory=list)
    restored: list[tuple[int, str]] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    start: float | None = None

    def equal(self, known: dict[int, str]) -> int:
        """How many of the restored states are the trained ones, bit for bit; a start from nothing is."""
        return sum(not step or known.get(step) == told for step, told in self.restored)


def lived(plan: Plan, case: Case, kills: Sequence[float], seconds: float, ranks: int = 1) -> Lives:
    """Run a job for some seconds, and kill it at the times.

    Args:
        ranks: processes of the job, of the strategy ``ranks``; all are killed. The steps are those of rank 0.

    Raises:
        WorkerError: a life ended by itself.
    """
    folder, found = plan.scratch / f"lives-{case.strategy}-{case.interval}", Lives(seconds)
    folder.mkdir()
    begin = since = time.monotonic()
    try:
        for end in [*(at for at in kills if at < seconds), seconds]:
            if begin + end <= time.monotonic():
                continue  # it is still being restored from the kill before
            port = free_port() if ranks > 1 else 0

            def start(rank: int, trouble: IO[str], port: int = port) -> Any:
                told = {RANK: f"{rank},{ranks},{port}"} if ranks > 1 else {}
                with mock.patch.dict(os.environ, told):
                    return plan.begun("live", case, folder, trouble)

            with begun(start, plan.scratch, ranks) as life:
                life.kill_at(begin + end)
                note(life.says(), begin + end, begin if found.start is None else since, found)
            since = begin + end
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def note(said: Iterable[dict[str, Any]], end: float, since: float, found: Lives) -> None:
    """Note what a life says until it is killed.

    Args:
        end: when it is killed, on the monotonic clock. since: when the one before was; until one has trained, when the
            job began.
    """
    reached, last = None, 0.0
    for document in said:
        if "restored" in document:
            reached, last = document["step"], document["restored"]
            if found.start is None:
                found.start = last - since
            else:
                found.down.append(last - since)
                found.restored.append((reached, document["state"]))
                found.again += max(0, found.useful - reached)
        elif "at" in document and document["at"] <= end:
            found.each.append(document["at"] - last)
            reached, last = document["step"], document["at"]
    if reached is not None:
        found.useful = reached


def digests(plan: Plan, base: str, steps: int, restarts: Sequence[int] = ()) -> dict[int, str]:
    """The digest of every step of a job without saves.

    Args:
        base: the strategy of its loop, ``none`` or ``none-topk``.
        restarts: the steps that lives of the job restored; the residuals of compressed gradients are not among what
            they restored (`TopKHook(exact=False)`).
    """
    folder = plan.scratch / "reference"
    case = Case("loop", base, max(1, steps))
    words = ["--restarts", *map(str, restarts)]
    found = finished(replace(plan, steps=1), "digests", case, folder, words)["digests"]
    shutil.rmtree(folder, ignore_errors=True)
    return {int(step): told for step, told in found.items()}
