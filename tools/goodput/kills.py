"""A real job that is killed at given times, and restored each time: its goodput, counted.

Each life is a process (`training_worker live`), killed with SIGKILL. The time from one kill until the next life trains
counts: a start (warm: a fork that has imported torch), the restore, the writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tools.bench.storage.rounds import WorkerError
from tools.bench.training.training_cases import RANK, Case, Plan, finished

__all__ = ["Lives", "digests", "lived", "read"]


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


def lived(plan: Plan, case: Case, kills: Sequence[float], seconds: float, ranks: int = 1) -> Lives:
    """Run a job for some seconds, and kill it at the times.

    Args:
        ranks: processes of the job, of the strategy ``ranks``; all are killed. The steps are those of rank 0.

    Raises:
        WorkerError: a life ended by itself.
    """
    folder, found = plan.scratch / f"lives-{case.strategy}-{case.interval}", Lives(seconds)
    folder.mkdir()
    begin, killed = time.monotonic(), 0.0
    try:
        for end in [*(at for at in kills if at < seconds), seconds]:
            if begin + end > time.monotonic():  # else it is still being restored from the kill before
                with contextlib.ExitStack() as stack:
                    trouble = stack.enter_context(tempfile.TemporaryFile("w+", dir=plan.scratch))
                    life = stack.enter_context(_begun(plan, case, folder, trouble, ranks))
                    read(life, begin + end, killed, found)
                    if any(one.wait() != -signal.SIGKILL for one in life):
                        trouble.seek(0)
                        raise WorkerError((trouble.read().strip().splitlines() or ["a life ended by itself"])[-1])
                killed = begin + end
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


@contextlib.contextmanager
def _begun(plan: Plan, case: Case, folder: Path, trouble: IO[str], ranks: int) -> Iterator[list[Any]]:
    """The processes of one life."""
    with contextlib.ExitStack() as stack:
        found: list[Any] = []
        port = _free_port()
        for rank in range(ranks):
            told = {RANK: f"{rank},{ranks},{port}"} if ranks > 1 else {}
            with mock.patch.dict(os.environ, told):
                found.append(stack.enter_context(plan.begun("live", case, folder, trouble)))
        for one in found[1:]:
            threading.Thread(target=one.stdout.read, daemon=True).start()  # so that its pipe is never full
        yield found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def read(life: Sequence[Any], end: float, killed: float, found: Lives) -> None:
    """What a life says until it is killed, at a time of the monotonic clock. `killed`: when the one before was."""

    def kill() -> None:
        for one in life:
            one.send_signal(signal.SIGKILL)

    timer = threading.Timer(end - time.monotonic(), kill)
    timer.start()
    reached = None
    for line in life[0].stdout:
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
    if any(one.poll() is None for one in life[1:]):
        timer.join()  # rank 0 may have ended by itself: the others are killed all the same
    timer.cancel()
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
